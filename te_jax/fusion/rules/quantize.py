"""A Quantize next to a linear: the linear takes what it has quantized, instead of quantizing the same values again.

Forward   [Quantize, (BasicLinear)]                        x
          [norm or activation, Quantize, (BasicLinear)]    x, written by the norm or activation
Backward  [(BasicLinear), Quantize]                        dy; not across a Bias, which sums the dequantized dy

The scale is that of the Quantize. The linear's quantizer enters the same amax, as if it had quantized once more, so
that its state doesn't depend on what is fused.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from te_jax.fusion.pattern import Rule, Window, slot
from te_jax.fusion.rules.linear import why_no_fp8_gemm
from te_jax.fusion.rules.producer import why_not_halves
from te_jax.ops import linear
from te_jax.ops.activation import ACTIVATIONS
from te_jax.ops.linear import BasicLinear
from te_jax.ops.norm import NORMS
from te_jax.ops.quantize import Quantize, quantize_for
from te_jax.quant.tensor import QTensor


@dataclasses.dataclass(frozen=True)
class QuantizeForLinear:
    """The step, in either direction: one pass, whose FP8 result the linear takes."""

    quantize: int
    consumer: int
    role: str  # of the consumer's operand, and of the quantizer

    @property
    def links(self) -> tuple[int, ...]:
        return (self.quantize,)

    @property
    def name(self) -> str:
        return f"quantizes {self.role} for the linear {'behind' if self.role == 'x' else 'before'} it"

    def __call__(self, contexts: list[Any], x: Any) -> QTensor:
        ctx, consumer = contexts[self.quantize], contexts[self.consumer]
        train = self.role == "dy" or consumer.train
        out = quantize_for(ctx, self.role, x, linear.quantizing(consumer.info, self.role, train=train))
        return linear.as_qtensor(consumer, self.role, out, x.dtype)


@dataclasses.dataclass(frozen=True)
class ProducerThroughQuantize:
    """The step: the pass of the producer writes what the Quantize, and the linear's quantizer behind it, would."""

    producer: int
    quantize: int
    consumer: int

    name = "quantizes for the next linear"

    @property
    def links(self) -> tuple[int, ...]:
        return (self.producer, self.quantize)

    def __call__(self, contexts: list[Any], x: Any) -> QTensor:
        ctx, quantizer, consumer = (contexts[i] for i in (self.producer, self.quantize, self.consumer))
        quantizing = linear.quantizing(consumer.info, "x", train=consumer.train)
        out = ctx.info.op.forward_quantized(ctx, x, linear.scale_of(quantizer, "x"), quantizing)
        if out.amax is not None:
            quantizer.used["x"] = out.amax
        return linear.as_qtensor(consumer, "x", out, x.dtype)


def _why_not(window: Window, *, quantize: int, consumer: int, role: str) -> str | None:
    """Why the FP8 of a Quantize isn't taken by the linear next to it: one of them doesn't quantize."""
    if (reason := why_no_fp8_gemm(window.info(consumer))) is not None:
        return reason
    if role in window.info(quantize).op.roles:
        return None
    return f"Quantize({'forward' if role == 'x' else 'backward'}=False)"


def _forward_condition(window: Window) -> str | None:
    return _why_not(window, quantize=0, consumer=1, role="x")


def _through_condition(window: Window) -> str | None:
    return _why_not(window, quantize=1, consumer=2, role="x") or why_not_halves(window.info(0), window.info(2))


def _backward_condition(window: Window) -> str | None:
    return _why_not(window, quantize=1, consumer=0, role="dy")


def _forward_step(window: Window) -> QuantizeForLinear:
    return QuantizeForLinear(window.link(0), window.link(1), "x")


def _through_step(window: Window) -> ProducerThroughQuantize:
    return ProducerThroughQuantize(window.link(0), window.link(1), window.link(2))


def _backward_step(window: Window) -> QuantizeForLinear:
    return QuantizeForLinear(window.link(1), window.link(0), "dy")


QUANTIZE_FORWARD = Rule(
    name="quantize for the next linear",
    pattern=(slot(Quantize), slot(BasicLinear, ahead=True)),
    condition=_forward_condition,
    step=_forward_step,
)

PRODUCER_THROUGH_QUANTIZE = Rule(
    name="producer+quantize through Quantize",
    pattern=(slot(*NORMS, *ACTIVATIONS), slot(Quantize), slot(BasicLinear, ahead=True)),
    condition=_through_condition,
    step=_through_step,
)

QUANTIZE_BACKWARD = Rule(
    name="quantize for the linear before",
    pattern=(slot(BasicLinear, ahead=True), slot(Quantize)),
    condition=_backward_condition,
    step=_backward_step,
)
