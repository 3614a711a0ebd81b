"""Where the extra values of a chain come from and go to: from and to the call by order, inside of it by channel.

A value of the call that ops share is passed where the first of them takes its own.

A channel belongs to the list that its producer is in. Ops of that list and of lists inside of it may take from it,
after its producer; in a list inside of it a channel of the same name hides it. So a block of ops may be repeated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from te_jax.chain.places import Foreign, Path, Place
from te_jax.errors import check_value, message
from te_jax.ops.base import Bracket, Shared

CALL = -1


class Value(NamedTuple):
    """An extra value of a chain: the number of the place that makes it (CALL: it is given), and which of its it is."""

    place: int
    number: int


@dataclasses.dataclass(frozen=True)
class Extras:
    """``inputs``: for every place where its extra inputs come from. ``outputs``: what the call returns, in order.

    ``takers``: the labels of what takes the call's extra inputs, in order; of several that share one, all and its name.
    """

    inputs: tuple[tuple[Value, ...], ...]
    outputs: tuple[Value, ...]
    takers: tuple[str, ...]


def read_extras(places: Sequence[Place | Foreign]) -> Extras:
    """Follows every extra value of a chain.

    Raises:
      ValueError: a channel that is taken from but that nothing puts a value into, or only later; that two ops put one
        into; or that nothing takes from. A residual without its other half. All with op and place.
    """
    channels = _Channels(places)
    inputs: list[tuple[Value, ...]] = []
    outputs: list[Value] = []
    takers: list[str] = []
    shared: dict[Shared, int] = {}
    for n, place in enumerate(places):
        sources = []
        for channel in place.input_channels:
            label = f"{place.label} as {channel.name!r}" if isinstance(channel, Shared) else place.label
            if channel in shared:
                takers[shared[channel]] += f" and {label}"
                sources.append(Value(CALL, shared[channel]))
            elif channel is None or isinstance(channel, Shared):
                if channel is not None:
                    shared[channel] = len(takers)
                sources.append(Value(CALL, len(takers)))
                takers.append(label)
            else:
                sources.append(channels.take(n, channel))
        inputs.append(tuple(sources))
        for number, channel in enumerate(place.output_channels):
            if channel is None:
                outputs.append(Value(n, number))
            else:
                channels.make(Value(n, number), channel)
    channels.check_all_taken()
    return Extras(tuple(inputs), tuple(outputs), tuple(takers))


class _Channels:
    """The channels that are open while a chain is walked, by the list that they belong to."""

    def __init__(self, places: Sequence[Place | Foreign]) -> None:
        self.places = places
        self.named: dict[tuple[Path, str], Value] = {}
        self.residuals: dict[Path, list[Value]] = {}  # those that are open, innermost last
        self.taken: set[Value] = set()

    def make(self, value: Value, channel: str | Bracket) -> None:
        place = self.places[value.place]
        if isinstance(channel, Bracket):
            self.residuals.setdefault(place.path[:-1], []).append(value)
            return
        first = self.named.setdefault((place.path[:-1], channel), value)
        expected = "a channel of its own in this list"
        got = f"{channel!r}, which {self.places[first.place].label} has"
        check_value(first == value, "Sequential", f"{place.label}: channel", expected, got)

    def take(self, n: int, channel: str | Bracket) -> Value:
        place = self.places[n]
        where = place.path[:-1]
        if isinstance(channel, Bracket):
            opened = self.residuals.get(where, [])
            expected = "a StartResidual before it, in the same list"
            check_value(bool(opened), "Sequential", place.label, expected, "none")
            return opened.pop()
        for depth in range(len(where), -1, -1):
            value = self.named.get((where[:depth], channel))
            if value is not None:
                self.taken.add(value)
                return value
        argument, expected = f"{place.label}: channel {channel!r}", "an op before it that makes it, such as"
        expected += f" MakeExtraOutput(channel={channel!r}), in the same list or one around it"
        raise ValueError(message("Sequential", argument, expected, self._elsewhere(n, channel)))

    def _elsewhere(self, n: int, channel: str) -> str:
        """Who makes a channel where it can't be taken from."""
        makers = [(i, other) for i, other in enumerate(self.places) if channel in other.output_channels]
        if not makers:
            return "none"
        i, other = makers[0]
        return f"{other.label}, " + ("after it" if i >= n else "in a list of its own")

    def check_all_taken(self) -> None:
        for (_, channel), value in self.named.items():
            label, expected = self.places[value.place].label, "an op after it that takes it, such as"
            expected += f" AddExtraInput(channel={channel!r}), in the same list or one inside of it"
            check_value(value in self.taken, "Sequential", f"{label}: channel {channel!r}", expected, "none")
        for opened in self.residuals.values():
            for value in opened:
                label = self.places[value.place].label
                check_value(False, "Sequential", label, "an AddResidual after it, in the same list", "none")
