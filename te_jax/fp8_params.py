"""Parameters for inference: the kernels of quantized linears in FP8, at half the memory of bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from te_jax.arguments import split_arrays
from te_jax.errors import check_collections, check_type, check_value
from te_jax.fusion import inference
from te_jax.quant.state import KERNELS

Variables = Mapping[str, Any]


def quantize_params(module: nn.Module, variables: Variables, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """``variables`` in which each kernel that the module quantizes is FP8 data and its scale, and nothing else.

    In place of ``kernel`` [K, N] is ``kernel/data_t`` FP8 [N, K] and ``kernel/scale_inv`` f32[] (block scaling:
    ``scale_inv_t`` of its 128x128 blocks), under leading dimensions that the kernel has (the layers of ``nn.scan``):
    plain leaves, which checkpoints and shardings take as they are. Of a grouped linear [G, K, N] they are FP8 [G, N, K]
    and f32[G]; in block scaling its kernel stays as it is. The module applied to it gives what it gives with the
    kernels themselves, bit for bit. It can't be differentiated.

    Args:
      module: any linen module; te_jax chains in it are found. Other modules' parameters stay as they are.
      variables: what ``module.init`` returned, or training made of it. FP8 state (delayed scaling) says the kernels'
        scales, and stays for those of x.
      *args, **kwargs: as for ``module.apply``, of the shapes of the later calls (a linear is quantized or not
        depending on them); arrays or ``jax.ShapeDtypeStruct``, whose values don't matter.

    Returns:
      ``variables`` with other ``params``.

    Raises:
      ValueError: no kernel of the module becomes FP8; a kernel isn't of the ``param_dtype`` of a module without a
        ``dtype``, which wouldn't know what to compute in; or linears share a kernel under delayed scaling.
    """
    op = "quantize_params"
    check_type(isinstance(module, nn.Module), op, "module", "a flax.linen module", type(module).__name__)
    check_collections(op, "variables", variables)
    check_value("params" in variables, op, "variables", "a 'params' collection", sorted(variables))
    rest = {name: value for name, value in variables.items() if name != KERNELS}
    kwargs = {name: value for name, value in kwargs.items() if name != "mutable"}
    given, rebuild = split_arrays((args, kwargs))
    replaced: list[str] = []

    def make(variables: Variables, arrays: list[Any]) -> Any:
        args, kwargs = rebuild(arrays)
        with inference.making() as made:
            _, out = module.apply(variables, *args, **kwargs, mutable=["params"])
        replaced.extend(made)
        return out["params"]

    params = jax.jit(make)(rest, [jnp.zeros(array.shape, array.dtype) for array in given])
    already = any(inference.is_quantized(leaf) for leaf in jax.tree.leaves(params, is_leaf=inference.is_quantized))
    check_value(not already or bool(replaced), op, "variables", "kernels in high precision", "kernels in FP8 already")
    expected = "a module with linears that are quantized (see its plan), not all of them grouped in block scaling"
    check_value(bool(replaced), op, "module", expected, "one without for these arguments")
    return {**rest, "params": params}


def dequantize_params(params: Mapping[str, Any], like: Any) -> Any:
    """The kernels of ``quantize_params`` in high precision again: float32(data) * scale, in ``like``'s dtypes.

    Args:
      params: a ``params`` collection, from ``quantize_params`` or a checkpoint of it.
      like: the parameters wanted, arrays or ``jax.ShapeDtypeStruct``: ``jax.eval_shape(model.init, ...)["params"]``.

    Returns:
      A tree as ``like``. Parameters that are not in FP8 stay as they are.

    Raises:
      ValueError: names, shapes or dtypes differ, naming the parameter.
    """
    op = "dequantize_params"
    flat, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=inference.is_quantized)
    have = {jax.tree_util.keystr(path, simple=True, separator="/"): value for path, value in flat}
    wanted = jax.tree_util.tree_leaves_with_path(like)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in wanted]
    check_value(set(have) == set(names), op, "params", sorted(names), sorted(have))
    out = []
    for name, (_, want) in zip(names, wanted, strict=True):
        value = have[name]
        if inference.is_quantized(value):
            value = inference.dequantize(value, want, name)
        ok = value.shape == want.shape and value.dtype == want.dtype
        check_value(ok, op, name, f"{want.dtype}{list(want.shape)}", f"{value.dtype}{list(value.shape)}")
        out.append(value)
    return jax.tree.unflatten(jax.tree.structure(like), out)
