"""Initialisers with sharding metadata, of nnx or of linen, on their way through a linen module to an nnx.Param."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
from flax import nnx
from flax.core import meta
from jax import Array

from te_jax import compat
from te_jax.ops.base import Op


class _Held:
    """An nnx.VariableMetadata as static data of a pytree: equal to itself alone."""

    def __init__(self, metadata: nnx.VariableMetadata):
        self.metadata = dataclasses.replace(metadata, raw_value=None)


class _Annotated(flax.struct.PyTreeNode, meta.AxisMetadata[Array]):
    """A value that linen carries about in its box, with what nnx is to know of it."""

    value: Any
    annotations: _Held = flax.struct.field(pytree_node=False)

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> Any:
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> Any:
        raise NotImplementedError  # linen's lifted transformations; te.nnx uses none

    remove_axis = add_axis


@dataclasses.dataclass(frozen=True)
class Initializer:
    """An initialiser whose annotations (``nnx.with_partitioning``, ``nn.with_partitioning``) survive linen."""

    init: Callable[..., Any]

    def __call__(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Any:
        made: Any = self.init(key, shape, dtype)
        if isinstance(made, nnx.VariableMetadata):
            return _Annotated(made.raw_value, _Held(made))
        if isinstance(made, meta.AxisMetadata):
            box: Any = made
            metadata = {name: value for name, value in box.to_nnx_metadata().items() if value is not None}
            value = metadata.pop("value")
            return _Annotated(value, _Held(nnx.VariableMetadata(value, metadata=metadata)))
        return made

    def box(self, value: Any, names: tuple[str | None, ...]) -> Any:
        """A value that a ``tensor_axis`` splits over the mesh axes of these names, one for each dimension.

        Where no mesh is set nnx places it later than now, and it is made as on one device.
        """
        metadata: dict[str, Any] = {"out_sharding": names}
        if compat.get_abstract_mesh().empty:
            metadata["eager_sharding"] = False
        return _Annotated(value, _Held(nnx.VariableMetadata(value, metadata=metadata)))


def wrapped(init: Callable[..., Any]) -> Initializer:
    """The initialiser as an `Initializer`."""
    return init if isinstance(init, Initializer) else Initializer(init)


def with_wrapped(op: Op) -> Op:
    """The op with every callable field that is named ``init`` or ``*_init`` as an `Initializer`."""
    names = (field.name for field in dataclasses.fields(op))
    fields = {name: getattr(op, name) for name in names if name == "init" or name.endswith("_init")}
    inits: dict[str, Any] = {name: wrapped(init) for name, init in fields.items() if callable(init)}
    return dataclasses.replace(op, **inits) if inits else op


def as_param(value: Any) -> nnx.Param:
    """An nnx.Param of what linen's init made: an array, or a box with annotations."""
    if not isinstance(value, _Annotated):
        return nnx.Param(value)
    return nnx.Param(dataclasses.replace(value.annotations.metadata, raw_value=value.value))
