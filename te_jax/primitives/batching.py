"""Batching as a loop over examples, so that what a primitive derives from a whole tensor (amax) is per example."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax.sharding import PartitionSpec

from te_jax import compat


def loop_over_examples(function: Callable, in_batched: Sequence[bool], *operands: jax.Array) -> tuple[jax.Array, ...]:
    """``function`` on each example in turn. Batched operands and all results have the batch dimension first."""

    def loop(*operands):
        def example(batched):
            batched = iter(batched)
            return tuple(function(*(next(batched) if b else x for x, b in zip(operands, in_batched, strict=True))))

        return jax.lax.map(example, tuple(x for x, b in zip(operands, in_batched, strict=True) if b))

    batch = _batch_sharding(in_batched, operands)
    if batch is None:
        return loop(*operands)
    mesh, axes = batch
    split = PartitionSpec(axes)
    return compat.shard_map(
        loop,
        mesh=mesh,
        in_specs=tuple(split if b else PartitionSpec() for b in in_batched),
        out_specs=split,
        axis_names=set(axes),
        check_vma=compat.checks_varying_axes(),
    )(*operands)


def merge_examples(function: Callable, in_batched: Sequence[bool], *operands: jax.Array) -> tuple[jax.Array, ...]:
    """``function`` on all examples at once, for a function whose operands have any number of batch dimensions first."""
    size = next(x.shape[0] for x, b in zip(operands, in_batched, strict=True) if b)
    return tuple(
        function(
            *(
                x if b else jax.numpy.broadcast_to(x, (size, *x.shape))
                for x, b in zip(operands, in_batched, strict=True)
            )
        )
    )


def _batch_sharding(in_batched, operands):
    """(mesh, axes) over which the batch dimension is split in an Explicit mesh, where a loop can't go over it."""
    for x, b in zip(operands, in_batched, strict=True):
        sharding = jax.typeof(x).sharding
        entry = sharding.spec[0] if b and len(sharding.spec) else None
        if entry is not None:
            return sharding.mesh, (entry,) if isinstance(entry, str) else tuple(entry)
    return None
