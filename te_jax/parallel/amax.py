"""The maximum of an amax over mesh axes, of one or of many at once."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from te_jax import compat


def reduce_amax(amax: Array, axes: Sequence[str]) -> Array:
    """The maximum over mesh axes; NaN if it is NaN on any shard.

    Taken on the bits, whose order for non-negative floats is that of the values with NaN above infinity: a floating
    point maximum may drop NaNs (NCCL's does).
    """
    if not axes:
        return amax
    bits = jax.lax.bitcast_convert_type(amax, jnp.int32) & np.int32(0x7FFFFFFF)
    return jax.lax.bitcast_convert_type(jax.lax.pmax(bits, tuple(axes)), jnp.float32)


def reduce_together(amaxes: Sequence[Array], axes: Sequence[Sequence[str]]) -> list[Array]:
    """``reduce_amax`` of each amax (f32, any shape) over its axes, by one reduction for all that have the same axes."""
    reduced = list(amaxes)
    for over in {tuple(each): None for each in axes if each}:
        rows = [row for row, each in enumerate(axes) if tuple(each) == over]
        flat = [amaxes[row].reshape(-1) for row in rows]
        if compat.checks_varying_axes():  # types of what is put together have to agree
            varying = frozenset().union(*map(compat.varying_axes, flat), over)
            flat = [compat.pvary(part, varying) for part in flat]
        whole, start = reduce_amax(jnp.concatenate(flat), over), 0
        for row, part in zip(rows, flat, strict=True):
            end = start + part.size
            reduced[row] = whole[start:end].reshape(amaxes[row].shape)
            start = end
    return reduced
