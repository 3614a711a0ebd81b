"""Programs as JAX traces them (jaxprs): where an output comes from, and scans that update stacked buffers in place.

Everything here is safe where it doesn't know a primitive: an output is then not known to be another's value, a scan
stays as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
from jax import lax

from te_jax import compat

# Primitives whose result is the operand, in other words: of another shape, type or place.
_SAME = frozenset(
    ("reshape", "copy", "copy_p", "convert_element_type", "pvary", "pcast", "reshard", "sharding_constraint")
)
_SUMS = ("add_any", "add")


class Equation:
    """An equation, equal to itself alone."""

    def __init__(self, eqn: Any) -> None:
        self.eqn = eqn

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equation) and self.eqn is other.eqn

    def __hash__(self) -> int:
        return id(self.eqn)


Path = tuple[Equation, ...]


def _is_named(term: tuple[Path, Equation | None], name: str) -> bool:
    made = term[1]
    return made is not None and compat.checkpoint_name_of(made.eqn) == name


class Program:
    """A traced function, ``jax.make_jaxpr(...)(...)``.

    Attributes:
      closed: the jaxpr with its constants.
    """

    def __init__(self, closed: Any) -> None:
        self.closed = closed
        self._makers: dict[int, dict[Any, tuple[Any, int]]] = {}

    def only_result(self, output: int, other: int, name: str) -> Literal["alone", "in a sum"] | None:
        """Whether ``output`` is a value that ``checkpoint_name`` gave this name and that only goes to ``other`` too.

        Both may come out of scans, a part of them from each step; but ``output`` is no sum, and what a branch may not
        make is neither. "in a sum": ``other`` has it as one of its terms, once.
        """
        tops = [self.closed.jaxpr.outvars[i] for i in (output, other)]
        first, second = ([*self._terms((), self.closed.jaxpr, top)] for top in tops)
        found = [term for term in second if len(first) == 1 and term[-1] == first[0][-1]]
        if len(found) != 1 or not _is_named(first[0][-1], name):
            return None
        steps = first[0][:-1] + found[0][:-1]
        if not self._stays_in({(path, var) for path, _, var in steps}, {path: jaxpr for path, jaxpr, _ in steps}, tops):
            return None
        return "alone" if len(second) == 1 else "in a sum"

    def terms_named(self, output: int, name: str) -> list[bool]:
        """Of the terms of an output, whether ``checkpoint_name`` gave each this name."""
        return [
            _is_named(way[-1], name) for way in self._terms((), self.closed.jaxpr, self.closed.jaxpr.outvars[output])
        ]

    def _terms(self, path: Path, jaxpr: Any, var: Any) -> Iterator[tuple]:
        """The terms of a sum, each as (..., (path, jaxpr, variable), (path, equation)): its way from what makes it.

        A path has the equations that the jaxpr is inside of: one jaxpr may be that of several.
        """
        here = (path, jaxpr, var)
        if (made := self._maker(jaxpr, var)) is None:
            yield here, (path, None)
            return
        eqn, index = made
        if eqn.primitive.name in _SUMS or eqn.primitive.name in _SAME:
            below = itertools.chain.from_iterable(self._terms(path, jaxpr, operand) for operand in eqn.invars)
        elif (inner := _inner(eqn, index)) is not None:
            below = self._terms((*path, Equation(eqn)), inner, inner.outvars[index])
        else:
            yield here, (path, Equation(eqn))
            return
        for way in below:
            yield here, *way

    def _stays_in(self, ways: set, jaxprs: Mapping[Path, Any], tops: Sequence) -> bool:
        """Whether the variables on these ways are read by nothing but what makes the next ones."""
        for path, jaxpr in jaxprs.items():
            here = {var for at, var in ways if at == path}
            for eqn in jaxpr.eqns:
                reads = any(not compat.is_literal(var) and var in here for var in eqn.invars)
                if reads and not any(var in here for var in eqn.outvars):
                    return False
            if not path:
                continue
            above = {var for at, var in ways if at == path[:-1]}
            for var, outer in zip(jaxpr.outvars, path[-1].eqn.outvars, strict=True):
                if not compat.is_literal(var) and var in here and outer not in above:
                    return False
        top = [var for var in self.closed.jaxpr.outvars if not compat.is_literal(var) and ((), var) in ways]
        return len(top) == len(tops)

    def _maker(self, jaxpr: Any, var: Any) -> tuple[Any, int] | None:
        """The equation that makes a variable, and which of its results it is; None: an argument or a constant."""
        if compat.is_literal(var):
            return None
        if id(jaxpr) not in self._makers:
            self._makers[id(jaxpr)] = {v: (e, i) for e in jaxpr.eqns for i, v in enumerate(e.outvars)}
        return self._makers[id(jaxpr)].get(var)

    def in_place(self, *arguments: Any, updates: Mapping[int, int]) -> list[Any]:
        """The outputs, as the function itself gives them.

        ``updates`` says which output is the next value of which argument: a scan that takes such an argument step by
        step and gives the output step by step carries it instead. XLA then updates one stack of buffers in place,
        where it would have a second one, filled with zeros first and copied over the argument later.
        """
        jaxpr = self.closed.jaxpr
        sources = {jaxpr.invars[i]: n for n, i in enumerate(updates.values())}
        targets = {jaxpr.outvars[o]: n for n, o in enumerate(updates)}
        return _evaluate(jaxpr, self.closed.consts, arguments, sources, targets)


def _inner(eqn: Any, index: int) -> Any:
    """The jaxpr that an equation runs, which gives its results one by one; None: it does something else to them."""
    if eqn.primitive.name == "scan" and index < compat.scan_counts(eqn)[1]:
        return None
    if eqn.primitive.name in ("while", "cond"):
        return None
    for name in ("jaxpr", "call_jaxpr"):
        if (inner := eqn.params.get(name)) is not None:
            inner = getattr(inner, "jaxpr", inner)
            return inner if len(inner.outvars) == len(eqn.outvars) else None
    return None


Numbers = Mapping[Any, int]  # variable -> the number of the update whose argument or output it is


def _evaluate(jaxpr: Any, consts: Sequence, args: Sequence, sources: Numbers, targets: Numbers) -> list[Any]:
    """``jax.core.eval_jaxpr``, but for scans that update buffers."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    targets = _before(jaxpr, targets)

    def read(var: Any) -> Any:
        return var.val if compat.is_literal(var) else values[var]

    for eqn in jaxpr.eqns:
        operands = [read(var) for var in eqn.invars]
        made = [targets.get(var) for var in eqn.outvars]
        taken = [None if compat.is_literal(var) else sources.get(var) for var in eqn.invars]
        both = {n for n in made if n is not None} & {n for n in taken if n is not None}
        with eqn.ctx.manager, jax.named_scope(str(eqn.source_info.name_stack)):
            if both and eqn.primitive.name == "scan":
                results = _scan_in_place(eqn, operands, taken, made)
            elif both and eqn.primitive.name in ("jit", "pjit"):
                closed = eqn.params["jaxpr"]
                results = _evaluate(
                    closed.jaxpr, closed.consts, operands, _numbers(closed.jaxpr.invars, taken),
                    _numbers(closed.jaxpr.outvars, made),
                )  # fmt: skip
            else:
                results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
                results = results if eqn.primitive.multiple_results else [results]
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _numbers(variables: Sequence, numbers: Sequence[int | None]) -> dict[Any, int]:
    pairs = zip(variables, numbers, strict=True)
    return {var: n for var, n in pairs if n is not None and not compat.is_literal(var)}


