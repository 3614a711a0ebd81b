"""Residual connections inside a chain: values that enter and leave it beside the main path."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jax import Array

from te_jax.errors import check_value
from te_jax.ops.base import BackwardContext, ForwardContext, Op


@dataclasses.dataclass(frozen=True)
class AddExtraInput(Op):
    """y = x + extra, where extra [*lead, C] is the chain's next extra input.

    ``in_place`` (as in TransformerEngine's op of this name) permits a linear before it to add its result to the extra
    input inside the GEMM: one rounding instead of two. False keeps the sum a step of its own.
    """

    in_place: bool = True
    num_extra_inputs: ClassVar[int] = 1

    def forward(self, ctx: ForwardContext, x: Array) -> Array:
        (extra,) = ctx.extra_inputs
        check_value(extra.shape == x.shape, "AddExtraInput", "extra input", f"shape {x.shape}", f"{extra.shape}")
        return x + extra

    def backward(self, ctx: BackwardContext, dy: Array) -> Array:
        ctx.extra_input_grads = (dy,)
        return dy


@dataclasses.dataclass(frozen=True)
class MakeExtraOutput(Op):
    """Hands x on and also returns it from the chain as an extra output; their cotangents are summed.

    ``in_place`` permits a linear after it to add its input gradient to that of the extra output inside the GEMM.
    """

    in_place: bool = True
    num_extra_outputs: ClassVar[int] = 1

    def forward(self, ctx: ForwardContext, x: Array) -> Array:
        ctx.extra_outputs = (x,)
        return x

    def backward(self, ctx: BackwardContext, dy: Array) -> Array:
        (extra_grad,) = ctx.extra_output_grads
        return dy + extra_grad
