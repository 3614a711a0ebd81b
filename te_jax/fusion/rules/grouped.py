"""GroupedLinear and the activation beside it: a grouped MLP writes nothing in high precision that a linear reads.

Forward   [activation, (GroupedLinear)]  the activation writes the linear's FP8 input, with a scale for each group
Backward  [(GroupedLinear), activation]  d-activation writes the FP8 cotangent that the linear before it needs

The activation goes row by row, and rows are quantized by the groups of the linear that they are written for, so the two
linears of an MLP need not have the same groups. Rows that belong to no group are 0.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from te_jax.fusion.pattern import Rule, Window, slot
from te_jax.fusion.rules.linear import why_no_fp8_gemm
from te_jax.fusion.rules.producer import ACTIVATIONS, why_not_halves
from te_jax.ops import grouped_linear
from te_jax.ops.base import LinkInfo
from te_jax.ops.grouped_linear import GroupedLinear, GroupedTensor
from te_jax.recipe import BlockScaling


@dataclasses.dataclass(frozen=True)
class GroupedActivation:
    """The forward step: runs the activation, books the amax with the linear it writes for."""

    activation: int
    consumer: int

    name = "quantizes by group for the next linear"

    @property
    def links(self) -> tuple[int, ...]:
        return (self.activation,)

    def __call__(self, contexts: list[Any], x: Any) -> GroupedTensor:
        ctx, consumer = contexts[self.activation], contexts[self.consumer]
        quantizing = grouped_linear.quantizing(consumer.info, "x", train=consumer.train)
        scale, sizes = grouped_linear.scale_of(consumer, "x"), grouped_linear.group_sizes_of(consumer)
        out = ctx.info.op.forward_quantized(ctx, x, scale, quantizing, group_sizes=sizes)
        return grouped_linear.as_grouped(consumer, "x", out)


@dataclasses.dataclass(frozen=True)
class GroupedActivationGrad:
    """The backward step: the linear itself is the next one to run, and gets its dy quantized."""

    consumer: int
    activation: int

    name = "d-activation+quantize by group, for the linear before it"

    @property
    def links(self) -> tuple[int, ...]:
        return (self.activation,)

    def __call__(self, contexts: list[Any], dy: Any) -> GroupedTensor:
        ctx, consumer = contexts[self.activation], contexts[self.consumer]
        quantizing = grouped_linear.quantizing(consumer.info, "dy")
        scale, sizes = grouped_linear.scale_of(consumer, "dy"), grouped_linear.group_sizes_of(consumer)
        out = ctx.info.op.backward_quantized(ctx, dy, scale, quantizing, group_sizes=sizes)
        return grouped_linear.as_grouped(consumer, "dy", out)


def _why_not_by_group(info: LinkInfo) -> str | None:
    """Why no producer can write this linear's operands."""
    if (reason := why_no_fp8_gemm(info)) is not None:
        return reason
    return "block scaling of groups is jnp" if isinstance(info.recipe, BlockScaling) else None


def _forward_condition(window: Window) -> str | None:
    return _why_not_by_group(window.info(1)) or why_not_halves(window.info(0), window.info(1))


def _backward_condition(window: Window) -> str | None:
    info = window.info(0)
    if (reason := _why_not_by_group(info) or why_not_halves(window.info(1), info)) is not None:
        return reason
    if any(spec.name == "bias" for spec in info.op.params(info.x_type)):
        return "the gradient of a bias of groups is taken from the cotangent in high precision"
    return None


def _forward_step(window: Window) -> GroupedActivation:
    return GroupedActivation(window.link(0), window.link(1))


def _backward_step(window: Window) -> GroupedActivationGrad:
    return GroupedActivationGrad(window.link(0), window.link(1))


GROUPED_ACTIVATION_QUANTIZE = Rule(
    name="activation+quantize by group",
    pattern=(slot(*ACTIVATIONS), slot(GroupedLinear, ahead=True)),
    condition=_forward_condition,
    step=_forward_step,
)
GROUPED_ACTIVATION_GRAD_QUANTIZE = Rule(
    name="d-activation+quantize by group",
    pattern=(slot(GroupedLinear, ahead=True), slot(*ACTIVATIONS)),
    condition=_backward_condition,
    step=_backward_step,
)
