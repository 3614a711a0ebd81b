"""Quantize: a boundary behind which a value, its cotangent or both have passed through FP8.

  forward    y = dequantize(quantize(x)), role "x" of the recipe
  backward  dx = dequantize(quantize(dy)), role "dy"

each only if asked for, otherwise handed on as it is; without a recipe both are. The derivative of rounding is taken
as 1. It has quantizers of its own. Directly before a quantized linear x goes there in FP8, and directly behind one dy
(te_jax.fusion.rules.quantize): the linear doesn't quantize again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import Array

from te_jax import primitives
from te_jax.errors import check_type
from te_jax.ops import linear
from te_jax.ops.base import BackwardContext, ForwardContext, LinkInfo, Op, TensorType
from te_jax.ops.recording import record
from te_jax.parallel import mesh
from te_jax.primitives.spec import QuantizeSpec
from te_jax.recipe import Recipe


@dataclasses.dataclass(frozen=True, init=False)
class Quantize(Op):
    """``Quantize(forward=True, backward=False)``: whether the value is quantized, and whether its cotangent is."""

    quantizes_x: bool
    quantizes_dy: bool

    def __init__(self, forward: bool = True, backward: bool = False, *, name: str | None = None) -> None:
        # Not fields of these names, which are those of the op's methods.
        for argument, value in {"forward": forward, "backward": backward}.items():
            check_type(isinstance(value, bool), "Quantize", argument, "a bool", repr(value))
        for field, value in {"quantizes_x": forward, "quantizes_dy": backward, "name": name}.items():
            object.__setattr__(self, field, value)

    @property
    def roles(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("x",) * self.quantizes_x + ("dy",) * self.quantizes_dy

    def why_unquantized(self, x: TensorType, recipe: Recipe | None) -> str | None:
        del x
        return "recipe None" if recipe is None and self.roles else None

    def forward(self, ctx: ForwardContext, x: Array) -> Array:
        return _through_fp8(ctx, "x", x, train=ctx.train) if _active(ctx.info, "x") else x

    def backward(self, ctx: BackwardContext, dy: Array) -> Array:
        return _through_fp8(ctx, "dy", dy, train=True) if _active(ctx.info, "dy") else dy

    def note(self, info: LinkInfo) -> str | None:
        if info.recipe is None:
            return None  # the plan says that it isn't quantized
        formats = {role: info.recipe.format(role).name for role in self.roles}
        return "boundary: " + ", ".join(f"{role} {formats.get(role, 'as it is')}" for role in ("x", "dy"))


def quantize_for(
    ctx: ForwardContext | BackwardContext, role: str, x: Array, quantizing: dict[str, Any]
) -> primitives.QuantizeOut:
    """One pass over x with the quantizer ``role`` of a Quantize; ``quantizing`` are the fields of what it writes."""
    scale = linear.scale_of(ctx, role)
    out = primitives.quantize(x, scale, QuantizeSpec(**quantizing), amax_axes=mesh.amax_axes(x, scale, ctx.info.recipe))
    record(ctx.info, role, x, out)
    if out.amax is not None:
        ctx.used[role] = out.amax
    return out


def _active(info: LinkInfo, role: str) -> bool:
    return role in info.op.roles and info.quantized


def _through_fp8(ctx: ForwardContext | BackwardContext, role: str, x: Array, *, train: bool) -> Array:
    quantizing = linear.quantizing(ctx.info, role, train=train) | {"data": True, "data_t": False}
    return linear.as_qtensor(ctx, role, quantize_for(ctx, role, x, quantizing), x.dtype).dequantize()
