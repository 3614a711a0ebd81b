"""Collectives over a named mesh axis: AllGather, ReduceScatter, AllReduce.

What they do depends on what kind of axis it is where the chain is traced (te_jax.parallel.mesh):

  Manual (inside ``shard_map``)   a collective of the shards: x is one device's part, or its term of a sum
  Explicit, Auto                  a change of how the full result is sharded: sums of partial products were made by the
                                  linear that has a sharded contraction, so that only a split is left to be changed
  no mesh                         nothing

             Manual, forward              Manual, backward             full result, forward          backward
  AllGather      all_gather                   psum_scatter             dimension no longer split     split as x was
  ReduceScatter  psum_scatter                 all_gather               dimension split over axis     split as x was
  AllReduce      psum                         nothing, or psum of a    not split over axis           split as x was
                                              dy that is a term of it  (Auto: the compiler's choice)

Next to a linear they may be one product with it, on any kind of axis (te_jax/fusion/rules/collective.py).

A Bias directly before a reduction over a Manual axis is applied after it, so that it is counted once, not once a device
(``bias_last``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, PartitionSpec

from te_jax import compat
from te_jax.collective.plan import check_overlap
from te_jax.errors import check_type, check_value, required
from te_jax.ops import gathering
from te_jax.ops.base import BackwardContext, ForwardContext, LinkInfo, Op, TensorType
from te_jax.ops.bias import Bias
from te_jax.parallel import explicit, mesh
from te_jax.quant.tensor import QTensor

Entries = tuple[Any, ...]  # of a PartitionSpec, one for each dimension

_FIELDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {  # what each is, and whether a value is one
    "axis_name": ("the name of a mesh axis", lambda value: isinstance(value, str) and value != ""),
    "dimension": ("an int", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "keep_gathered": ("True or False", lambda value: isinstance(value, bool)),
}


def check_fields(caller: str, fields: Mapping[str, Any]) -> None:
    """Checks fields of a collective, as the arguments of ``caller`` that they are.

    Raises:
      TypeError, ValueError: naming the caller and the field.
    """
    for name, value in fields.items():
        if name in _FIELDS:
            expected, ok = _FIELDS[name]
            check_type(ok(value), caller, name, expected, repr(value))
    check_overlap(caller, fields["overlap"])


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Split:
    """How x was split over Explicit axes. A residual without arrays."""

    entries: Entries


@dataclasses.dataclass(frozen=True)
class Collective(Op):
    """Base of the collectives.

    Attributes:
      axis_name: the mesh axis.
      overlap: of a collective next to a linear, whatever the axis: "auto" overlaps them where that is known to pay;
        "overlapped" (one custom call) and "ring" (a GEMM and a ``ppermute`` for each device) do so whatever the size,
        "plain" doesn't.
    """

    axis_name: str
    overlap: str = dataclasses.field(default="auto", kw_only=True)

    verb: ClassVar[str]  # for the plan

    def __post_init__(self) -> None:
        fields = (field.name for field in dataclasses.fields(self) if field.name in (*_FIELDS, "overlap"))
        check_fields(type(self).__name__, {name: getattr(self, name) for name in fields})

    def axis(self, *arrays: Array) -> mesh.NamedAxis | None:
        """The axis here: its type and size; None where there is no mesh."""
        return mesh.named_axis(str(self), self.axis_name, *arrays)

    def mesh_axis(self) -> mesh.NamedAxis | None:
        return self.axis()

    @property
    def manual(self) -> bool:
        axis = self.axis()
        return axis is not None and axis.kind == AxisType.Manual

    def forward(self, ctx: ForwardContext, x: Array) -> Array:
        axis = self.axis(x)
        kind = None if axis is None else axis.kind
        if kind == AxisType.Manual:
            return self._collective(x)
        if kind == AxisType.Explicit:
            self.remember(ctx, x)
            return compat.reshard(x, PartitionSpec(*self._split(explicit.spec_entries(x))))
        return x if kind is None else _constrained(x, self._constraint(x.ndim))

    def backward(self, ctx: BackwardContext, dy: Array) -> Array:
        axis = self.axis(dy)
        kind = None if axis is None else axis.kind
        if kind == AxisType.Manual:
            return self._transpose(dy)
        if kind == AxisType.Explicit:
            return compat.reshard(dy, PartitionSpec(*ctx.saved.entries))
        return dy if kind is None else _constrained(dy, self._reverse_constraint(dy.ndim))

    def remember(self, ctx: ForwardContext, x: Array, entries: Entries | None = None) -> None:
        """Saves what ``backward`` reads, of an x of this type, or of one whose type has these ``entries``."""
        axis = self.axis(x)
        if axis is not None and axis.kind == AxisType.Explicit:
            ctx.saved = _Split(explicit.spec_entries(x) if entries is None else entries)

    def note(self, info: LinkInfo) -> str:
        axis = self.axis()
        if axis is None:
            return f"no mesh with an axis {self.axis_name!r} here: nothing to do"
        if axis.kind == AxisType.Manual:
            return f"{self.verb} over {self.axis_name!r} ({axis.size} devices)"
        return f"changes how the full result is split over {self.axis_name!r}"

    def _collective(self, x: Array) -> Array:
        raise NotImplementedError

    def _transpose(self, dy: Array) -> Array:
        raise NotImplementedError

    def _split(self, entries: Entries) -> Entries:
        """The entries of the result's type, on an Explicit axis, from those of x."""
        raise NotImplementedError

    def _constraint(self, ndim: int) -> PartitionSpec | None:
        """What the compiler is told of the result, on an Auto axis."""
        raise NotImplementedError

    def _reverse_constraint(self, ndim: int) -> PartitionSpec | None:
        raise NotImplementedError

    def _varying(self, x: Array) -> Array:
        """x, typed as one device's own: a value that is the same on all of them is a term of the sum on each."""
        return compat.pvary(x, (self.axis_name,)) if compat.checks_varying_axes() else x

    def __str__(self) -> str:
        return f"{type(self).__name__}[{self.axis_name}]"


