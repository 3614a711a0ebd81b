"""Collective matmuls on whole arrays, under Auto and Explicit axes: ``run`` on every device's part.

Explicit   ``shard_map`` over the mesh, with the splits over other axes that the operands' types show
Auto       ``custom_partitioning``: the splits over other axes are those that XLA has found when it partitions

Either way the tensor-parallel axis splits what the products need, whatever it splits before:

               all_gather_matmul                                 matmul_reduce_scatter
  lhs          [*lead, K], its dimension split                   [*lead, K], K split
  rhs          [N, K], N split                                   [N, K], K split
  bias         [N], split                                        [N], whole
  out          [*lead, N], N split                               [*lead, N], its dimension split
  gathered     [*lead, K], not split

and other axes, of data or sequences, split the dimensions of lead as they split those of lhs. Other dimensions are
whole: a kernel that an FSDP axis splits is gathered. ``along.reduces``: no dimension of out is split.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax import Array, lax
from jax.sharding import AbstractMesh, PartitionSpec

from te_jax import compat
from te_jax.collective.run import Along, run
from te_jax.parallel import explicit, mesh
from te_jax.parallel.sharding import Axes, ShardingRule
from te_jax.primitives.batching import loop_over_examples
from te_jax.primitives.collective_gemm import CollectiveGemmOut
from te_jax.primitives.partitioned import Partitionable, partitioned

_SPLIT, _WHOLE, _FEATURES = "m_split", "m_whole", "features"  # factors that the tensor-parallel axis has a say in


@dataclasses.dataclass(frozen=True)
class _Spec:
    """All that is static. ``tensors``: the names of the operands behind lhs and rhs."""

    along: Along
    mesh: AbstractMesh
    out_dtype: str
    fields: tuple[tuple[str, Any], ...]
    tensors: tuple[str, ...]

    @property
    def gathers(self) -> bool:
        return dict(self.fields)["kind"] == "all_gather_matmul"

    @property
    def keeps(self) -> bool:
        return bool(dict(self.fields).get("keep_gathered"))


@dataclasses.dataclass(frozen=True)
class _Rule(ShardingRule):
    """Dimensions of lead are split as those of lhs are, others over the tensor-parallel axis ``axis`` or not at all."""

    axis: str = ""

    def axes(
        self,
        operands: Sequence[tuple[tuple[int, ...], PartitionSpec]],
        results: Sequence[tuple[tuple[int, ...], PartitionSpec]],
        axis_sizes: Mapping[str, int],
    ) -> dict[str, Axes]:
        others = {name: size for name, size in axis_sizes.items() if name != self.axis}
        lead = self.operands[0][:-1]
        chosen = {factor: axes for factor, axes in super().axes(operands, results, others).items() if factor in lead}
        apart: Axes = ()
        for factor, size in zip(lead, operands[0][0], strict=False):
            if factor in (_SPLIT, _WHOLE):
                apart = chosen.pop(factor, ())
                # What a device has of it is split once more.
                if size % (axis_sizes[self.axis] * math.prod(axis_sizes[name] for name in apart)):
                    apart = ()
        return chosen | {_WHOLE: apart, _SPLIT: (*apart, self.axis), _FEATURES: (self.axis,)}

    def constrained(self, x: Array, factors: tuple[str, ...]) -> Array:
        """x, whose split over the tensor-parallel axis the compiler is told, under Auto axes."""
        told = [self.axis if factor in (_SPLIT, _FEATURES) else PartitionSpec.UNCONSTRAINED for factor in factors]
        return compat.with_sharding_constraint(x, PartitionSpec(*told)) if self.axis in told else x


def _rule(spec: _Spec, lhs: Any, rhs: Any, *tensors: Any) -> _Rule:
    names = [f"l{i}" for i in range(len(lhs.shape) - 1)]

    def lead(factor: str) -> tuple[str, ...]:
        """The dimensions of lead, with this factor for the one that is gathered or scattered."""
        here = list(names)
        if not spec.along.reduces:
            here[spec.along.dimension] = factor
        return tuple(here)

    first = bool(dict(spec.fields).get("rhs_contract_first"))
    n, k = (_FEATURES, "k") if spec.gathers else ("n", _FEATURES)
    # What is whole has a factor for each operand: how one is split over other axes says nothing about another.
    kernel = tuple(f if f == _FEATURES else f"rhs_{f}" for f in ((k, n) if first else (n, k)))
    bias = (n if n == _FEATURES else "bias_n",)
    operands = [(*lead(_SPLIT if spec.gathers else _WHOLE), "lhs_k" if spec.gathers else _FEATURES), kernel]
    operands += [bias if name == "bias" else () for name in spec.tensors]
    results = [(*lead(_WHOLE if spec.gathers else _SPLIT), _FEATURES if spec.gathers else "out_n")]
    results += [(*lead(_WHOLE), "gathered_k")] if spec.keeps else []
    return _Rule(operands=tuple(operands), results=tuple(results), axis=spec.along.axis_name)


def _local(spec: _Spec, lhs: Array, rhs: Array, *tensors: Array) -> tuple[Array, ...]:
    """One device's part: out, and gathered if it is kept."""
    named = dict(zip(spec.tensors, tensors, strict=True))
    along = dataclasses.replace(spec.along, dimension=0 if spec.along.reduces else spec.along.dimension)
    part = lhs.reshape(-1, lhs.shape[-1]) if spec.along.reduces else lhs
    out = run(along, part, rhs, out_dtype=spec.out_dtype, fields=dict(spec.fields) | {"equal_scales": True}, **named)
    if spec.along.reduces:
        y = lax.all_gather(out.out, along.axis_name, axis=0, tiled=True)
        return (y.reshape(*lhs.shape[:-1], y.shape[-1]),)
    return (out.out,) if out.gathered is None else (out.out, out.gathered)


