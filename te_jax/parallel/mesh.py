"""Which kind of mesh the code being traced runs under, and the axes over which an amax has to be reduced.

JAX has three kinds of mesh axis. Auto: the compiler decides how arrays are split (types don't show it). Explicit: the
split is part of an array's type. Manual: inside ``shard_map``, code sees one device's part. One mesh may mix them.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import math

import jax
from jax.sharding import AxisType

from te_jax import compat
from te_jax.errors import check_value


class Kind(enum.Enum):
    AUTO = "auto"
    EXPLICIT = "explicit"
    MANUAL = "manual"


@dataclasses.dataclass(frozen=True)
class Regime:
    """The mesh that operands live on, and its axes by type. ``auto`` and ``explicit`` omit axes of size 1.

    No mesh at all is the same as an Auto mesh: under ``jit`` the types of arrays on an Auto mesh don't show it.
    """

    mesh: jax.sharding.AbstractMesh
    manual: tuple[str, ...]
    explicit: tuple[str, ...]
    auto: tuple[str, ...]

    @property
    def kind(self) -> Kind:
        """MANUAL inside ``shard_map``, otherwise EXPLICIT if any axis is, otherwise AUTO."""
        if self.manual:
            return Kind.MANUAL
        return Kind.EXPLICIT if self.explicit else Kind.AUTO

    @property
    def typed(self) -> bool:
        """Whether types show splits, that operations have to agree on: any axis is Explicit, also one of size 1."""
        return AxisType.Explicit in self.mesh.axis_types


def regime(*arrays) -> Regime:
    """The regime for an operation on ``arrays``: their mesh if their types show one, otherwise the current mesh."""
    mesh = compat.get_abstract_mesh()
    for array in arrays:
        sharding = jax.typeof(array).sharding
        if mesh.empty and not sharding.mesh.empty:
            mesh = sharding.mesh
    by_type: dict[AxisType, list[str]] = {kind: [] for kind in AxisType}
    for name, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True):
        if size > 1 or kind == AxisType.Manual:
            by_type[kind].append(name)
    return Regime(
        mesh=mesh,
        manual=tuple(by_type[AxisType.Manual]),
        explicit=tuple(by_type[AxisType.Explicit]),
        auto=tuple(by_type[AxisType.Auto]),
    )


@dataclasses.dataclass(frozen=True)
class NamedAxis:
    """A mesh axis as the code being traced sees it.

    Attributes:
      kind, size: its own.
      mixed: whether an axis of another kind is beside it.
      others: product of the sizes of those beside it.
    """

    kind: AxisType
    size: int
    mixed: bool = False
    others: int = 1


def named_axis(caller: str, name: str, *arrays, argument: str = "axis_name") -> NamedAxis | None:
    """The axis of that name of the mesh that ``arrays`` live on, otherwise of the current one; None without a mesh.

    Raises:
      ValueError: a mesh without that axis, naming ``caller`` and its ``argument``.
    """
    here = regime(*arrays)
    mesh = here.mesh
    if mesh.empty:
        return None
    check_value(name in mesh.axis_names, caller, argument, f"one of the mesh's {mesh.axis_names}", repr(name))
    place = mesh.axis_names.index(name)
    kind = mesh.axis_types[place]
    by_kind = {AxisType.Manual: here.manual, AxisType.Explicit: here.explicit, AxisType.Auto: here.auto}
    mixed = any(axes for other, axes in by_kind.items() if other != kind)
    size = mesh.axis_sizes[place]
    return NamedAxis(kind, size, mixed, math.prod(mesh.axis_sizes) // max(size, 1))


@functools.cache
def devices_of_a_host() -> int | None:
    """How many devices reach each other's memory at most; None in a program of one process, where all do.

    An axis of more spans hosts. GPUs do within a host, whatever their processes, CPU devices within a process.
    """
    if jax.process_count() == 1:
        return None
    hosts = (d.process_index if d.platform == "cpu" else getattr(d, "slice_index", None) for d in jax.devices())
    return max(collections.Counter(hosts).values())


def manual_axes() -> tuple[str, ...]:
    """The axes that are manual here: those of the surrounding ``shard_map``."""
    return tuple(compat.get_abstract_mesh().manual_axes)


def amax_axes(x, state=None, recipe=None) -> tuple[str, ...]:
    """The manual axes over which the amax of ``x`` is reduced: those that x varies over and its state does not.

    Args:
      x: the tensor whose amax is taken.
      state: the scale (or any leaf of the quantizer's state); None: a state that is the same everywhere.
      recipe: only in a ``shard_map`` with ``check_vma=False``, where types don't show what varies: its
        ``amax_axes``, or all manual axes if that is None or there is no recipe.
    """
    axes = manual_axes()
    if axes and not compat.checks_varying_axes():
        chosen = getattr(recipe, "amax_axes", None)
        return axes if chosen is None else tuple(chosen)
    varying = compat.varying_axes(x) - (compat.varying_axes(state) if state is not None else frozenset())
    return tuple(axis for axis in axes if axis in varying)
