"""Linear with what follows it: scale, bias and residual in the GEMM's epilogue; bias gradient as a by-product.

Forward   [BasicLinear, ConstantScale?, Bias?, AddExtraInput?]
          y = scale x w + bias + extra in one GEMM, rounded once; a Dropout of rate 0 may stand before the extra input
Backward  [MakeExtraOutput?, BasicLinear, ConstantScale?, Bias?]
          dbias is from the pass that quantizes dy, unscaled; the scale multiplies in dgrad and wgrad; the gradient of
          the extra output is added in dgrad's GEMM, rounded once

An activation behind them runs as its own step, which writes the next linear's FP8 input (docs/design/0002).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from te_jax.fusion.pattern import Rule, Window, slot
from te_jax.ops import linear
from te_jax.ops.base import LinkInfo
from te_jax.ops.bias import Bias
from te_jax.ops.linear import BasicLinear
from te_jax.ops.misc import ConstantScale, Dropout
from te_jax.ops.residual import AddExtraInput, MakeExtraOutput

MIN_ALPHA, MAX_ALPHA = 2.0**-64, 2.0**64  # so that neither a scale nor a product with one leaves float32


def why_no_fp8_gemm(info: LinkInfo) -> str | None:
    """Why this linear has no FP8 GEMM of ours to fuse into; None if it has."""
    return None if info.quantized else info.why_unquantized


def _factor(info: LinkInfo | None) -> float:
    """What a ConstantScale multiplies by; 1 without one."""
    return float(info.op.scale) if info is not None and isinstance(info.op, ConstantScale) else 1.0


def _alpha(contexts: list[Any], scale: int | None) -> float:
    return 1.0 if scale is None else _factor(contexts[scale].info)


def _why_no_alpha(scale: LinkInfo | None) -> str | None:
    """Why a scale can't be a GEMM's alpha; None if it can or if there is none."""
    factor = _factor(scale)
    return None if MIN_ALPHA <= abs(factor) <= MAX_ALPHA else f"a GEMM isn't multiplied by {factor}"


@dataclasses.dataclass(frozen=True)
class ForwardLinear:
    """The forward step: one GEMM with the epilogue that its links ask for."""

    linear: int
    scale: int | None
    bias: int | None
    add: int | None
    idle: int | None = None  # an op that does nothing, before the extra input

    @property
    def links(self) -> tuple[int, ...]:
        return tuple(i for i in (self.linear, self.scale, self.bias, self.idle, self.add) if i is not None)

    @property
    def name(self) -> str:
        parts = {"+scale": self.scale, "+bias": self.bias, "+add": self.add}
        return "linear" + "".join(part for part, link in parts.items() if link is not None)

    def __call__(self, contexts: list[Any], x: Any) -> Any:
        bias = None if self.bias is None else contexts[self.bias].params["bias"]
        extra = None if self.add is None else contexts[self.add].extra_inputs[0]
        return linear.forward(contexts[self.linear], x, bias, extra, _alpha(contexts, self.scale))


def _forward_condition(window: Window) -> str | None:
    return _why_no_epilogue(window.info(0), *(window.optional_info(slot) for slot in (1, 2, 3)))


def _why_no_epilogue(info: LinkInfo, scale: LinkInfo | None, bias: LinkInfo | None, add: LinkInfo | None) -> str | None:
    """Why what stands behind a linear is no part of its GEMM; None if it is."""
    if scale is None and bias is None and add is None:
        return "nothing to fuse"
    if (reason := why_no_fp8_gemm(info) or _why_no_alpha(scale)) is not None:
        return reason
    if bias is not None and info.x_type.dtype != jnp.bfloat16:
        return f"cuBLASLt's FP8 GEMM adds a bfloat16 bias only, the chain computes in {info.x_type.dtype}"
    if add is not None and info.x_type.dtype == jnp.float16:
        return "the GEMM writes float32 for a float16 chain"
    if add is not None and isinstance(add.op, AddExtraInput) and not add.op.in_place:
        return "AddExtraInput(in_place=False)"
    return None


def _forward_step(window: Window) -> ForwardLinear:
    return ForwardLinear(window.link(0), *window.picks[1:])


FORWARD_LINEAR = Rule(
    name="linear+scale+bias+add",
    pattern=(
        slot(BasicLinear),
        slot(ConstantScale, optional=True),
        slot(Bias, optional=True),
        slot(AddExtraInput, optional=True),
    ),
    condition=_forward_condition,
    step=_forward_step,
)


def _dropout_condition(window: Window) -> str | None:
    scale, bias = window.optional_info(1), window.optional_info(2)
    if (reason := _why_no_epilogue(window.info(0), scale, bias, window.info(4))) is not None:
        return reason
    dropout = window.info(3).op
    assert isinstance(dropout, Dropout)
    rate = dropout.rate
    return None if rate == 0.0 else f"Dropout({rate}) stands between, in calls that aren't deterministic"


def _dropout_step(window: Window) -> ForwardLinear:
    _, scale, bias, idle, add = window.picks
    return ForwardLinear(window.link(0), scale, bias, add, idle)


FORWARD_LINEAR_DROPOUT = Rule(
    name="linear+scale+bias+add, without the dropout between",
    pattern=(
        slot(BasicLinear),
        slot(ConstantScale, optional=True),
        slot(Bias, optional=True),
        slot(Dropout),
        slot(AddExtraInput),
    ),
    condition=_dropout_condition,
    step=_dropout_step,
)


@dataclasses.dataclass(frozen=True)
class BackwardLinear:
    """The backward step: quantize dy (summed over tokens for the bias), then dgrad (+ the extra output's) and wgrad."""

    output: int | None
    linear: int
    scale: int | None
    bias: int | None

    @property
    def links(self) -> tuple[int, ...]:
        return tuple(i for i in (self.output, self.linear, self.scale, self.bias) if i is not None)

    @property
    def name(self) -> str:
        quantize = "dbias+quantize+" if self.bias is not None else ""
        add, scaled = ("+add" if self.output is not None else ""), ("scaled " if self.scale is not None else "")
        return f"{quantize}{scaled}dgrad{add}+wgrad"

    def __call__(self, contexts: list[Any], dy: Any) -> Any:
        extra_grad = None if self.output is None else contexts[self.output].extra_output_grads[0]
        alpha = _alpha(contexts, self.scale)
        if self.bias is None:
            return linear.backward(contexts[self.linear], dy, extra_grad, alpha)
        return linear.backward_with_bias(contexts[self.linear], contexts[self.bias], dy, extra_grad, alpha)


def _backward_condition(window: Window) -> str | None:
    info = window.info(1)
    output, scale, bias = (window.optional_info(slot) for slot in (0, 2, 3))
    if output is None and scale is None and bias is None:
        return "nothing to fuse"
    if (reason := why_no_fp8_gemm(info) or _why_no_alpha(scale) or _why_another_grid(info, scale)) is not None:
        return reason
    if output is not None and info.x_type.dtype == jnp.float16:
        return "the GEMM writes float32 for a float16 chain"
    if output is not None and isinstance(output.op, MakeExtraOutput) and not output.op.in_place:
        return "MakeExtraOutput(in_place=False)"
    return None


def _why_another_grid(info: LinkInfo, scale: LinkInfo | None) -> str | None:
    """A scale that is floored to a power of two isn't alpha times another: dy would be quantized differently."""
    factor = _factor(scale)
    if not info.quantizing_recipe.power_of_two or abs(math.frexp(factor)[0]) == 0.5:
        return None
    return f"FP8 scales are powers of two, the factor {factor} isn't"


def _backward_step(window: Window) -> BackwardLinear:
    return BackwardLinear(window.picks[0], window.link(1), *window.picks[2:])


BACKWARD_LINEAR = Rule(
    name="dgrad+add, dbias+quantize",
    pattern=(
        slot(MakeExtraOutput, optional=True),
        slot(BasicLinear),
        slot(ConstantScale, optional=True),
        slot(Bias, optional=True),
    ),
    condition=_backward_condition,
    step=_backward_step,
)
