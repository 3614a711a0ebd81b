"""Fusion rules as data: a pattern of ops, a condition, and the step that runs them together.

A pattern is a sequence of slots over neighbouring ops, in forward order. A slot may be optional, and it may be "ahead":
the op has to be there, but the step does not run it (a norm that writes the FP8 input of the linear behind it).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from te_jax.errors import required
from te_jax.ops.base import LinkInfo, Op


@dataclasses.dataclass(frozen=True)
class Slot:
    """One place of a pattern: an op of one of these classes."""

    kinds: tuple[type[Op], ...]
    optional: bool = False
    ahead: bool = False


def slot(*kinds: type[Op], optional: bool = False, ahead: bool = False) -> Slot:
    return Slot(kinds, optional, ahead)


@dataclasses.dataclass(frozen=True)
class Window:
    """Where a pattern was found: for every slot the link that fills it (None: an optional one that is not there)."""

    links: tuple[LinkInfo, ...]  # the whole run
    picks: tuple[int | None, ...]
    consumed: tuple[int, ...]  # links that the step runs, ascending

    def link(self, slot_number: int) -> int:
        """The number of the link in a slot that isn't optional."""
        return required(self.picks[slot_number], "fusion.Window", f"slot {slot_number}")

    def info(self, slot_number: int) -> LinkInfo:
        """The link in a slot that isn't optional."""
        return self.links[self.link(slot_number)]

    def optional_info(self, slot_number: int) -> LinkInfo | None:
        """The link in a slot, or None if it is optional and there is none."""
        pick = self.picks[slot_number]
        return None if pick is None else self.links[pick]


class Step(Protocol):
    """A part of a plan: runs one or several links, forward or backward. ``notes``, if it has that, is for the plan.

    ``contexts`` holds a ForwardContext or BackwardContext for every link of the run.
    """

    @property
    def links(self) -> tuple[int, ...]: ...

    @property
    def name(self) -> str: ...

    def __call__(self, contexts: list[Any], value: Any, /) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Rule:
    """``condition`` gives None where the rule applies and the reason otherwise; ``step`` makes the fused step."""

    name: str
    pattern: tuple[Slot, ...]
    condition: Callable[[Window], str | None]
    step: Callable[[Window], Step]


def windows(
    rule: Rule, links: tuple[LinkInfo, ...], *, first: int | None = None, last: int | None = None
) -> Iterator[Window]:
    """Places where the pattern fits, most ops first, with the first consumed link (or the last one) as given."""
    for present in _presence(rule.pattern):
        length = sum(present)
        for start in range(len(links) - length + 1):
            numbers = iter(range(start, start + length))
            picks = tuple(next(numbers) if here else None for here in present)
            pairs = [(p, s) for p, s in zip(picks, rule.pattern, strict=True) if p is not None]
            consumed = tuple(p for p, s in pairs if not s.ahead)
            if (first is not None and consumed[0] != first) or (last is not None and consumed[-1] != last):
                continue
            if all(isinstance(links[p].op, s.kinds) for p, s in pairs):
                yield Window(links, picks, consumed)


def _presence(pattern: tuple[Slot, ...]) -> list[tuple[bool, ...]]:
    """All ways to leave optional slots out, the longest first."""
    options = [(True, False) if s.optional else (True,) for s in pattern]
    return sorted(itertools.product(*options), key=sum, reverse=True)