@dataclasses.dataclass(frozen=True)
class _AlongDimension(Collective):
    dimension: int = -2

    def _axis_of(self, ndim: int) -> int:
        inside = -ndim <= self.dimension < ndim
        check_value(inside, str(self), "dimension", f"a dimension of x, which has {ndim}", self.dimension)
        return self.dimension % ndim

    def _gathered(self, x: Array) -> Array:
        return lax.all_gather(self._varying(x), self.axis_name, axis=self._axis_of(x.ndim), tiled=True)

    def _scattered(self, x: Array) -> Array:
        dimension = self._axis_of(x.ndim)
        return lax.psum_scatter(self._varying(x), self.axis_name, scatter_dimension=dimension, tiled=True)

    def _at_dimension(self, ndim: int, entry: Any) -> PartitionSpec:
        entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * ndim
        entries[self._axis_of(ndim)] = entry
        return PartitionSpec(*entries)


@dataclasses.dataclass(frozen=True)
class AllGather(_AlongDimension):
    """The parts x [..., n, ...] of all devices of an axis, one after the other: [..., n * size, ...].

    ``dimension``: along which; default the last but one, the tokens of x [T, C] and the sequence of x [B, T, C].
    ``keep_gathered``: a linear fused with it keeps what was gathered for its weight gradient; False keeps the device's
    own part, and gathers again in the backward pass: 1 / size of the memory, once more the communication.
    """

    keep_gathered: bool = dataclasses.field(default=True, kw_only=True)

    verb: ClassVar[str] = "gathers"

    def out_type(self, x: TensorType) -> TensorType:
        dimension, axis = self._axis_of(len(x.shape)), self.axis()
        size = axis.size if axis is not None and axis.kind == AxisType.Manual else 1
        return TensorType((*x.shape[:dimension], x.shape[dimension] * size, *x.shape[dimension + 1 :]), x.dtype)

    def forward(self, ctx: ForwardContext, x: Array | QTensor) -> Array | QTensor:  # type: ignore[override]
        """x may come quantized from its producer, with the scale that the whole has: a byte an element travels."""
        if not isinstance(x, QTensor):
            return super().forward(ctx, x)
        data = required(x.data, str(self), "x.data")
        self.remember(ctx, data)
        data = gathering.gather(data, self.axis_name, self._axis_of(data.ndim))
        return dataclasses.replace(x, data=data, data_t=jnp.moveaxis(data, -1, 0) if ctx.train else None)

    def _collective(self, x: Array) -> Array:
        return self._gathered(x)

    def _transpose(self, dy: Array) -> Array:
        return self._scattered(dy)

    def _split(self, entries: Entries) -> Entries:
        dimension = self._axis_of(len(entries))
        return tuple(explicit.without(e, self.axis_name) if i == dimension else e for i, e in enumerate(entries))

    def _constraint(self, ndim: int) -> PartitionSpec:
        return self._at_dimension(ndim, None)

    def _reverse_constraint(self, ndim: int) -> PartitionSpec:
        return self._at_dimension(ndim, self.axis_name)


