"""Gradient accumulation for nnx models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import Array

from te_jax import accumulate
from te_jax.errors import check_value
from te_jax.nnx import main_grad as buffers
from te_jax.nnx.state import ANY_FP8_STATE, DIFFERENTIATED, FP8State
from te_jax.quant import state as fp8_state
from te_jax.quant.state import COLLECTION, MAIN_GRAD


def accumulate_gradients(
    loss_fn: Callable[[Any, Any], Array], model: Any, batch: Any, *, num_microbatches: int, main_grad: bool = False
) -> tuple[Array, nnx.State]:
    """Loss and gradients of a batch, one microbatch after the other; the FP8 state makes one step, as for the batch.

    ``te.accumulate_gradients`` for an nnx model: means over microbatches, taken in float32. The model's FP8 state is
    overwritten with the exact maximum of the microbatches' amaxes (``te.nnx.grad`` in a loop makes a step for each).

    Args:
      loss_fn: (model, microbatch) -> f32[], a mean over its examples. It may not change other Variables: for dropout,
        put keys into the batch and call ``model(x, rngs=nnx.Rngs(dropout=microbatch["keys"][0]))``.
      model: differentiated with respect to its ``nnx.Param``.
      batch: arrays [B, ...]. Microbatch i holds the rows i, i + num_microbatches, ....
      num_microbatches: a divisor of B.
      main_grad: as for ``te.accumulate_gradients``; modules of te.nnx are handed their buffers by this function, in
        scans and vmaps over layers too.

    Returns:
      (loss f32[], gradients), as of ``te.nnx.value_and_grad``.

    Raises:
      ValueError, TypeError: naming the argument; also if ``loss_fn`` changes Variables, which would be lost.
    """
    graphdef, params, fp8, rest = nnx.split(model, nnx.Param, ANY_FP8_STATE, ...)

    def pure_loss(variables: Any, microbatch: Any) -> Array:
        leaves = jax.tree.leaves(variables.get(COLLECTION, {}))
        own_fp8 = jax.tree.unflatten(jax.tree.structure(fp8), leaves)
        own_rest = jax.tree.map(lambda leaf: leaf, rest)  # new Variables, which this trace may change
        merged = nnx.merge(graphdef, variables["params"], own_fp8, own_rest)
        nodes = {path: node for path, node in nnx.iter_graph(merged) if isinstance(node, nnx.Variable)}
        buffers.attach(merged, variables.get(MAIN_GRAD, {}))
        before = {path: node.get_raw_value() for path, node in nodes.items()}
        for node in nodes.values():
            if isinstance(node, FP8State):
                node.set_metadata(DIFFERENTIATED, True)
        loss = loss_fn(merged, microbatch)
        changed = ["/".join(map(str, path)) for path, node in nodes.items() if node.get_raw_value() is not before[path]]
        expected = "to change no Variables but FP8 state (keys for dropout can be in the batch)"
        check_value(not changed, "nnx.accumulate_gradients", "loss_fn", expected, f"changes to {', '.join(changed)}")
        return loss

    state = nnx.to_pure_dict(fp8)
    variables = {"params": params, **({COLLECTION: state} if state else {})}
    options: dict[str, Any] = {"num_microbatches": num_microbatches, "main_grad": main_grad}
    loss, grads = accumulate.accumulate_gradients(pure_loss, variables, batch, **options)
    if state:
        nnx.update(model, fp8_state.apply(state, grads[COLLECTION]))
    return loss, grads["params"]
