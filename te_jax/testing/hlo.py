"""Reads programs as text, lowered (StableHLO) or compiled (HLO): which custom calls and collectives they hold.

Calls are followed: a custom call in a function that is called twice counts twice. One in the body of a loop counts
once per mention of the body, however often the loop runs.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re

_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_STABLEHLO_FUNCTION = re.compile(r"^\s*func\.func (?:(?:public|private) )?@([\w.$-]+)\(")
_STABLEHLO_CALL = re.compile(r"(?<!custom_)\bcall @([\w.$-]+)\(")
_STABLEHLO_CUSTOM_CALL = re.compile(r"stablehlo\.custom_call @([\w.$-]+)\(")
_HLO_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.$-]+) \(.*\) -> .* \{$")
_HLO_CUSTOM_CALL = re.compile(r'custom_call_target="([^"]+)"')
_HLO_CALLED = re.compile(
    r"(?:to_apply|calls|body|condition|true_computation|false_computation|branch_computations)="
    r"(\{[^}]*\}|%?[\w.$-]+)"
)
_HLO_START = re.compile(r" [\w-]+-start\(")
_HLO_DONE = re.compile(r" [\w-]+-done\((%?[\w.$-]+)\)")
_HOST = "S(5)"  # the memory space, in layouts
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class CustomCall:
    """One custom call of a compiled program. Shapes are ``(dtype, dims)``, e.g. ``("f8e4m3fn", (16, 32))``."""

    target: str
    operands: tuple[tuple[str, tuple[int, ...]], ...]
    results: tuple[tuple[str, tuple[int, ...]], ...]
    text: str


def count_custom_calls(text: str, prefix: str = "te_jax_") -> collections.Counter[str]:
    """How many custom calls a program holds, by target, following calls from its entry.

    ``text`` is ``lowered.as_text()`` or ``compiled.as_text()``; only targets that start with ``prefix`` are counted.
    """
    entry, functions = _functions(text)
    counts: collections.Counter[str] = collections.Counter()
    pending = [entry]
    while pending:
        custom_calls, called = functions[pending.pop()]
        counts.update(target for target in custom_calls if target.startswith(prefix))
        pending += called
    return counts


def custom_calls(compiled_text: str, prefix: str = "te_jax_") -> list[CustomCall]:
    """Every custom call in a compiled program, with the (per-device) shapes of its operands and results."""
    shapes: dict[str, tuple] = {}
    calls = []
    for line in compiled_text.splitlines():
        name, equals, rest = line.strip().removeprefix("ROOT ").partition(" = ")
        if not equals:
            continue
        result, _, _ = rest.partition(" custom-call(")
        target = _HLO_CUSTOM_CALL.search(rest)
        if target and target[1].startswith(prefix):
            operands = _between_brackets(rest[len(result) + len(" custom-call") :])
            inline = _shapes(operands)  # printed with operand shapes, or only with their names
            named = tuple(s for n in re.findall(r"%[\w.$-]+", operands) for s in shapes.get(n, ()))
            calls.append(CustomCall(target[1], inline or named, _shapes(result), line.strip()))
        shapes[name] = _shapes(rest.split("(")[0] if not rest.startswith("(") else _between_brackets(rest))
    return calls


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """An asynchronous copy between device and host memory, in a program whose instructions are scheduled.

    Attributes:
      computation: the computation that it is in, such as the body of a loop.
      to_host: which way.
      tensor: (dtype, dims) of what is copied.
      before: kernels of that computation (custom calls and fusions) that run before the copy starts.
      during: those between its start and its end, under which it hides.
    """

    computation: str
    to_host: bool
    tensor: tuple[str, tuple[int, ...]]
    before: int
    during: int


def host_copies(compiled_text: str) -> list[HostCopy]:
    """The asynchronous copies to and from host memory of a compiled program, in the order in which they end."""
    copies: list[HostCopy] = []
    computation, kernels, started = "", 0, {}
    for line in compiled_text.splitlines():
        if header := _HLO_COMPUTATION.match(line):
            computation, kernels, started = header[1], 0, {}
        name, equals, rest = line.strip().removeprefix("ROOT ").partition(" = ")
        if not equals:
            continue
        if start := _HLO_START.search(rest):
            types = rest[: start.start()]
            if _HOST in types:
                # ((operands), results, context): the smallest that is no index is what moves.
                results = types[len(_between_brackets(types[1:])) + 2 :]
                tensor = min((s for s in _shapes(types) if s[1]), key=lambda s: math.prod(s[1]))
                started[name] = (_HOST in results, tensor, kernels)
        elif done := _HLO_DONE.search(rest):
            if done[1] in started:
                to_host, tensor, before = started.pop(done[1])
                copies.append(HostCopy(computation, to_host, tensor, before, kernels - before))
        elif re.search(r" (?:custom-call|fusion)\(", rest) and "AllocateBuffer" not in rest:
            kernels += 1
    return copies


def count_collectives(compiled_text: str) -> collections.Counter[str]:
    """How many collectives of each kind a compiled program holds; asynchronous pairs count once."""
    counts: collections.Counter[str] = collections.Counter()
    for kind in _COLLECTIVES:
        found = len(re.findall(rf" {kind}(?:-start)?\(", compiled_text))
        if found:
            counts[kind] = found
    return counts


def _functions(text: str) -> tuple[str, dict[str, tuple[list[str], list[str]]]]:
    """(entry, {function: (its custom calls, the functions it calls)})."""
    stablehlo = "func.func" in text
    functions: dict[str, tuple[list[str], list[str]]] = {}
    entry = current = None
    for line in text.splitlines():
        header = (_STABLEHLO_FUNCTION if stablehlo else _HLO_COMPUTATION).match(line)
        if header:
            current = header[1]
            functions[current] = ([], [])
            if line.startswith("ENTRY") or current == "main":
                entry = current
            continue
        if current is None:
            continue
        calls, called = functions[current]
        if stablehlo:
            calls += _STABLEHLO_CUSTOM_CALL.findall(line)
            called += _STABLEHLO_CALL.findall(line)
        else:
            calls += _HLO_CUSTOM_CALL.findall(line)
            for names in _HLO_CALLED.findall(line):
                called += re.findall(r"[\w.$-]+", names)
    if entry is None:
        raise ValueError("te_jax.testing.hlo: text: expected StableHLO or HLO with an entry function, got neither")
    return entry, functions


def _between_brackets(text: str) -> str:
    """What is inside the bracket that ``text`` starts with."""
    depth = 0
    for i, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return text[1:i]
    return text[1:]


def _shapes(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in _SHAPE.findall(text))