@dataclasses.dataclass(frozen=True)
class ReduceScatter(_AlongDimension):
    """The sum over an axis, split over its devices along ``dimension``: x [..., n, ...] -> [..., n / size, ...].

    ``dimension``: default the last but one, as for AllGather.
    """

    verb: ClassVar[str] = "sums and scatters"

    def out_type(self, x: TensorType) -> TensorType:
        dimension, axis = self._axis_of(len(x.shape)), self.axis()
        if axis is None:
            return x
        expected = f"a multiple of {axis.size} (axis {self.axis_name!r}) in dimension {dimension}"
        check_value(x.shape[dimension] % axis.size == 0, str(self), "x", expected, f"shape {x.shape}")
        size = axis.size if axis.kind == AxisType.Manual else 1
        return TensorType((*x.shape[:dimension], x.shape[dimension] // size, *x.shape[dimension + 1 :]), x.dtype)

    def _collective(self, x: Array) -> Array:
        return self._scattered(x)

    def _transpose(self, dy: Array) -> Array:
        return self._gathered(dy)

    def _split(self, entries: Entries) -> Entries:
        dimension = self._axis_of(len(entries))
        others = tuple(explicit.without(e, self.axis_name) for e in entries)
        return (*others[:dimension], explicit.with_axis(others[dimension], self.axis_name), *others[dimension + 1 :])

    def _constraint(self, ndim: int) -> PartitionSpec:
        return self._at_dimension(ndim, self.axis_name)

    def _reverse_constraint(self, ndim: int) -> PartitionSpec:
        return self._at_dimension(ndim, None)


@dataclasses.dataclass(frozen=True)
class AllReduce(Collective):
    """The sum over an axis, on all of its devices; of x's shape."""

    verb: ClassVar[str] = "sums"

    def _collective(self, x: Array) -> Array:
        return lax.psum(self._varying(x), self.axis_name)

    def _transpose(self, dy: Array) -> Array:
        """dy belongs to a value that is the same on all devices: where dy varies, each has a term of it.

        Without varying axes (``check_vma=False``) JAX takes every cotangent for such a term, and so does this.
        """
        if self.axis_name in compat.varying_axes(dy) or not compat.checks_varying_axes():
            dy = lax.psum(dy, self.axis_name)
        return self._varying(dy)

    def _split(self, entries: Entries) -> Entries:
        return tuple(explicit.without(e, self.axis_name) for e in entries)

    def _constraint(self, ndim: int) -> None:
        return None

    def _reverse_constraint(self, ndim: int) -> None:
        return None


REDUCTIONS = (ReduceScatter, AllReduce)


Place = TypeVar("Place")  # has an ``op``, if it is not something else in a chain


def bias_last(places: Sequence[Place]) -> list[Place]:
    """The places with every Bias that is directly before reductions over Manual axes moved behind them.

    Raises:
      ValueError: the reduction scatters the features, of which a bias has one each.
    """
    places = list(places)
    for i in range(len(places) - 1):
        op, after = (getattr(place, "op", None) for place in places[i : i + 2])
        if isinstance(op, Bias) and isinstance(after, REDUCTIONS) and after.manual:
            features = isinstance(after, ReduceScatter) and after.dimension == -1
            expected = "not the last one directly after a Bias, which would have to be split too: put the Bias behind"
            check_value(not features, str(after), "dimension", expected, getattr(after, "dimension", None))
            places[i], places[i + 1] = places[i + 1], places[i]
    return places


def _constrained(x: Array, spec: PartitionSpec | None) -> Array:
    return x if spec is None else compat.with_sharding_constraint(x, spec)
