"""Forward [norm or activation, (BasicLinear)]: the producer writes the linear's input in FP8, and only that."""

from __future__ import annotations

import dataclasses
from typing import Any

from te_jax.fusion.pattern import Rule, Window, slot
from te_jax.fusion.rules.linear import why_no_fp8_gemm
from te_jax.ops import linear
from te_jax.ops.activation import GEGLU, GELU, ReLU, SiLU, SwiGLU
from te_jax.ops.linear import BasicLinear
from te_jax.ops.norm import LayerNorm, RMSNorm
from te_jax.quant.tensor import QTensor

NORMS = (RMSNorm, LayerNorm)
ACTIVATIONS = (ReLU, GELU, SiLU, GEGLU, SwiGLU)


@dataclasses.dataclass(frozen=True)
class ProducerQuantize:
    """The step: runs the producer, books the amax with the linear it writes for."""

    producer: int
    consumer: int

    name = "quantizes for the next linear"

    @property
    def links(self) -> tuple[int, ...]:
        return (self.producer,)

    def __call__(self, contexts: list[Any], x: Any) -> QTensor:
        ctx, consumer = contexts[self.producer], contexts[self.consumer]
        quantizing = linear.quantizing(consumer.info, "x", train=consumer.train)
        out = ctx.info.op.forward_quantized(ctx, x, linear.scale_of(consumer, "x"), quantizing)
        return linear.as_qtensor(consumer, "x", out, x.dtype)


def _condition(window: Window) -> str | None:
    return why_no_fp8_gemm(window.info(1))


def _step(window: Window) -> ProducerQuantize:
    return ProducerQuantize(window.link(0), window.link(1))


PRODUCER_QUANTIZE = Rule(
    name="producer+quantize",
    pattern=(slot(*NORMS, *ACTIVATIONS), slot(BasicLinear, ahead=True)),
    condition=_condition,
    step=_step,
)
