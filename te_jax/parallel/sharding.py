"""How the dimensions of an operation's operands and results are tied together, and what follows for sharding.

A rule names every dimension by its factor, as Shardy does: dimensions with the same factor are split the same way.
From it come the Shardy rule of Auto meshes, the specs of Explicit ones, and the reductions that shards need.

A dimension that counts the 128-element blocks of factor "k" is named ``in_blocks("k")``: it is split as k is, and k
only where every shard is whole blocks. A k that isn't several whole blocks has to be among ``replicated``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule
from jax.sharding import PartitionSpec

from te_jax.quant.block_reference import BLOCK

Factors = tuple[str, ...]
Axes = tuple[str, ...]

_IN_BLOCKS = "_blocks"


def in_blocks(factor: str) -> str:
    """The name of a dimension that counts the blocks of ``factor``."""
    return factor + _IN_BLOCKS


def splits_in_blocks(size: int) -> bool:
    """Whether a dimension of that size is several whole blocks; if not, its factor has to be replicated."""
    return size % BLOCK == 0 and size > BLOCK


def _base(factor: str) -> str:
    return factor.removesuffix(_IN_BLOCKS)


@dataclasses.dataclass(frozen=True)
class Reductions:
    """Mesh axes over which a shard's results are reduced: its amax by maximum, its partial sums by addition.

    ``manual``: those of ``amax`` that are Manual, where types may differ between devices, so that the result of a spec
    that says ``amax_of_part`` isn't reduced over them.
    """

    amax: Axes = ()
    sums: Axes = ()
    manual: Axes = ()


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

    @property
    def _blocked(self) -> frozenset[str]:
        """The factors that may only be split between blocks."""
        dims = {factor for factors in (*self.operands, *self.results) for factor in factors}
        return frozenset(_base(dim) for dim in dims if dim != _base(dim))

    def shardy(self) -> SdyShardingRule:
        """The rule as ``custom_partitioning`` takes it: a factor in blocks is (blocks, 128)."""
        compound = self._blocked - set(self.replicated)
        sizes: dict[str, Any] = {f"{factor}_within": BLOCK for factor in compound}

        def mapping(factors: Factors) -> ArrayMapping:
            return ArrayMapping(*(CompoundFactor(in_blocks(f), f"{f}_within") if f in compound else f for f in factors))

        def parts(factors: Factors) -> Factors:
            """The names that stand for them in the rule."""
            split = ((in_blocks(f), f"{f}_within") if f in compound else (f,) for f in factors)
            return tuple(part for parts in split for part in parts)

        # In the order in which they appear, as Shardy wants them.
        dims = dict.fromkeys(factor for factors in (*self.operands, *self.results) for factor in factors)
        fixed = tuple(dim for dim in dims if _base(dim) in self.replicated)
        return SdyShardingRule(
            operand_mappings=tuple(map(mapping, self.operands)),
            result_mappings=tuple(map(mapping, self.results)),
            reduction_factors=parts(tuple(factor for factor in self.contracted if factor not in self.replicated)),
            need_replication_factors=fixed,
            **sizes,
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
        blocked = self._blocked
        arrays = [*zip(self.operands, operands, strict=True), *zip(self.results, results, strict=False)]
        for factors, (shape, spec) in arrays:
            for dim, size, entry in zip(factors, shape, tuple(spec), strict=False):
                factor = _base(dim)
                axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
                axes = tuple(axis for axis in axes if axis in axis_sizes)
                if not axes or factor in chosen or factor in self.replicated or used & set(axes):
                    continue
                unit = BLOCK if dim in blocked else 1
                if size % (unit * math.prod(axis_sizes[axis] for axis in axes)) == 0:
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
    entries = (axes.get(_base(factor), ()) for factor in factors)
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))
