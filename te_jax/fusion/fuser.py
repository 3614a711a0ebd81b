"""Chooses the steps of a run: a pure function of its links and of the rules, cached on exactly these."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from te_jax.errors import check_type, check_value
from te_jax.fusion.pattern import Rule, Step, windows
from te_jax.ops.base import LinkInfo, TensorType
from te_jax.quant.tensor import QTensor


@dataclasses.dataclass(frozen=True)
class _SingleOp:
    """The unfused step of one op."""

    link: int
    label: str

    @property
    def links(self) -> tuple[int, ...]:
        return (self.link,)

    @property
    def name(self) -> str:
        return self.label


class ForwardOp(_SingleOp):
    """The unfused forward step of one op."""

    def __call__(self, contexts: list[Any], x: Any) -> Any:
        ctx = contexts[self.link]
        return _checked(ctx.info, "forward", ctx.info.op.forward(ctx, x), ctx.info.y_type)


class BackwardOp(_SingleOp):
    """The unfused backward step of one op."""

    def __call__(self, contexts: list[Any], dy: Any) -> Any:
        ctx = contexts[self.link]
        return _checked(ctx.info, "backward", ctx.info.op.backward(ctx, dy), ctx.info.x_type)


def _checked(info: LinkInfo, method: str, result: Any, wanted: TensorType) -> Any:
    """``result``, if it is what the op promised: the ops around it, and XLA, rely on it."""
    shape, dtype = getattr(result, "shape", None), getattr(result, "dtype", None)
    dtype = jnp.dtype(dtype) if isinstance(result, QTensor) else dtype  # its name
    check_value(shape == wanted.shape, info.label, method, f"a result of shape {wanted.shape}", shape)
    check_type(dtype == wanted.dtype, info.label, method, f"a result of dtype {wanted.dtype}", dtype)
    return result


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A rule whose pattern was there, and why it didn't apply."""

    rule: str
    links: tuple[int, ...]
    reason: str


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """The steps of one run of ops; ``backward`` in the order in which they run, last op first."""

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    forward_refusals: tuple[Refusal, ...]
    backward_refusals: tuple[Refusal, ...]


@functools.lru_cache(maxsize=4096)
def plan_run(links: tuple[LinkInfo, ...], forward_rules: tuple[Rule, ...], backward_rules: tuple[Rule, ...]) -> RunPlan:
    """Walks the run from the front (forward) and from the back (backward); the first rule that applies wins."""
    forward, forward_refusals = _choose(links, forward_rules, backward=False)
    backward, backward_refusals = _choose(links, backward_rules, backward=True)
    return RunPlan(forward, backward, forward_refusals, backward_refusals)


def _choose(
    links: tuple[LinkInfo, ...], rules: tuple[Rule, ...], *, backward: bool
) -> tuple[tuple[Step, ...], tuple[Refusal, ...]]:
    steps: list[Step] = []
    refusals: list[Refusal] = []
    left = len(links)
    while left:
        at = left - 1 if backward else len(links) - left
        step = _first_match(links, rules, at, backward, refusals)
        if step is None:
            op = str(links[at].op)
            step = BackwardOp(at, f"d-{op}") if backward else ForwardOp(at, op)
        expected = tuple(range(left - len(step.links), left)) if backward else tuple(range(at, at + len(step.links)))
        ok = step.links == expected
        check_value(ok, "fusion", f"step {step.name!r}", f"it to run links {expected}", step.links)
        steps.append(step)
        left -= len(step.links)
    return tuple(steps), tuple(refusals)


def _first_match(
    links: tuple[LinkInfo, ...], rules: tuple[Rule, ...], at: int, backward: bool, refusals: list[Refusal]
) -> Step | None:
    for rule in rules:
        for window in windows(rule, links, **({"last": at} if backward else {"first": at})):
            reason = rule.condition(window)
            if reason is None:
                return rule.step(window)
            if sum(p is not None for p in window.picks) > 1:
                refusals.append(Refusal(rule.name, window.consumed, reason))
    return None
