"""Shardings that are part of an array's type (Explicit mesh axes), for the jnp code between custom calls."""

from __future__ import annotations

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
    return NamedSharding(regime.mesh, PartitionSpec(*entries)) if regime.explicit else None


def constrain(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """x with the sharding ``spec``: its type on an Explicit mesh, the compiler's on an Auto one. Manual: as it is."""
    regime = mesh.regime(x)
    if regime.explicit:
        return compat.reshard(x, spec)
    return jax.lax.with_sharding_constraint(x, spec) if regime.auto else x
