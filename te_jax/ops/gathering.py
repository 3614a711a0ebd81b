"""Gathering what a device has a part of, and residuals that are kept as the part and gathered when they are needed."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, PartitionSpec

from te_jax import compat
from te_jax.parallel import explicit, mesh
from te_jax.quant.format import is_fp8


def gather(x: Array, axis_name: str, dimension: int) -> Array:
    """The parts x of all devices along a Manual axis, one after the other in ``dimension``; FP8 travels as bytes.

    Under Auto and Explicit axes x is whole, and its ``dimension`` no longer split.
    """
    move = functools.partial(_gathered, axis_name=axis_name, dimension=dimension)
    if not is_fp8(x.dtype):
        return move(x)
    return lax.bitcast_convert_type(move(lax.bitcast_convert_type(x, jnp.uint8)), x.dtype)


def _gathered(x: Array, axis_name: str, dimension: int) -> Array:
    axis = mesh.named_axis("gather", axis_name, x)
    if axis is None:
        return x
    if axis.kind == AxisType.Manual:
        x = compat.pvary(x, (axis_name,)) if compat.checks_varying_axes() else x
        return lax.all_gather(x, axis_name, axis=dimension, tiled=True)
    auto = axis.kind == AxisType.Auto
    entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim if auto else [*explicit.spec_entries(x)]
    entries[dimension] = None if auto else explicit.without(entries[dimension], axis_name)
    to = PartitionSpec(*entries)
    return compat.with_sharding_constraint(x, to) if auto else compat.reshard(x, to)


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