def _before(jaxpr: Any, targets: Numbers) -> Numbers:
    """``targets`` with the variables that they are the same values as."""
    found = dict(targets)
    for eqn in reversed(jaxpr.eqns):
        same = eqn.primitive.name in _SAME or compat.checkpoint_name_of(eqn) is not None
        if same and eqn.outvars[0] in found:
            found.setdefault(eqn.invars[0], found[eqn.outvars[0]])
    return found


def _scan_in_place(eqn: Any, operands: Sequence, taken: Sequence, made: Sequence) -> list[Any]:
    num_consts, num_carry = compat.scan_counts(eqn)
    body, first_x = eqn.params["jaxpr"], num_consts + num_carry
    xs, ys = taken[first_x:], made[num_carry:]
    # The buffers: places among xs and among ys.
    places = [(xs.index(n), k) for k, n in enumerate(ys) if n is not None and n in xs]
    buffer_xs, buffer_ys = [j for j, _ in places], [k for _, k in places]
    consts, carry, stacks = operands[:num_consts], operands[num_consts:first_x], operands[first_x:]
    length, reverse = eqn.params["length"], eqn.params["reverse"]

    def step(state: Any, sliced: Sequence) -> Any:
        carry, buffers, i = state
        slices = iter(sliced)
        own = {j: lax.dynamic_index_in_dim(b, i, 0, keepdims=False) for j, b in zip(buffer_xs, buffers, strict=True)}
        full = [own[j] if j in own else next(slices) for j in range(len(stacks))]
        outs = _evaluate(
            body.jaxpr, body.consts, (*consts, *carry, *full), _numbers(body.jaxpr.invars, taken),
            _numbers(body.jaxpr.outvars, made),
        )  # fmt: skip
        carry, new = outs[:num_carry], outs[num_carry:]
        buffers = [lax.dynamic_update_index_in_dim(b, new[k], i, 0) for b, k in zip(buffers, buffer_ys, strict=True)]
        return (carry, buffers, i - 1 if reverse else i + 1), [y for k, y in enumerate(new) if k not in buffer_ys]

    i = jax.numpy.int32(length - 1 if reverse else 0)
    rest = [stack for j, stack in enumerate(stacks) if j not in buffer_xs]
    state = (list(carry), [stacks[j] for j in buffer_xs], i)
    (carry, buffers, _), kept = lax.scan(
        step, state, rest, length=length, reverse=reverse, unroll=eqn.params["unroll"]
    )  # fmt: skip
    others, updated = iter(kept), dict(zip(buffer_ys, buffers, strict=True))
    return [*carry, *(updated[k] if k in updated else next(others) for k in range(len(ys)))]


def trace(function: Callable, *arguments: Any) -> tuple[Program, Any]:
    """(the program of a function of pytrees, the types of its results)."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return Program(closed), shapes
