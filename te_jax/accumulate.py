"""Several calls of a model in one optimizer step: kernels quantized once, gradients accumulated over microbatches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core.scope import DenyList
from jax import Array

from te_jax import compat, main_grad_loop
from te_jax.arguments import split_arrays
from te_jax.errors import check_type, check_value
from te_jax.parallel import explicit, mesh
from te_jax.quant import state as fp8_state
from te_jax.quant.state import COLLECTION, KERNELS, MAIN_GRAD
from te_jax.quant.state_trees import rebuild
from te_jax.run_variables import making_kernels

Variables = Mapping[str, Any]


def quantize_kernels(module: nn.Module, variables: Variables, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """``variables`` with the kernels of all quantized linears in FP8, in the collection ``fp8_kernels``.

    A module applied with that collection uses them instead of quantizing its kernels again, so that several forward
    passes of an optimizer step quantize each kernel once. Gradients go to ``params`` all the same, and the FP8 state
    gets the scale and amax that were used. Values are those of a call without the collection.

    Call it inside of the jitted step, where the forward pass that finds the linears disappears: only its kernels are
    used. Don't keep the collection: once the parameters have changed it is stale, which nothing notices.
    ``te.state.split`` leaves it out, so what is made of its results has no stale kernels.

    Args:
      module: any linen module; te_jax chains in it are found. Those in ``nn.scan`` or ``nn.vmap`` need the collection
        in ``variable_axes``, as parameters do.
      variables: what ``module.init`` returned; an ``fp8_kernels`` among it is replaced.
      *args, **kwargs: as for ``module.apply``, of the shapes of the later calls (a linear is quantized or not
        depending on them); arrays or ``jax.ShapeDtypeStruct``, whose values don't matter. What the call would write to
        other collections (batch statistics) is dropped, ``mutable`` makes no difference.

    Returns:
      {**variables, "fp8_kernels": ...}: per linear ``data``, ``data_t`` (FP8) and their f32 scales, amax under a recipe
      with state.

    Raises:
      ValueError: no linear of the module is quantized (the message says why), or one is where the collection can't be
        written.
    """
    check_type(
        isinstance(module, nn.Module), "quantize_kernels", "module", "a flax.linen module", type(module).__name__
    )
    _check_variables("quantize_kernels", variables)
    given, rebuild = split_arrays((args, {name: value for name, value in kwargs.items() if name != "mutable"}))

    unquantized: dict[str, str] = {}

    def make(variables: Variables, arrays: list[Any]) -> Any:
        args, kwargs = rebuild(arrays)
        with making_kernels() as why:
            _, made = module.apply(variables, *args, **kwargs, mutable=DenyList(("params", COLLECTION)))
        unquantized.update(why)
        return made.get(KERNELS, {})

    rest = {name: value for name, value in variables.items() if name != KERNELS}
    arrays = [_as_array(array) for array in given]
    # Gradients go to the parameters in the backward passes of the calls that use the kernels.
    made = jax.jit(make)(jax.lax.stop_gradient(rest), jax.lax.stop_gradient(arrays))
    expected = "a module with linears that are quantized, one scale for each kernel (see its plan)"
    reasons = "; ".join(f"{label}: {why}" for label, why in unquantized.items())
    got = f"one without for these arguments: {reasons}" if reasons else "one without"
    check_value(bool(jax.tree.leaves(made)), "quantize_kernels", "module", expected, got)
    return {**rest, KERNELS: made}


def accumulate_gradients(
    loss_fn: Callable[[Any, Any], Array],
    variables: Variables,
    batch: Any,
    *,
    num_microbatches: int,
    main_grad: bool = False,
) -> tuple[Array, dict[str, Any]]:
    """Loss and gradients of a batch, one microbatch after the other: as of the whole batch, with less memory.

    ``loss_fn(variables, microbatch)`` is a mean over its examples; the results are means over microbatches, taken in
    float32 and rounded once. FP8 state gets the exact maximum of the microbatches' amaxes. An ``fp8_kernels``
    collection (``te.quantize_kernels``) is handed to each call and not differentiated, so kernels are not quantized
    again:

      loss, grads = te.accumulate_gradients(
          loss_fn, te.quantize_kernels(model, variables, x[:16]), (x, y), num_microbatches=8
      )

    Dropout: put an array of keys into the batch, ``jax.random.split(key, B)``, and take the first of a microbatch,
    ``rngs={"dropout": microbatch["keys"][0]}``; a key that ``loss_fn`` closes over draws the same for every microbatch.

    Args:
      loss_fn: (variables, microbatch) -> f32[], differentiable in all variables; no auxiliary results.
      variables: a dict of collections.
      batch: arrays [B, ...]. Microbatch i holds the rows i, i + num_microbatches, ...: every device's part of a
        sharded batch is a part of every microbatch, and no row moves.
      num_microbatches: a divisor of B.
      main_grad: wgrad GEMMs of linears add to float32 buffers, instead of writing a gradient that is added to the sum
        later: no second tree of gradients, no pass over it. Kernels of other layers, and those that several linears
        share or that a branch may leave out, keep their ordinary gradients. The first microbatch is a part of the
        program of its own: it overwrites. Linears in ``nn.scan`` or ``nn.vmap`` need the collection ``main_grad`` in
        ``variable_axes``; a warning names those without.

    Returns:
      (loss f32[], gradients): those of all collections but ``fp8_kernels``, in the dtypes of the variables.

    Raises:
      ValueError, TypeError: naming the argument. With ``main_grad`` also if no kernel qualifies, with the reason for
        each: a step that was asked to and does not is slower without a word.
    """
    op = "accumulate_gradients"
    _check_variables(op, variables)
    ok = isinstance(num_microbatches, int) and not isinstance(num_microbatches, bool) and num_microbatches > 0
    check_value(ok, op, "num_microbatches", "a positive int", repr(num_microbatches))
    _check_batch(op, batch, num_microbatches)
    kernels = {name: value for name, value in variables.items() if name == KERNELS}
    check_value(MAIN_GRAD not in variables, op, "variables", f"no {MAIN_GRAD!r} (main_grad=True makes it)", "one")
    differentiated = {name: value for name, value in variables.items() if name != KERNELS}
    _check_differentiable(op, differentiated)
    rows = jax.tree.map(lambda x: _by_microbatch(x, num_microbatches), batch)

    def checked_loss(variables: Any, microbatch: Any) -> Array:
        loss = loss_fn({**variables, **kernels}, microbatch)
        _check_loss(op, loss)
        return loss

    def microbatch_of(i: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 1, keepdims=False), rows)

    if main_grad:
        loss, grads = main_grad_loop.run(checked_loss, differentiated, microbatch_of, num_microbatches)
        return loss, rebuild(variables, grads)

    def body(sums: Any, i: Array) -> tuple[Any, tuple[Array, Any]]:
        loss, grads = jax.value_and_grad(checked_loss)(differentiated, microbatch_of(i))
        grads, state = fp8_state.split(grads)
        with compat.numpy_promotion():
            sums = jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), sums, grads)
        return sums, (loss.astype(jnp.float32), state)

    params, state = fp8_state.split(differentiated)
    zeros = jax.tree.map(compat.zeros_like, params, jax.tree.map(main_grad_loop.wide, params))
    sums, (losses, states) = jax.lax.scan(body, zeros, jnp.arange(num_microbatches))
    with compat.numpy_promotion():
        grads = jax.tree.map(lambda total, p: (total / num_microbatches).astype(p.dtype), sums, params)
        loss = jnp.mean(losses)
    grads = fp8_state.merge(grads, fp8_state.accumulate_stacked(states)) if state else grads
    return loss, rebuild(variables, grads)


def _check_variables(op: str, variables: Any) -> None:
    check_type(isinstance(variables, Mapping), op, "variables", "a dict of collections", type(variables).__name__)


def _check_differentiable(op: str, variables: Any) -> None:
    for path, leaf in jax.tree.leaves_with_path(variables):
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
        name, expected = "variables" + jax.tree_util.keystr(path), "a floating point dtype, as it is differentiated"
        check_type(jnp.issubdtype(dtype, jnp.inexact), op, name, expected, dtype)


def _check_loss(op: str, loss: Any) -> None:
    expected = "to return a scalar of a floating dtype, nothing beside it"
    is_array = hasattr(loss, "shape") and hasattr(loss, "dtype")
    check_type(is_array, op, "loss_fn", expected, type(loss).__name__)
    check_value(loss.shape == (), op, "loss_fn", expected, f"shape {loss.shape}")
    check_type(jnp.issubdtype(loss.dtype, jnp.floating), op, "loss_fn", expected, loss.dtype)


def _check_batch(op: str, batch: Any, num_microbatches: int) -> None:
    leaves = jax.tree.leaves_with_path(batch)
    check_value(len(leaves) > 0, op, "batch", "at least one array", "none")
    size = None
    for path, leaf in leaves:
        name = "batch" + jax.tree_util.keystr(path)
        shape = np.shape(leaf)
        check_value(len(shape) > 0, op, name, "an array [B, ...]", f"shape {shape}")
        size = shape[0] if size is None else size
        check_value(shape[0] == size, op, name, f"{size} rows, as the others", shape[0])
        ok = shape[0] > 0 and shape[0] % num_microbatches == 0
        check_value(ok, op, name, f"a multiple of num_microbatches={num_microbatches} rows", shape[0])
        shards = _explicit_shards(leaf)
        ok = shape[0] // num_microbatches % shards == 0
        expected = f"a multiple of num_microbatches={num_microbatches} times its {shards} shards rows"
        check_value(ok, op, name, expected, shape[0])


def _explicit_shards(x: Any) -> int:
    """Over how many devices the rows are split by Explicit axes, where a microbatch has to be split evenly."""
    if not isinstance(x, jax.Array) or (entry := explicit.spec_entries(x)[0]) is None:
        return 1
    return math.prod(mesh.regime(x).mesh.shape[axis] for axis in ((entry,) if isinstance(entry, str) else entry))


def _by_microbatch(x: Any, num_microbatches: int) -> Array:
    """[B, ...] -> [B / n, n, ...]."""
    x = jnp.asarray(x)
    return x.reshape(x.shape[0] // num_microbatches, num_microbatches, *x.shape[1:])


def _as_array(leaf: Any) -> Any:
    return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
