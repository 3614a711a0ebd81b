"""Shardings that are part of an array's type (Explicit mesh axes), for the jnp code between custom calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from te_jax import compat
from te_jax.parallel import mesh


def spec_entries(x: jax.Array) -> tuple:
    """The PartitionSpec entries of an array's type, one for each dimension (None: not split over Explicit axes)."""
    entries = tuple(jax.typeof(x).sharding.spec)
    return entries + (None,) * (x.ndim - len(entries))


def out_sharding(entries: tuple, *operands: jax.Array) -> NamedSharding | None:
    """What an operation on ``operands`` is told of its result's sharding: None where no axis is Explicit."""
    regime = mesh.regime(*operands)
    return NamedSharding(regime.mesh, PartitionSpec(*entries)) if regime.typed else None


def constrain(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """x with the sharding ``spec``: its type on an Explicit mesh, the compiler's on an Auto one. Manual: as it is."""
    regime = mesh.regime(x)
    if regime.typed:
        return compat.reshard(x, spec)
    return compat.with_sharding_constraint(x, spec) if regime.auto else x


def names(entry: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a PartitionSpec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def axes(entries: Sequence[Any]) -> tuple[str, ...]:
    """The mesh axes of several entries."""
    return tuple(name for entry in entries for name in names(entry))


def entry(names: tuple[str, ...]) -> Any:
    """The entry of these mesh axes."""
    return names if len(names) > 1 else names[0] if names else None


def without(old: Any, *axes: str) -> Any:
    """The entry without these axes."""
    return entry(tuple(name for name in names(old) if name not in axes))


def with_axis(old: Any, axis: str) -> Any:
    """The entry with an axis more, the innermost one."""
    return entry((*names(old), axis))


def retyped(x: jax.Array, last: Any) -> jax.Array:
    """x with this entry for its last dimension, without the axes of others; as it is where no axis is Explicit."""
    if not mesh.regime(x).typed:
        return x
    *lead, _ = spec_entries(x)
    return compat.reshard(x, PartitionSpec(*lead, without(last, *axes(lead))))
