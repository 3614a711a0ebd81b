"""Forward [norm or activation, MakeExtraOutput?, (BasicLinear)]: the producer writes the linear's input in FP8.

Only that, unless its result is also an extra value: then one pass writes both.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from te_jax.errors import required
from te_jax.fusion.pattern import Rule, Window, slot
from te_jax.fusion.rules.linear import why_no_fp8_gemm
from te_jax.ops import device_order, linear
from te_jax.ops.activation import ACTIVATIONS
from te_jax.ops.base import LinkInfo
from te_jax.ops.linear import BasicLinear
from te_jax.ops.norm import NORMS
from te_jax.ops.residual import MakeExtraOutput
from te_jax.quant.tensor import QTensor
from te_jax.recipe import BlockScaling


@dataclasses.dataclass(frozen=True)
class ProducerQuantize:
    """The step: runs the producer, books the amax with the linear it writes for."""

    producer: int
    output: int | None
    consumer: int

    reader: ClassVar[str] = "the next linear"  # for the plan

    @property
    def links(self) -> tuple[int, ...]:
        return (self.producer,) if self.output is None else (self.producer, self.output)

    @property
    def name(self) -> str:
        return f"quantizes for {self.reader}" + ("" if self.output is None else ", keeps the result")

    def quantizing(self, consumer: Any) -> dict[str, Any]:
        """What the linear wants of its input."""
        return linear.quantizing(consumer.info, "x", train=consumer.train)

    def __call__(self, contexts: list[Any], x: Any) -> QTensor:
        ctx, consumer = contexts[self.producer], contexts[self.consumer]
        quantizing = self.quantizing(consumer) | {"hp": self.output is not None}
        out = ctx.info.op.forward_quantized(ctx, x, linear.scale_of(consumer, "x"), quantizing)
        if self.output is not None:
            contexts[self.output].extra_outputs = (required(out.hp, "producer", "hp"),)
        return linear.as_qtensor(consumer, "x", out, x.dtype)


def why_not_halves(activation: LinkInfo, consumer: LinkInfo) -> str | None:
    """Why an activation of halves in the order of devices doesn't write what a linear next to it reads."""
    if device_order.devices_of(activation.op) == 1:
        return None
    if isinstance(consumer.recipe, BlockScaling):
        return "blocks of scales would be of one device's halves each"
    return None if consumer.op.groups is None else "halves in the order of devices are not of groups"


def _condition(window: Window) -> str | None:
    return why_no_fp8_gemm(window.info(2)) or why_not_halves(window.info(0), window.info(2))


def _step(window: Window) -> ProducerQuantize:
    return ProducerQuantize(window.link(0), window.picks[1], window.link(2))


PRODUCER_QUANTIZE = Rule(
    name="producer+quantize",
    pattern=(slot(*NORMS, *ACTIVATIONS), slot(MakeExtraOutput, optional=True), slot(BasicLinear, ahead=True)),
    condition=_condition,
    step=_step,
)
