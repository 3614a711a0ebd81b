"""FusionPlan: what a chain will run, readable and comparable.

Custom calls are not predicted but read: every step is traced with abstract values, and the primitives that it binds
are listed. So a plan can't differ from the program, and a test compares it with the lowered one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from te_jax import compat
from te_jax.collective import plan as collective
from te_jax.fusion.execute import backward_contexts, backward_step, forward_contexts, forward_step
from te_jax.fusion.pattern import Step
from te_jax.fusion.run import Run, read_scales, write_state
from te_jax.ops import main_grad
from te_jax.ops.base import LinkInfo
from te_jax.primitives import TARGETS, library, support
from te_jax.primitives.spec import Spec
from te_jax.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """One step: the links it runs, what it does, the custom calls it makes, and what kept it from more.

    ``computes``: False for a step that only hands values on. ``collectives``: (spec, types of operands) of its
    collective matmuls, as platforms differ in what they make of them.
    """

    ops: tuple[str, ...]
    name: str
    custom_calls: tuple[str, ...]
    writes_fp8: bool
    notes: tuple[str, ...]
    computes: bool = True
    collectives: tuple[Any, ...] = dataclasses.field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        without = "XLA" if self.computes else "nothing to compute"
        calls = _with_counts(self.custom_calls) if self.custom_calls else without
        fp8 = ", writes FP8" if self.writes_fp8 else ""
        lines = [f"{' + '.join(self.ops)}: {self.name}{fp8} [{calls}]"]
        lines += [f"      {note}" for note in self.notes]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class FusionPlan:
    """The steps of a chain, forward, and backward in the order in which they run.

    ``str(plan)`` prints them; two plans are equal if they do the same for the same ops.
    """

    title: str
    forward: tuple[PlannedStep, ...]
    backward: tuple[PlannedStep, ...]
    platform_note: str = dataclasses.field(compare=False)

    @property
    def custom_calls(self) -> dict[str, int]:
        """Target -> number of custom calls, forward and backward with every gradient wanted."""
        counts: dict[str, int] = {}
        for step in (*self.forward, *self.backward):
            for call in step.custom_calls:
                counts[call] = counts.get(call, 0) + 1
        return counts

    def __str__(self) -> str:
        lines = [self.title, "forward"]
        lines += [f"  {n}. {step}" for n, step in enumerate(self.forward, 1)]
        if self.backward:
            lines += ["backward", *(f"  {n}. {step}" for n, step in enumerate(self.backward, 1))]
        total = sum(self.custom_calls.values())
        counts = ", ".join(f"{n} {target}" for target, n in sorted(self.custom_calls.items()))
        return "\n".join([*lines, f"{total} custom calls" + (f": {counts}" if counts else ""), self.platform_note])


class Plans(dict[str, FusionPlan]):
    """The plans of a module's chains by name; ``str(plans)`` prints one after the other."""

    def __str__(self) -> str:
        return "\n\n".join(f"{name}: {plan}" for name, plan in self.items())


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A Flax module or function between two runs: it runs as it is."""

    label: str


@dataclasses.dataclass(frozen=True)
class Nested:
    """A chain that is a Flax module of its own between two runs: its steps, under its scope."""

    scope: str
    segments: list[Segment]


Segment = tuple[Run, dict] | Foreign | Nested


@compat.numpy_promotion()
def make_plan(title: str, segments: list[Segment], *, train: bool, platform: str | None) -> FusionPlan:
    """The plan of a chain, from its runs (each with the avals of its arguments) and what stands between them."""
    forward, backward = _steps(segments, train)
    calls = [call for step in (*forward, *backward) for call in step.collectives]
    notes = [_platform_note(platform), *collective.platform_notes(calls, _name_of(platform))]
    return FusionPlan(title, tuple(forward), tuple(backward), "\n".join(notes))


def _steps(segments: list[Segment], train: bool) -> tuple[list[PlannedStep], list[PlannedStep]]:
    forward: list[PlannedStep] = []
    backward: list[PlannedStep] = []
    for segment in segments:
        if isinstance(segment, Foreign):
            does = "as it is; ends a run"
            steps = ([PlannedStep((segment.label,), does, (), False, ())],) * 2
        elif isinstance(segment, Nested):
            steps = tuple([_inside(segment, step) for step in part] for part in _steps(segment.segments, train))
        else:
            steps = _trace_run(*segment, train)
        forward += steps[0]
        backward = steps[1] + backward
    return forward, backward if train else []


def _inside(nested: Nested, step: PlannedStep) -> PlannedStep:
    """A step of a nested chain: its labels say of which."""
    return dataclasses.replace(step, ops=tuple(f"{nested.scope}/{op}" for op in step.ops))


def _trace_run(run: Run, avals: dict[str, Any], train: bool) -> tuple[list[PlannedStep], list[PlannedStep]]:
    """Traces a run step by step; values between steps are ShapeDtypeStructs."""
    params, state, keys, x, extras = (avals[k] for k in ("params", "state", "keys", "x", "extras"))
    main_grads = avals["main_grads"]
    what, scales = _trace(lambda s: read_scales(run, s), state)

    arrays = (params, keys, extras, scales)
    nothing: list[tuple] = [()] * len(run.links)
    saved, outputs = nothing, nothing  # of each link: what it saved, and its extra outputs
    forward, value = [], x
    has_state = bool(state) and run.quantizes
    if has_state:
        forward.append(_reads_state(run, what))
    for step in run.plan.forward:

        def traced_forward(arrays, outputs, value, step=step):
            params, keys, extras, scales = arrays
            contexts = forward_contexts(run, params, (None,) * len(run.links), keys, extras, scales, train=train)
            for ctx, kept in zip(contexts, outputs, strict=True):
                ctx.extra_outputs = kept
            value = forward_step(run, step, contexts, value)
            return value, [ctx.saved for ctx in contexts], [ctx.extra_outputs for ctx in contexts]

        what, (value, new_saved, outputs) = _trace(traced_forward, arrays, outputs, value)
        saved = [new if i in step.links else old for i, (old, new) in enumerate(zip(saved, new_saved, strict=True))]
        forward.append(_planned(run, step, what, value, backward=False))
    if has_state and run.forward_state:
        forward.append(_writes_state(run, ("x", "kernel"), state, _DY_IS_CURRENT))
    if not train:
        return forward, []
    leaving = tuple(outputs[link][number] for link, number in run.wiring.leaving)
    backward, grads = [], nothing  # of each link: the cotangents of its extra inputs
    for step in run.plan.backward:

        def traced_backward(arrays, saved, extra_grads, grads, main_grads, value, step=step):
            params, keys, _, scales = arrays
            contexts = backward_contexts(run, params, keys, saved, extra_grads, scales, main_grads)
            for ctx, kept in zip(contexts, grads, strict=True):
                ctx.extra_input_grads = kept
            value = backward_step(run, step, contexts, value)
            made = [(ctx.param_grads, ctx.main_grad_next) for ctx in contexts]
            return value, [ctx.extra_input_grads for ctx in contexts], made

        what, (value, grads, _) = _trace(traced_backward, arrays, saved, leaving, grads, main_grads, value)
        backward.append(_planned(run, step, what, value, backward=True))
    if has_state and not run.forward_state:
        backward.append(_writes_state(run, ("x", "kernel", "dy"), state))
    return forward, backward


_DY_IS_CURRENT = "dy: current scaling, as nothing differentiates its state (te.nnx.grad does)"


def _reads_state(run: Run, what: _Traced) -> PlannedStep:
    name = f"reads the scales of {_count(run, ('x', 'kernel', 'dy'))} quantizers"
    return PlannedStep(("FP8 state",), name, what.custom_calls, False, ())


def _writes_state(run: Run, roles: tuple[str, ...], state: Any, *notes: str) -> PlannedStep:
    """The step that writes the state of the quantizers of these roles."""
    used = [{r: _amax(info) for r in info.op.roles if r in roles} if info.quantized else {} for info in run.links]
    what, _ = _trace(functools.partial(write_state, run), state, used)
    name = f"writes the state of {_count(run, roles)} quantizers"
    return PlannedStep(("FP8 state",), name, what.custom_calls, False, notes)


def _amax(info: LinkInfo) -> jax.ShapeDtypeStruct:
    """The type of an amax that a quantized linear leaves for the state."""
    return jax.ShapeDtypeStruct(() if info.op.groups is None else (info.op.groups,), jnp.float32)


def _count(run: Run, roles: tuple[str, ...]) -> int:
    """Quantizers of these roles; one for each group where there are groups."""
    parts = run.state_parts().values()
    return sum(max(spec.groups, 1) * sum(role in roles for _, role in rows) for rows, spec in parts)


def _trace(fn, *avals) -> tuple[_Traced, Any]:
    jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*avals)
    calls = list(_calls(jaxpr.jaxpr))
    collectives = tuple(call for name, *call in calls if name == "te_jax_collective_gemm")
    return _Traced(tuple(name for name, *_ in calls), bool(jaxpr.jaxpr.eqns), collectives), shapes


class _Traced(NamedTuple):
    """What a step does: the custom calls it makes, and whether it computes anything."""

    custom_calls: tuple[str, ...]
    computes: bool
    collectives: tuple[Any, ...]


def _calls(jaxpr) -> Iterator[tuple[str, Spec, list[Any]]]:
    """(name, spec, types of operands) of te_jax's custom calls that a jaxpr binds, those of inner jaxprs included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in TARGETS:
            operands = [v.aval for v in eqn.invars]
            if support.why_not(eqn.params["spec"], *operands) is None:
                yield eqn.primitive.name, eqn.params["spec"], operands
            continue
        for param in eqn.params.values():
            for inner in param if isinstance(param, tuple | list) else (param,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _calls(inner)


def _planned(run: Run, step: Step, what: _Traced, value: Any, *, backward: bool) -> PlannedStep:
    refusals = run.plan.backward_refusals if backward else run.plan.forward_refusals
    links = [run.links[i] for i in step.links]
    notes = [f"not quantized: {info.why_unquantized}" for info in links if info.why_unquantized]
    notes += [note for info in links if (note := info.op.note(info)) is not None]
    notes += getattr(step, "notes", ())
    unquantized = {info.why_unquantized for info in run.links}
    notes += [f"no {r.rule}: {r.reason}" for r in refusals if r.links[0] in step.links and r.reason not in unquantized]
    notes += [main_grad.note(info) for info in links] if backward else []
    quantized = any(info.quantized for info in links)
    if quantized and {"te_jax_gemm", "te_jax_grouped_gemm", "te_jax_collective_gemm"} & set(what.custom_calls):
        notes.append(_accumulation(links[0].quantizing_recipe, ("dgrad", "wgrad") if backward else ("fprop",)))
    writes_fp8 = not isinstance(value, Array | jax.ShapeDtypeStruct)
    return PlannedStep(
        tuple(info.label for info in links),
        step.name,
        what.custom_calls,
        writes_fp8,
        tuple(n for n in dict.fromkeys(notes) if n),
        what.computes,
        what.collectives,
    )


def _accumulation(recipe: Recipe, gemms: tuple[str, ...]) -> str:
    return "accumulation: " + ", ".join(f"{g} {'fast' if recipe.fast_accumulation(g) else 'precise'}" for g in gemms)


def describe(recipe: Recipe | None) -> str:
    """The recipe with the fields that differ from its defaults."""
    if recipe is None:
        return "None"
    changed = [
        f"{field.name}={value!r}"
        for field in dataclasses.fields(recipe)
        if (value := getattr(recipe, field.name)) != field.default
    ]
    return f"{type(recipe).__name__}({', '.join(changed)})"


def _with_counts(calls: tuple[str, ...]) -> str:
    counts: dict[str, int] = {}
    for call in calls:
        counts[call] = counts.get(call, 0) + 1
    return ", ".join(call if n == 1 else f"{n} {call}" for call, n in counts.items())


def _name_of(platform: str | None) -> str:
    platform = platform or jax.default_backend()
    return {"gpu": "cuda"}.get(platform, platform)


def _platform_note(platform: str | None) -> str:
    platform = _name_of(platform)
    if platform not in ("cpu", "cuda"):
        return f"on {platform}: no custom calls, the jnp reference runs instead"
    status = library.status(platform)
    if status.available:
        return f"on {platform}: custom calls from {status.path}"
    return f"on {platform}: the jnp reference runs instead of custom calls: {status.reason}"
