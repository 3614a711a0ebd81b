"""Run: a maximal run of ops with everything that tracing knows of it, and its FP8 state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from te_jax import errors, primitives
from te_jax.fusion.cotangent import Like
from te_jax.fusion.fuser import RunPlan, plan_run
from te_jax.fusion.pattern import Rule
from te_jax.ops.base import LinkInfo, Used
from te_jax.parallel import mesh
from te_jax.parallel.amax import reduce_together
from te_jax.primitives.spec import ScaleReadSpec, ScaleWriteSpec
from te_jax.recipe import DelayedScaling, Recipe

State = Mapping[str, Mapping[str, Array]]  # SHARED, or the number of a link with groups -> leaves
Scales = list[dict[str, Array]]  # link -> role -> f32[], or f32[groups]
SHARED = "shared"
"""The key in the state of the leaves that all linears without groups share."""


class Output(NamedTuple):
    """An extra output inside of a run: the link that makes it, and which of the link's it is."""

    link: int
    number: int


@dataclasses.dataclass(frozen=True)
class Wiring:
    """How extra values go in a run.

    ``inputs``: for every link, where each of its extra inputs comes from: an extra output of a link before it, or the
    number of an extra argument of the run. ``leaving``: the extra outputs that the run returns, in that order.
    """

    inputs: tuple[tuple[int | Output, ...], ...]
    leaving: tuple[Output, ...]

    def takers(self, source: int | Output) -> Iterator[tuple[int, int]]:
        """(link, number) of every extra input that comes from there."""
        for link, sources in enumerate(self.inputs):
            yield from ((link, number) for number, other in enumerate(sources) if other == source)


class StatePart(NamedTuple):
    """Leaves of FP8 state: its quantizers as (link, role), and how their scales come from it."""

    rows: tuple[tuple[int, str], ...]
    spec: ScaleReadSpec

    @property
    def shape(self) -> tuple[int, ...]:
        """The leading dimensions of the leaves. Groups come first, so that they can be split with the experts."""
        return (self.spec.groups, len(self.rows)) if self.spec.groups else (len(self.rows),)


@dataclasses.dataclass(frozen=True)
class Run:
    """A maximal run of ops. Hashable: the static argument of its VJP.

    ``forward_state``: whether the forward pass, too, returns the next FP8 state, as far as it is known there.
    """

    links: tuple[LinkInfo, ...]
    recipe: Recipe | None
    forward_rules: tuple[Rule, ...]
    backward_rules: tuple[Rule, ...]
    wiring: Wiring
    forward_state: bool = False

    @property
    def plan(self) -> RunPlan:
        return plan_run(self.links, self.forward_rules, self.backward_rules)

    def saved_by(self, link: int) -> int | None:
        """The link that saves the input of ``link`` as it is, if that is the first one to see it; None: there is none.

        So the input of a norm has its name before a residual branches off.
        """
        if link > 0 and self.links[link - 1].op.hands_on:
            return None
        reader = next((i for i in range(link, len(self.links)) if not self.links[i].op.hands_on), None)
        return reader if reader is not None and self.links[reader].op.saves_input(self.links[reader]) else None

    @property
    def quantizes(self) -> bool:
        """Whether anything is quantized."""
        return any(info.quantized for info in self.links)

    @property
    def quantizers(self) -> tuple[tuple[int, str], ...]:
        """(link, role) of every row of the FP8 state that linears share. Unquantized linears have theirs, unused."""
        shared = [(i, info.op) for i, info in enumerate(self.links) if info.op.groups is None]
        return tuple((i, role) for i, op in shared for role in op.roles)

    @property
    def stateful_recipe(self) -> DelayedScaling:
        """The recipe of a run that has FP8 state; raises TypeError for one that keeps none."""
        if not isinstance(self.recipe, DelayedScaling):
            raise TypeError(errors.message("fusion.execute", "recipe", "DelayedScaling", type(self.recipe).__name__))
        return self.recipe

    def state_parts(self) -> dict[str, StatePart]:
        """The parts of the FP8 state by key: the leaves that linears share, and those of each one with groups."""
        parts = {SHARED: self._state_part(self.quantizers)} if self.quantizers else {}
        for i, info in enumerate(self.links):
            if info.op.groups is not None and info.op.roles:
                parts[str(i)] = self._state_part(tuple((i, role) for role in info.op.roles))
        return parts

    def _state_part(self, rows: tuple[tuple[int, str], ...]) -> StatePart:
        recipe = self.stateful_recipe
        spec = ScaleReadSpec(
            formats=" ".join(recipe.format(role).name for _, role in rows),
            margin=recipe.margin,
            most_recent=recipe.amax_compute_algo == "most_recent",
            groups=self.links[rows[0][0]].op.groups or 0,
        )
        return StatePart(rows, spec)


def read_scales(run: Run, state: State) -> Scales:
    """Per link: role -> the scale to quantize with, f32[] or f32[groups]. Empty without state (current scaling)."""
    scales: Scales = [{} for _ in run.links]
    if state and run.quantizes:
        for key, (rows, spec) in run.state_parts().items():
            for (link, role), scale in zip(rows, primitives.scale_read(state[key], spec), strict=True):
                initial = run.links[link].initial_scale(role)
                scales[link][role] = scale if initial is None else jnp.where(scale == 0, jnp.float32(initial), scale)
    return scales


def write_state(run: Run, state: State, used: Sequence[Used]) -> State:
    """The state's cotangent: its next value; zero in the rows of quantizers that this call didn't use.

    Amaxes are, in Manual mode, those of each device's part of the tensors: no one else reads them, so they are reduced
    here, all at once.
    """
    if not state or not run.quantizes:
        return jax.tree.map(lambda leaf: Like.of(leaf).match(jnp.zeros(leaf.shape, leaf.dtype)), state)
    parts = run.state_parts()
    whole = _reduced(
        {key: [used[link].get(role) for link, role in rows] for key, (rows, _) in parts.items()}, run, state
    )
    written = {}
    for key, (_, read) in parts.items():
        amaxes = whole[key]
        fields = {field.name: getattr(read, field.name) for field in dataclasses.fields(read)}
        spec = ScaleWriteSpec(**fields, used="".join("0" if amax is None else "1" for amax in amaxes))
        written[key] = primitives.scale_write(state[key], [amax for amax in amaxes if amax is not None], spec)
    return written


def _reduced(amaxes: Mapping[str, Sequence[Array | None]], run: Run, state: State) -> dict[str, list[Array | None]]:
    """The amaxes of every part of the state, reduced over the manual axes that they vary over and the part does not."""
    flat, axes = [], []
    for key, rows in amaxes.items():
        given = [amax for amax in rows if amax is not None]
        over = {axis: None for amax in given for axis in mesh.amax_axes(amax, state[key]["scale"], run.recipe)}
        flat += given
        axes += [tuple(over)] * len(given)
    whole = iter(reduce_together(flat, axes))
    return {key: [None if amax is None else next(whole) for amax in rows] for key, rows in amaxes.items()}
