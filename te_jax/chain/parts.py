"""A chain as the parts that run one after the other: maximal runs of ops, and what stands between them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from te_jax.chain.extras import CALL, Extras, Value, read_extras
from te_jax.chain.places import ExtrasOf, Foreign, Place, read_places
from te_jax.errors import check_value
from te_jax.fusion.run import Output, Wiring


@dataclasses.dataclass(frozen=True)
class RunPart:
    """A maximal run of ops. Takes the extra values ``entering``, in this order, and returns those ``leaving``."""

    places: tuple[Place, ...]
    wiring: Wiring
    entering: tuple[Value, ...]
    leaving: tuple[Value, ...]

    @property
    def name(self) -> str:
        """What is kept for a run is under the path of the op that its user lists first: "3", or "3_0" in a list."""
        return "_".join(map(str, min(place.path for place in self.places)))

    @property
    def label(self) -> str:
        """Who makes its result."""
        return self.places[-1].label


@dataclasses.dataclass(frozen=True)
class ForeignPart:
    """A Flax module or function; only one that is a chain has extra values."""

    foreign: Foreign
    entering: tuple[Value, ...]
    leaving: tuple[Value, ...]

    @property
    def label(self) -> str:
        return self.foreign.label


@dataclasses.dataclass(frozen=True)
class Chain:
    """The parts of a chain in order, and the extra outputs of its call.

    ``places``: everything in it, by number (``Value.place``). ``takers``: labels of what takes the call's extra inputs.
    """

    parts: tuple[RunPart | ForeignPart, ...]
    places: tuple[Place | Foreign, ...]
    outputs: tuple[Value, ...]
    takers: tuple[str, ...]

    def check_count(self, name: str, extras: Sequence[Any]) -> None:
        """Raises ValueError unless there are as many extra inputs as ops that take one from the call."""
        wanted = len(self.takers)
        expected = f"{wanted}, for {', '.join(self.takers)}" if wanted else "0"
        check_value(len(extras) == wanted, name, "extra inputs", expected, len(extras))

    def origin(self, value: Value) -> str:
        """Where an extra value comes from, for messages."""
        return f"extra input {value.number}" if value.place == CALL else self.places[value.place].label


def read_chain(items: Sequence[Any], extras_of: ExtrasOf) -> Chain:
    """The chain that a list of ops, modules, functions and lists of these is. Errors: read_places, read_extras."""
    places = read_places(items, extras_of)
    extras = read_extras(places)
    parts: list[RunPart | ForeignPart] = []
    start = 0
    for is_run, group in itertools.groupby(places, lambda place: isinstance(place, Place)):
        members = list(group)
        if is_run:
            parts.append(_run_part(places, extras, start, start + len(members)))
        else:
            parts += [_foreign_part(places, extras, n) for n in range(start, start + len(members))]
        start += len(members)
    return Chain(tuple(parts), tuple(places), extras.outputs, extras.takers)


def _foreign_part(places: Sequence[Any], extras: Extras, n: int) -> ForeignPart:
    made = tuple(Value(n, number) for number in range(len(places[n].output_channels)))
    return ForeignPart(places[n], extras.inputs[n], made)


def _run_part(places: Sequence[Any], extras: Extras, start: int, stop: int) -> RunPart:
    """The run of the places from start up to stop; links are numbered from its start."""
    entering: list[Value] = []
    inputs: list[tuple[int | Output, ...]] = []
    for n in range(start, stop):
        sources: list[int | Output] = []
        for value in extras.inputs[n]:
            if value.place >= start:
                sources.append(Output(value.place - start, value.number))
                continue
            if value not in entering:
                entering.append(value)
            sources.append(entering.index(value))
        inputs.append(tuple(sources))
    later = {value for sources in extras.inputs[stop:] for value in sources} | set(extras.outputs)
    leaving = [
        Value(n, number)
        for n in range(start, stop)
        for number in range(len(places[n].output_channels))
        if Value(n, number) in later
    ]
    wiring = Wiring(tuple(inputs), tuple(Output(n - start, number) for n, number in leaving))
    return RunPart(tuple(places[start:stop]), wiring, tuple(entering), tuple(leaving))
