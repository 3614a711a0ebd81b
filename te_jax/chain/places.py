"""The ops of a chain in their places: lists inside of it laid out flat, every op with the scope of its parameters.

A list inside of a chain is there for its reader (and for the channels of its extra values): its ops are ops of the
chain, fused across its ends, with the chain's recipe and dtypes. What is a Flax module is not looked into: it has a
scope, settings and FP8 state of its own, and ends a run.

Names are those that Flax gives to modules in such an attribute: ``ops_3`` for the element 3, ``ops_3_0`` for the
element 0 of a list that is the element 3. An object that is listed twice has the name of its first place.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import flax.linen as nn
from flax import nnx

from te_jax.errors import check_type, check_value, message
from te_jax.ops.base import Channel, Op, Shared
from te_jax.ops.collective import bias_last

Path = tuple[int, ...]  # (3, 0): element 0 of the list that is element 3
ExtrasOf = Callable[[Any], tuple[int, int]]  # how many extra inputs and outputs something that is not an op has


def position(path: Path) -> str:
    """``ops[3][0]``"""
    return "ops" + "".join(f"[{i}]" for i in path)


def scope_of(path: Path) -> str:
    """``ops_3_0``: the scope of an op without a name of its own."""
    return "ops_" + "_".join(map(str, path))


@dataclasses.dataclass(frozen=True)
class Place:
    """One basic op, its place in the user's list and the scope of its parameters."""

    op: Op
    path: Path
    scope: str

    @property
    def label(self) -> str:
        return f"{position(self.path)} ({self.op})"

    @property
    def input_channels(self) -> tuple[Channel | Shared, ...]:
        return self.op.extra_input_channels()

    @property
    def output_channels(self) -> tuple[Channel, ...]:
        return self.op.extra_output_channels()


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A Flax module or a function of an array between ops; a chain that is a module may have extra values, by order."""

    item: Any
    path: Path
    scope: str  # "" of a function
    num_extra_inputs: int
    num_extra_outputs: int

    @property
    def name(self) -> str:
        return type(self.item).__name__ if isinstance(self.item, nn.Module) else _function_name(self.item)

    @property
    def label(self) -> str:
        return f"{position(self.path)} ({self.name})"

    @property
    def input_channels(self) -> tuple[Channel | Shared, ...]:
        return (None,) * self.num_extra_inputs

    @property
    def output_channels(self) -> tuple[Channel, ...]:
        return (None,) * self.num_extra_outputs


def _function_name(function: Any) -> str:
    return getattr(function, "__name__", "function")


def freeze(items: Iterable[Any]) -> tuple[Any, ...]:
    """A list of ops as a tuple of the same, lists inside of it too: hashable."""
    return tuple(freeze(item) if isinstance(item, list | tuple) else item for item in items)


def read_places(items: Sequence[Any], extras_of: ExtrasOf) -> list[Place | Foreign]:
    """Everything in a chain, in order, but for a Bias before a sum over devices (``bias_last``).

    Raises:
      TypeError: something that is neither an op, a Flax module, a function nor a list of these.
      ValueError: two ops want the same scope, or one that can't be stored.
    """
    places: list[Place | Foreign] = []
    scopes: dict[int, str] = {}
    owners: dict[str, tuple[Path, Any]] = {}  # scope -> who has it
    for path, item in _flat(items):
        is_op = isinstance(item, Op)
        # An nnx module would run as a function of its present weights, which nothing would train.
        ok = is_op or (callable(item) and not isinstance(item, type | nnx.Module))
        expected = "an op, a Flax module or a function" + (" (or a list of them)" if len(path) > 1 else "")
        expected += ", no nnx module (te.nnx.Sequential takes those)" if isinstance(item, nnx.Module) else ""
        check_type(ok, "Sequential", position(path), expected, repr(item))
        scope = ""
        if is_op or isinstance(item, nn.Module):
            scope = scopes.setdefault(id(item), _scope(path, item))
            _check_scope(path, item, scope)
            _check_owner(path, item, scope, *owners.setdefault(scope, (path, item)))
        if is_op:
            _check_is_data(path, item)
            places += [Place(op, path, scope) for op in item.expand()]
        else:
            places.append(Foreign(item, path, scope, *extras_of(item)))
    return bias_last(places)


def _flat(items: Sequence[Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    for i, item in enumerate(items):
        if isinstance(item, list | tuple):
            yield from _flat(item, (*path, i))
        else:
            yield (*path, i), item


def _scope(path: Path, item: Any) -> str:
    return scope_of(path) if item.name is None else item.name


def _check_scope(path: Path, item: Any, scope: Any) -> None:
    """A scope is a name in the checkpoint too, which joins names with "." and "/"; fp8_<i>... is the state's."""
    ok = isinstance(scope, str) and not any(c in scope for c in "./") and re.match(r"fp8_\d", scope) is None
    expected = "None or a string without '.' and '/' that doesn't begin as fp8_<number>"
    check_value(ok, "Sequential", f"name of {position(path)} ({type(item).__name__})", expected, repr(scope))


def _check_owner(path: Path, item: Any, scope: str, first: Path, owner: Any) -> None:
    check_value(
        owner is item,
        "Sequential",
        f"{position(path)} ({type(item).__name__})",
        "a name of its own (to share parameters, list the same object twice)",
        f"{scope!r}, which {position(first)} ({type(owner).__name__}) has",
    )


def _check_is_data(path: Path, op: Op) -> None:
    """Plans and programs are cached on an op's fields: what is no field would be another op's behaviour."""
    argument = f"{position(path)} ({type(op).__name__})"
    hidden = sorted(set(vars(op)) - {field.name for field in dataclasses.fields(op)})
    check_type(not hidden, "Sequential", argument, "a @dataclasses.dataclass(frozen=True), all of it in fields", hidden)
    try:
        hash(op)
    except TypeError as error:
        raise TypeError(message("Sequential", argument, "hashable fields (a tuple instead of a list)", error)) from None
