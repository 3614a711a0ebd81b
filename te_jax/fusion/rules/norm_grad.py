"""Backward [MakeExtraOutput, norm]: the gradient that reaches x past the norm is added where the norm's is computed."""

from __future__ import annotations

import dataclasses
from typing import Any

from te_jax.fusion.pattern import Rule, Window, slot
from te_jax.ops.norm import NORMS
from te_jax.ops.residual import MakeExtraOutput


@dataclasses.dataclass(frozen=True)
class NormGradAdd:
    """The step: one pass over dy, x and the extra output's gradient, whose sum is rounded once."""

    output: int
    norm: int

    name = "d-norm+add"

    @property
    def links(self) -> tuple[int, ...]:
        return (self.output, self.norm)

    def __call__(self, contexts: list[Any], dy: Any) -> Any:
        ctx = contexts[self.norm]
        (extra_grad,) = contexts[self.output].extra_output_grads
        return ctx.info.op.backward_and_add(ctx, dy, extra_grad)


def _condition(window: Window) -> str | None:
    output, norm = window.info(0), window.info(1)
    if norm.recipe is None:
        return "recipe None"
    if isinstance(output.op, MakeExtraOutput) and not output.op.in_place:
        return "MakeExtraOutput(in_place=False)"
    return None


def _step(window: Window) -> NormGradAdd:
    return NormGradAdd(window.link(0), window.link(1))


NORM_GRAD_ADD = Rule(
    name="d-norm+add",
    pattern=(slot(MakeExtraOutput), slot(*NORMS)),
    condition=_condition,
    step=_step,
)
