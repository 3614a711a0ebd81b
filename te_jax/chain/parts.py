"""A chain as the parts that run one after the other: maximal runs of ops, and what stands between them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from te_jax.chain.extras import CALL, Extras, Value, read_extras
from te_jax.chain.places import ExtrasOf, Foreign, Place, read_places, scope_of
from te_jax.errors import check_value
from te_jax.fusion.run import Output, Wiring


@dataclasses.dataclass(frozen=True)
class RunPart:
    """A maximal run of ops. Takes the extra values ``entering``, in this order, and returns those ``leaving``.

    ``named``: whether what is kept for quantizers says the names of their ops (see ``read_chain``).
    """

    places: tuple[Place, ...]
    wiring: Wiring
    entering: tuple[Value, ...]
    leaving: tuple[Value, ...]
    named: bool = False

    @property
    def name(self) -> str:
        """What is kept for a run is under the path of the op that its user lists first: "3", or "3_0" in a list."""
        first = "_".join(map(str, min(place.path for place in self.places)))
        rows = [_rows_name(place) for place in self.places if place.op.roles and place.op.groups is None]
        return "_".join([first, *rows]) if self.named and rows else first

    def name_of(self, link: int) -> str:
        """What is kept for one op alone, a linear with groups, is under its own path."""
        place = self.places[link]
        named = self.named and place.scope != scope_of(place.path)
        return "_".join([*map(str, place.path), *([place.scope] if named else [])])

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


def read_chain(items: Sequence[Any], extras_of: ExtrasOf, *, fixed: bool = False) -> Chain:
    """The chain that a list of ops, modules, functions and lists of these is. Errors: read_places, read_extras.

    The FP8 state of a run is stacked over its quantizers, in the order of the ops. Parameters are found by the names of
    ops: if a user could change the order, or one op for another, and these were found all the same, then the state is
    under the names of the ops too, so that it isn't taken for another op's. Names that are made of places need no such.

    Args:
      fixed: the ops and their order are not the user's, but the module's.
    """
    places = read_places(items, extras_of)
    extras = read_extras(places)
    named = not fixed and _can_be_reordered([place for place in places if isinstance(place, Place)])
    parts: list[RunPart | ForeignPart] = []
    start = 0
    for is_run, group in itertools.groupby(places, lambda place: isinstance(place, Place)):
        members = list(group)
        if is_run:
            parts.append(_run_part(places, extras, start, start + len(members), named))
        else:
            parts += [_foreign_part(places, extras, n) for n in range(start, start + len(members))]
        start += len(members)
    return Chain(tuple(parts), tuple(places), extras.outputs, extras.takers)


def _can_be_reordered(places: Sequence[Place]) -> bool:
    """Whether several ops have quantizers, and one of them a name of its own, or no kernel that would be missed."""
    first: dict[str, str] = {}
    for place in places:
        first.setdefault(place.scope, scope_of(place.path))
    quantizing = [place for place in places if place.op.roles]
    return len(quantizing) > 1 and any(
        place.scope != first[place.scope] or "kernel" not in place.op.roles for place in quantizing
    )


def _rows_name(place: Place) -> str:
    """The op's name, and what it quantizes if that isn't a linear's x, kernel and dy."""
    return "_".join([place.scope, *([] if "kernel" in place.op.roles else place.op.roles)])


def _foreign_part(places: Sequence[Any], extras: Extras, n: int) -> ForeignPart:
    made = tuple(Value(n, number) for number in range(len(places[n].output_channels)))
    return ForeignPart(places[n], extras.inputs[n], made)


def _run_part(places: Sequence[Any], extras: Extras, start: int, stop: int, named: bool) -> RunPart:
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
    return RunPart(tuple(places[start:stop]), wiring, tuple(entering), tuple(leaving), named)