def _partition(call: Any, spec: _Spec, reductions: Any, *operands: Array) -> tuple[Array, ...]:
    """What ``custom_partitioning`` runs on a shard: every axis is Manual there, though nothing around it says so."""
    del call, reductions
    with compat.all_manual(spec.mesh):
        return _local(spec, *operands)


def _over_mesh(spec: _Spec, axes: Mapping[str, Axes], *operands: Array) -> tuple[Array, ...]:
    """``shard_map`` of ``_local``."""
    rule = _rule(spec, *operands)
    # Without varying axes: gathered is the same on all devices of the axis, which no type shows.
    function = compat.shard_map(
        functools.partial(_local, spec),
        mesh=spec.mesh,
        in_specs=rule.operand_specs(axes),
        out_specs=rule.result_specs(axes),
        check_vma=False,
    )
    return function(*operands)


def _unpartitioned(spec: _Spec, *operands: Array) -> tuple[Array, ...]:
    """The whole, for types and for plans, which read what is bound: all other axes split tokens, if they can."""
    others = tuple(name for name in spec.mesh.axis_names if name != spec.along.axis_name)
    rule, shapes, sizes = _rule(spec, *operands), [x.shape for x in operands], dict(spec.mesh.shape)

    def axes_if_split(place: int | None) -> dict[str, Axes]:
        first = PartitionSpec() if place is None else PartitionSpec(*[None] * place, others)
        return rule.axes([(shapes[0], first), *((shape, PartitionSpec()) for shape in shapes[1:])], (), sizes)

    whole = axes_if_split(None)
    split = (axes_if_split(place) for place in range(len(shapes[0]) - 1))
    return _over_mesh(spec, next((axes for axes in split if axes != whole), whole), *operands)


_WHOLE_PRODUCT = Partitionable(rule=_rule, local=_partition, examples=loop_over_examples)


def run_whole(
    along: Along,
    lhs: Array,
    rhs: Array,
    *,
    out_dtype: str,
    fields: dict[str, Any],
    **tensors: Array | None,
) -> CollectiveGemmOut:
    """``run`` on whole arrays, where no axis is Manual and all are of one kind.

    Args:
      along, lhs, rhs, out_dtype, fields, tensors: as for ``run``; [*lead, K] and [N, K] are whole, and scales f32[].
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    here = mesh.regime(lhs, rhs)
    spec = _Spec(along, here.mesh, out_dtype, tuple(sorted(fields.items())), tuple(given))
    operands = (lhs, rhs, *given.values())
    rule = _rule(spec, *operands)
    if here.explicit:
        types = [(x.shape, PartitionSpec(*explicit.spec_entries(x))) for x in operands]
        axes = rule.axes(types, (), dict(here.mesh.shape))
        results = _over_mesh(spec, axes, *map(explicit.constrain, operands, rule.operand_specs(axes)))
    else:
        results = partitioned(_WHOLE_PRODUCT, _unpartitioned, spec)(*map(rule.constrained, operands, rule.operands))
        results = tuple(map(rule.constrained, results, rule.results))
    return CollectiveGemmOut(*results)
