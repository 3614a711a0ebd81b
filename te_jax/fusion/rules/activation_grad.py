"""Backward [(BasicLinear), Bias?, activation]: d-activation, dbias and the linear's FP8 cotangent in one pass."""

from __future__ import annotations

import dataclasses
from typing import Any

from te_jax.fusion.pattern import Rule, Window, slot
from te_jax.fusion.rules.linear import why_no_fp8_gemm
from te_jax.fusion.rules.producer import why_not_halves
from te_jax.ops import linear
from te_jax.ops.activation import ACTIVATIONS, GatedActivation
from te_jax.ops.bias import Bias
from te_jax.ops.linear import BasicLinear
from te_jax.quant.block_reference import BLOCK
from te_jax.quant.tensor import QTensor
from te_jax.recipe import BlockScaling


@dataclasses.dataclass(frozen=True)
class ActivationGradQuantize:
    """The step: the linear itself is the next one to run, and gets its dy quantized."""

    consumer: int
    bias: int | None
    activation: int

    @property
    def links(self) -> tuple[int, ...]:
        return tuple(i for i in (self.bias, self.activation) if i is not None)

    @property
    def name(self) -> str:
        return "d-activation" + ("+dbias" if self.bias is not None else "") + "+quantize, for the linear before it"

    def __call__(self, contexts: list[Any], dy: Any) -> QTensor:
        ctx, consumer = contexts[self.activation], contexts[self.consumer]
        bias = None if self.bias is None else contexts[self.bias].params["bias"]
        quantizing = linear.quantizing(consumer.info, "dy") | linear.dbias_of(bias)
        out = ctx.info.op.backward_quantized(ctx, dy, linear.scale_of(consumer, "dy"), quantizing)
        if self.bias is not None:
            contexts[self.bias].param_grads["bias"] = out.dbias
        return linear.as_qtensor(consumer, "dy", out, dy.dtype)


def _condition(window: Window) -> str | None:
    if (reason := why_no_fp8_gemm(window.info(0))) is not None:
        return reason
    if (reason := why_not_halves(window.info(2), window.info(0))) is not None:
        return reason
    activation, half = window.info(2), window.info(2).x_type.shape[-1] // 2
    gated = isinstance(activation.op, GatedActivation)
    if gated and isinstance(window.info(0).recipe, BlockScaling) and half % BLOCK:
        return f"a block of the cotangent would belong to both halves: {half} features are not a multiple of {BLOCK}"
    return None


def _step(window: Window) -> ActivationGradQuantize:
    return ActivationGradQuantize(window.link(0), window.picks[1], window.link(2))


ACTIVATION_GRAD_QUANTIZE = Rule(
    name="d-activation+dbias+quantize",
    pattern=(slot(BasicLinear, ahead=True), slot(Bias, optional=True), slot(*ACTIVATIONS)),
    condition=_condition,
    step=_step,
)
