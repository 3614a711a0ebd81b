"""Linear with what follows it: bias and residual in the GEMM's epilogue; bias gradient as a by-product.

Forward   [BasicLinear, Bias?, AddExtraInput?]   y = x w + bias + extra in one GEMM, rounded once
Backward  [MakeExtraOutput?, BasicLinear, Bias?] dbias from the pass that quantizes dy; the extra output's gradient is
                                                 added in dgrad's GEMM, rounded once
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from te_jax.fusion.pattern import Rule, Window, slot
from te_jax.ops import linear
from te_jax.ops.base import LinkInfo
from te_jax.ops.bias import Bias
from te_jax.ops.linear import BasicLinear
from te_jax.ops.residual import AddExtraInput, MakeExtraOutput


def why_no_fp8_gemm(info: LinkInfo) -> str | None:
    """Why this linear has no FP8 GEMM of ours to fuse into; None if it has."""
    return None if info.quantized else info.why_unquantized


@dataclasses.dataclass(frozen=True)
class ForwardLinear:
    """The forward step: one GEMM with the epilogue that its links ask for."""

    linear: int
    bias: int | None
    add: int | None

    @property
    def links(self) -> tuple[int, ...]:
        return tuple(i for i in (self.linear, self.bias, self.add) if i is not None)

    @property
    def name(self) -> str:
        return "linear" + ("+bias" if self.bias is not None else "") + ("+add" if self.add is not None else "")

    def __call__(self, contexts: list[Any], x: Any) -> Any:
        bias = None if self.bias is None else contexts[self.bias].params["bias"]
        extra = None if self.add is None else contexts[self.add].extra_inputs[0]
        return linear.forward(contexts[self.linear], x, bias, extra)


def _forward_condition(window: Window) -> str | None:
    info, bias, add = window.info(0), window.optional_info(1), window.optional_info(2)
    if bias is None and add is None:
        return "nothing to fuse"
    if (reason := why_no_fp8_gemm(info)) is not None:
        return reason
    if bias is not None and info.x_type.dtype != jnp.bfloat16:
        return f"cuBLASLt's FP8 GEMM adds a bfloat16 bias only, the chain computes in {info.x_type.dtype}"
    if add is not None and info.x_type.dtype == jnp.float16:
        return "the GEMM writes float32 for a float16 chain"
    if add is not None and isinstance(add.op, AddExtraInput) and not add.op.in_place:
        return "AddExtraInput(in_place=False)"
    return None


def _forward_step(window: Window) -> ForwardLinear:
    return ForwardLinear(window.link(0), window.picks[1], window.picks[2])


FORWARD_LINEAR_BIAS_ADD = Rule(
    name="linear+bias+add",
    pattern=(slot(BasicLinear), slot(Bias, optional=True), slot(AddExtraInput, optional=True)),
    condition=_forward_condition,
    step=_forward_step,
)


@dataclasses.dataclass(frozen=True)
class BackwardLinear:
    """The backward step: quantize dy (summed over tokens for the bias), then dgrad (+ the extra output's) and wgrad."""

    output: int | None
    linear: int
    bias: int | None

    @property
    def links(self) -> tuple[int, ...]:
        return tuple(i for i in (self.output, self.linear, self.bias) if i is not None)

    @property
    def name(self) -> str:
        quantize = "dbias+quantize+" if self.bias is not None else ""
        return f"{quantize}dgrad{'+add' if self.output is not None else ''}+wgrad"

    def __call__(self, contexts: list[Any], dy: Any) -> Any:
        extra_grad = None if self.output is None else contexts[self.output].extra_output_grads[0]
        if self.bias is None:
            return linear.backward(contexts[self.linear], dy, extra_grad)
        return linear.backward_with_bias(contexts[self.linear], contexts[self.bias], dy, extra_grad)


def _backward_condition(window: Window) -> str | None:
    output, info, bias = window.optional_info(0), window.info(1), window.optional_info(2)
    if output is None and bias is None:
        return "nothing to fuse"
    if (reason := why_no_fp8_gemm(info)) is not None:
        return reason
    if output is not None and info.x_type.dtype == jnp.float16:
        return "the GEMM writes float32 for a float16 chain"
    if output is not None and isinstance(output.op, MakeExtraOutput) and not output.op.in_place:
        return "MakeExtraOutput(in_place=False)"
    return None


def _backward_step(window: Window) -> BackwardLinear:
    return BackwardLinear(window.picks[0], window.link(1), window.picks[2])


BACKWARD_ADD_LINEAR_BIAS = Rule(
    name="dgrad+add, dbias+quantize",
    pattern=(slot(MakeExtraOutput, optional=True), slot(BasicLinear), slot(Bias, optional=True)),
    condition=_backward_condition,
    step=_backward_step,
)
