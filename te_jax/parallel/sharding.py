"""How the dimensions of an operation's operands and results are tied together, and what follows for sharding.

A rule names every dimension by its factor, as Shardy does: dimensions with the same factor are split the same way.
From it come the Shardy rule of Auto meshes, the specs of Explicit ones, and the reductions that shards need.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule
from jax.sharding import PartitionSpec

Factors = tuple[str, ...]
Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Reductions:
    """Mesh axes over which a shard's results are reduced: its amax by maximum, its partial sums by addition."""

    amax: Axes = ()
    sums: Axes = ()


@dataclasses.dataclass(frozen=True)
class ShardingRule:
    """The factors of every dimension.

    Attributes:
      operands, results: one factor per dimension, for each operand and result.
      replicated: factors that are never split.
      contracted: factors of operands that no result has.
      amax: factors over whose mesh axes an amax is reduced.
      sums: factors over whose mesh axes partial sums are added up.
    """

    operands: tuple[Factors, ...]
    results: tuple[Factors, ...]
    replicated: Factors = ()
    contracted: Factors = ()
    amax: Factors = ()
    sums: Factors = ()

    def batched(self, levels: Sequence[Sequence[bool]]) -> ShardingRule:
        """The rule with batch dimensions in front; ``levels`` says for each which operands have it. Results all do."""
        names = [f"b{i}" for i in range(len(levels))]
        operands = tuple(
            (*(name for name, has in zip(names, levels, strict=True) if has[i]), *factors)
            for i, factors in enumerate(self.operands)
        )
        return dataclasses.replace(
            self, operands=operands, results=tuple((*names, *factors) for factors in self.results)
        )

    def shardy(self) -> SdyShardingRule:
        """The rule as ``custom_partitioning`` takes it."""
        return SdyShardingRule(
            operand_mappings=tuple(ArrayMapping(*factors) for factors in self.operands),
            result_mappings=tuple(ArrayMapping(*factors) for factors in self.results),
            reduction_factors=self.contracted,
            need_replication_factors=self.replicated,
        )

    def axes(
        self,
        operands: Sequence[tuple[tuple[int, ...], PartitionSpec]],
        results: Sequence[tuple[tuple[int, ...], PartitionSpec]],
        axis_sizes: Mapping[str, int],
    ) -> dict[str, Axes]:
        """The mesh axes of each factor, given (shape, spec) of every operand and of results whose spec is known.

        The first array that splits a factor decides. A mesh axis splits one factor only, and only if the factor's
        size is a multiple of it (a padded shard would show its padding in amax and dbias).
        """
        chosen: dict[str, Axes] = {}
        used: set[str] = set()
        arrays = [*zip(self.operands, operands, strict=True), *zip(self.results, results, strict=False)]
        for factors, (shape, spec) in arrays:
            for factor, size, entry in zip(factors, shape, tuple(spec), strict=False):
                axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
                axes = tuple(axis for axis in axes if axis in axis_sizes)
                if not axes or factor in chosen or factor in self.replicated or used & set(axes):
                    continue
                if size % math.prod(axis_sizes[axis] for axis in axes) == 0:
                    chosen[factor] = axes
                    used |= set(axes)
        return chosen

    def reductions(self, axes: Mapping[str, Axes]) -> Reductions:
        """What shards split by ``axes`` have to reduce."""
        return Reductions(amax=_union(self.amax, axes), sums=_union(self.sums, axes))

    def operand_specs(self, axes: Mapping[str, Axes]) -> tuple[PartitionSpec, ...]:
        return tuple(_spec(factors, axes) for factors in self.operands)

    def result_specs(self, axes: Mapping[str, Axes]) -> tuple[PartitionSpec, ...]:
        return tuple(_spec(factors, axes) for factors in self.results)


def _union(factors: Factors, axes: Mapping[str, Axes]) -> Axes:
    return tuple(axis for factor in factors for axis in axes.get(factor, ()))


def _spec(factors: Factors, axes: Mapping[str, Axes]) -> PartitionSpec:
    entries = (axes.get(factor, ()) for factor in factors)
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))
