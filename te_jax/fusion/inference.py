"""Kernels that are kept in FP8 alone, for inference: what takes the place of ``kernel`` among a model's parameters.

Of a kernel [K, N] only what fprop reads is kept, a dict of two leaves beside each other:

  data_t                    FP8 [N, K]
  scale_inv or scale_inv_t  f32[], or of the 128x128 blocks of data_t: kernel ~ float32(data_t)^T * scale_inv

Of a grouped linear's kernel [G, K, N] it is FP8 [G, N, K] and f32[G].
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Generator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from te_jax.errors import check_value
from te_jax.fusion.execute import Kernels, quantize_kernels
from te_jax.fusion.run import Run
from te_jax.ops.base import TensorType
from te_jax.quant.format import format_of, is_fp8
from te_jax.quant.tensor import QTensor

KERNEL = "kernel"
DATA = "data_t"
SCALES = ("scale_inv", "scale_inv_t")

_making: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("te_jax_making_params", default=None)


@contextlib.contextmanager
def making() -> Generator[list[str]]:
    """Chains that are applied inside, with mutable ``params``, replace kernels that they quantize by FP8 ones.

    Yields:
      The paths of what was replaced; filled by the calls inside.
    """
    made: list[str] = []
    token = _making.set(made)
    try:
        yield made
    finally:
        _making.reset(token)


def making_now() -> list[str] | None:
    """What the surrounding ``making`` yielded; None outside of one."""
    return _making.get()


def replaced(path: str) -> None:
    """Enters the path of a kernel that was replaced."""
    if (made := _making.get()) is not None:
        made.append(path)


def is_quantized(value: Any) -> bool:
    """Whether a parameter is a kernel in FP8."""
    return isinstance(value, Mapping) and DATA in value


def make(run: Run, params: Any, state: Any) -> dict[str, dict[str, jax.Array]]:
    """Scope -> kernel in FP8, of the run's linears that are quantized, as a call that isn't differentiated has them.

    Raises:
      ValueError: linears share a kernel and have FP8 state of their own each, so that no one FP8 kernel is theirs.
    """
    out: dict[str, dict[str, jax.Array]] = {}
    for info, made in zip(run.links, quantize_kernels(run, params, state, train=False), strict=True):
        if made is None or DATA not in made:  # fprop of groups in block scaling reads other blocks than these
            continue
        expected = "linears that share a kernel to share its scale too (CurrentScaling, BlockScaling)"
        check_value(info.scope not in out or not state, "quantize_params", info.label, expected, "a scale for each")
        out[info.scope] = {name: made[name] for name in (DATA, *SCALES) if name in made}
    return out


def split(run: Run, params: Any, state: Any, param_dtype: Any) -> tuple[Any, Kernels | None]:
    """The parameters without kernels in FP8, and those by link; None if there are none.

    Raises:
      ValueError: a linear doesn't run in FP8, or under a recipe that quantizes in another way.
    """
    scopes = {scope for scope, values in params.items() if is_quantized(values.get(KERNEL))}
    if not scopes:
        return params, None
    abstract = {
        scope: {name: TensorType(shape_of(value), dtype_of(value, param_dtype)) for name, value in values.items()}
        for scope, values in params.items()
    }
    wanted = jax.eval_shape(lambda params, state: quantize_kernels(run, params, state, train=False), abstract, state)
    kernels: list[Any] = [None] * len(run.links)
    for i, info in enumerate(run.links):
        if info.scope not in scopes or not info.op.roles:
            continue
        value = params[info.scope][KERNEL]
        expected = "a linear that runs in FP8 (te.dequantize_params gives it a kernel in high precision)"
        check_value(info.quantizes_kernel, info.label, "kernel in FP8", expected, info.why_unquantized)
        got = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in sorted(value.items())}
        kept = {name: leaf for name, leaf in sorted(wanted[i].items()) if name in (DATA, *SCALES)}
        kinds = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in kept.items()}
        check_value(got == kinds, info.label, "kernel in FP8", kinds, got)
        kernels[i] = dict(value)
    rest = {scope: {name: v for name, v in values.items() if not is_quantized(v)} for scope, values in params.items()}
    return rest, tuple(kernels)


def dequantize(value: Mapping[str, jax.Array], like: Any, name: str) -> jax.Array:
    """The kernel in ``like``'s shape and dtype; leading dimensions (layers) are those that a kernel doesn't have.

    Raises:
      ValueError: no such kernel, or no scale.
    """
    op, scales = "dequantize_params", [scale for scale in SCALES if scale in value]
    check_value(len(scales) == 1 and len(value) == 2, op, name, f"{DATA} and one of {SCALES}", sorted(value))
    data, scale = value[DATA], value[scales[0]]
    check_value(is_fp8(data.dtype), op, f"{name}/{DATA}", "an FP8 dtype", data.dtype)
    lead, per_tensor = data.ndim - 2, scales[0] == "scale_inv"
    ok = lead >= 0 and data.size == like.size and data.shape[:lead] == like.shape[:lead]
    check_value(ok, op, name, f"the elements of {like.dtype}{list(like.shape)}", f"{data.dtype}{list(data.shape)}")

    def one(data: jax.Array, scale: jax.Array) -> jax.Array:
        fmt = format_of(data.dtype).name
        if per_tensor:
            return QTensor(data_t=data, scale_inv=scale, format=fmt).dequantize(like.dtype)
        return QTensor(data_t=data, scale_inv_t=scale, format=fmt, scaling="block_128x128").dequantize(like.dtype)

    for _ in range(lead):
        one = jax.vmap(one)
    return one(data, scale).reshape(like.shape)


def shape_of(value: Any) -> tuple[int, ...]:
    """Of a parameter, or of the kernel that was quantized."""
    if not is_quantized(value):
        return value.shape
    *groups, columns, rows = value[DATA].shape
    return (*groups, rows, columns)


def dtype_of(value: Any, param_dtype: Any) -> Any:
    """Of a parameter; a kernel in FP8 counts as one of ``param_dtype``."""
    return jnp.dtype(param_dtype) if is_quantized(value) else value.dtype
