"""FP8 scale state: what a step reads and writes of one run of ops. Public as te_jax.state.

The leaves and the reasons for them are in te_jax/quant/state_leaves.py, what may be done to the state of a whole model
is in te_jax/quant/state_trees.py; their names are here too.

This is the reference of the custom calls ``te_jax_scale_read`` and ``te_jax_scale_write`` (te_jax/primitives/state.py,
csrc/core/state.h), which give the same bits as it does on CPU.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from te_jax import compat, errors
from te_jax.quant.division import divide
from te_jax.quant.format import MAX_SCALE
from te_jax.quant.state_leaves import LEAVES, NO_AMAX, PARITY, RUNGS, TINY, Leaves, W, decode, encode
from te_jax.quant.state_trees import (
    COLLECTION,
    KERNELS,
    MAIN_GRAD,
    accumulate,
    accumulate_stacked,
    apply,
    check,
    merge,
    split,
)
from te_jax.recipe import DelayedScaling, Recipe

__all__ = [
    "COLLECTION",
    "KERNELS",
    "LEAVES",
    "MAIN_GRAD",
    "NO_AMAX",
    "PARITY",
    "RUNGS",
    "Leaves",
    "StateView",
    "W",
    "accumulate",
    "accumulate_stacked",
    "apply",
    "check",
    "init",
    "merge",
    "read",
    "split",
    "write",
]


class StateView(NamedTuple):
    """What a step reads from the leaves.

    Attributes:
      scale: f32[Q], to quantize with now. 0: unseeded, take the current tensor's amax. NaN: bad.
      history: f32[Q, H], amax of past steps, newest first; 0 where there is none.
      parity: f32[Q], what this step writes: +1 or -1, 0 if bad.
      bad: bool[Q], something that is not linear stepped this state.
    """

    scale: jax.Array
    history: jax.Array
    parity: jax.Array
    bad: jax.Array


def init(num_quantizers: int, recipe: Recipe) -> dict[str, jax.Array]:
    """The leaves of `num_quantizers` new quantizers: all zero, which reads as unseeded.

    Raises:
      ValueError: the recipe keeps no state.
    """
    expected = "one that keeps state (DelayedScaling)"
    if not isinstance(recipe, DelayedScaling):
        raise ValueError(errors.message("state.init", "recipe", expected, type(recipe).__name__))
    q, h = num_quantizers, recipe.amax_history_len
    return {
        "amax_history": jnp.zeros((q, h), jnp.float32),
        "scale": jnp.zeros((q,), jnp.float32),
        "uses": jnp.zeros((q, RUNGS + 2), jnp.float32),
    }


@functools.partial(jax.jit, static_argnames="recipe", inline=True)  # one program where it is called outside of one
@compat.numpy_promotion()
def read(leaves: Leaves, fp8_max: jax.typing.ArrayLike, recipe: DelayedScaling) -> StateView:
    """Reads the leaves of Q quantizers whose formats have the largest values `fp8_max` f32[Q]."""
    d = decode(leaves)
    # A step without a finite amax > 0 leaves the history as it was before it.
    pushed = jnp.concatenate([d.newest[..., None], d.older], -1)
    not_pushed = jnp.concatenate([d.older, jnp.zeros_like(d.newest)[..., None]], -1)
    history = jnp.where(d.newest[..., None] > 0, pushed, not_pushed)
    if recipe.amax_compute_algo == "most_recent":
        amax = history[..., 0]
    else:
        amax = jnp.maximum(d.newest, d.older_max)
    derived = divide(fp8_max, jnp.where(amax > 0, amax, 1.0)) * 2.0**-recipe.margin
    derived = jnp.minimum(jnp.where(derived >= TINY, derived, 0.0), MAX_SCALE)
    # Without history a scale is kept, unless there was an amax too small for the history (below 2**-62): unseeded.
    kept = jnp.where(d.has_amax, 0.0, d.scale)
    scale = jnp.where(amax > 0, derived, kept)
    parity = jnp.where(d.bad, 0.0, jnp.where(d.parity > 0, -1.0, 1.0)).astype(jnp.float32)
    return StateView(jnp.where(d.bad, jnp.nan, scale), history, parity, d.bad)


@functools.partial(jax.jit, inline=True)
@compat.numpy_promotion()
def write(view: StateView, scale: jax.Array, amax: jax.Array, like: Leaves) -> dict[str, jax.Array]:
    """The cotangent of the leaves `like`: their next value, times W.

    Args:
      view: what `read` gave in this step.
      scale: f32[Q], the scales that were used (`view.scale`, or the ones that unseeded quantizers derived).
      amax: f32[Q], amax of this step's tensors, already reduced over the mesh.
      like: the leaves that were read, for their dtypes.
    """
    amax = jnp.where(jnp.isfinite(amax) & (amax >= TINY), amax, 0.0)
    # The scale that a tensor without amax was given is arbitrary (1), not worth keeping.
    scale = jnp.where((view.scale > 0) | (amax > 0), scale, 0.0)
    leaves = encode(amax, view.history[..., :-1], scale, view.parity)
    return {name: leaf.astype(like[name].dtype) for name, leaf in leaves.items()}
