"""Gathering what a device has a part of, and residuals that are kept as the part and gathered when they are needed."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from te_jax import compat
from te_jax.quant.format import is_fp8


def gather(x: Array, axis_name: str, dimension: int) -> Array:
    """The parts x of all devices along a Manual axis, one after the other in ``dimension``; FP8 travels as bytes."""
    move = functools.partial(lax.all_gather, axis_name=axis_name, axis=dimension, tiled=True)
    x = compat.pvary(x, (axis_name,)) if compat.checks_varying_axes() else x
    if not is_fp8(x.dtype):
        return move(x)
    return lax.bitcast_convert_type(move(lax.bitcast_convert_type(x, jnp.uint8)), x.dtype)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["part"], meta_fields=["axis_name", "dimension", "transposed"]
)
@dataclasses.dataclass(frozen=True)
class Part:
    """A linear's x [*lead, K] as a residual, of which this device keeps its own part.

    ``transposed``: what wgrad reads is x^T [K, *lead].
    """

    part: Array
    axis_name: str
    dimension: int
    transposed: bool

    def whole(self) -> Array:
        x = gather(self.part, self.axis_name, self.dimension)
        return jnp.moveaxis(x, -1, 0) if self.transposed else x


def whole(saved: Array | Part) -> Array:
    """A residual, gathered if it was kept as a part."""
    return saved.whole() if isinstance(saved, Part) else saved
