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
from te_jax.primitives.spec import ScaleReadSpec, ScaleWriteSpec
from te_jax.recipe import DelayedScaling, Recipe

Scales = list[dict[str, Array]]  # link -> role -> f32[]


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

    @property
    def quantizes(self) -> bool:
        """Whether anything is quantized."""
        return any(info.quantized for info in self.links)

    @property
    def quantizers(self) -> tuple[tuple[int, str], ...]:
        """(link, role) of every row of the run's FP8 state. Unquantized linears have theirs, unused."""
        return tuple((i, role) for i, info in enumerate(self.links) for role in info.op.roles)

    @property
    def stateful_recipe(self) -> DelayedScaling:
        """The recipe of a run that has FP8 state; raises TypeError for one that keeps none."""
        if not isinstance(self.recipe, DelayedScaling):
            raise TypeError(errors.message("fusion.execute", "recipe", "DelayedScaling", type(self.recipe).__name__))
        return self.recipe

    @property
    def scale_spec(self) -> ScaleReadSpec:
        """How the scales of the run's quantizers come from its FP8 state."""
        recipe = self.stateful_recipe
        return ScaleReadSpec(
            formats=" ".join(recipe.format(role).name for _, role in self.quantizers),
            margin=recipe.margin,
            most_recent=recipe.amax_compute_algo == "most_recent",
        )


def read_scales(run: Run, state: Mapping[str, Array]) -> Scales:
    """Per link: role -> f32[], the scale to quantize with. Empty without state (current scaling)."""
    scales: Scales = [{} for _ in run.links]
    if state and run.quantizes:
        for (link, role), scale in zip(run.quantizers, primitives.scale_read(state, run.scale_spec), strict=True):
            scales[link][role] = scale
    return scales


def write_state(run: Run, state: Mapping[str, Array], used: Sequence[Used]) -> Mapping[str, Array]:
    """The state's cotangent: its next value; zero in the rows of quantizers that this call didn't use."""
    if not state or not run.quantizes:
        return jax.tree.map(lambda leaf: Like.of(leaf).match(jnp.zeros(leaf.shape, leaf.dtype)), state)
    rows = [used[link].get(role) for link, role in run.quantizers]
    read = run.scale_spec
    spec = ScaleWriteSpec(
        formats=read.formats,
        margin=read.margin,
        most_recent=read.most_recent,
        used="".join("0" if row is None else "1" for row in rows),
    )
    return primitives.scale_write(state, [amax for amax in rows if amax is not None], spec)
