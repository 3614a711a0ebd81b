"""Tensor parallelism of the modules: what they put around their linears, and how parameters are split.

A module with a ``tensor_axis`` is made and initialized as on one device. Inside of ``shard_map`` over that axis it
computes with the device's part of each parameter: what ``nn.get_partition_spec`` of its variables says, as its
initialisers wrap parameters in ``nn.Partitioned``. So sizes given to a module are always those of the whole.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from flax import linen as nn
from flax.core import meta
from flax.typing import Initializer
from jax.sharding import AxisType

from te_jax import ops
from te_jax.collective.plan import check_overlap
from te_jax.errors import check_type, check_value
from te_jax.parallel import mesh

Parallel = Literal["column", "row"]


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """The tensor-parallel arguments of one module; ``axis`` None: it is on one device.

    ``sequence``: outside of its column- and row-parallel pair x and y are split over the axis too, along the sequence.
    """

    caller: str
    axis: str | None
    sequence: bool = False
    overlap: str = "auto"

    def __post_init__(self) -> None:
        ok = self.axis is None or (isinstance(self.axis, str) and self.axis != "")
        check_type(ok, self.caller, "tensor_axis", "None or the name of a mesh axis", repr(self.axis))
        ok = self.axis is not None or not self.sequence
        check_value(ok, self.caller, "sequence_parallel", "False without a tensor_axis", self.sequence)
        check_overlap(self.caller, self.overlap)

    @property
    def ranks(self) -> int:
        """Devices that share the module here: the size of a Manual axis, otherwise 1."""
        axis = self._named_axis()
        return axis.size if axis is not None and axis.kind == AxisType.Manual else 1

    @property
    def fewest_tokens(self) -> int:
        """How many tokens an input has at least, whatever the kind of the axis: one for each device, to be split."""
        axis = self._named_axis()
        return axis.size if axis is not None and self.sequence else 1

    def _named_axis(self) -> mesh.NamedAxis | None:
        return None if self.axis is None else mesh.named_axis(self.caller, self.axis, argument="tensor_axis")

    @property
    def split_whole(self) -> int:
        """Over how many devices an axis that isn't Manual splits what is whole here; 1: there is no such axis."""
        axis = self._named_axis()
        return axis.size if axis is not None and axis.kind != AxisType.Manual else 1

    def order(self, size: int) -> int:
        """In the order of how many devices (te_jax.ops.device_order) halves of this size come out of ``linear``."""
        return self.split_whole if size % self.split_whole == 0 else 1

    def share(self, argument: str, size: int) -> int:
        """A device's part of a size. Raises ValueError naming the argument if devices don't divide it."""
        expected = f"a multiple of {self.ranks}, the size of mesh axis {self.axis!r}"
        check_value(size % self.ranks == 0, self.caller, argument, expected, size)
        return size // self.ranks

    def before(self) -> tuple[ops.Op, ...]:
        """What is in front of a column-parallel linear."""
        if self.axis is None or not self.sequence:
            return ()
        return (ops.AllGather(self.axis, overlap=self.overlap),)

    def behind(self) -> tuple[ops.Op, ...]:
        """What is behind a row-parallel linear and its bias."""
        if self.axis is None:
            return ()
        kind = ops.ReduceScatter if self.sequence else ops.AllReduce
        return (kind(self.axis, overlap=self.overlap),)

    def linear(
        self,
        features: int,
        parallel: Parallel,
        *,
        parts: tuple[int, ...] | None = None,
        split: int = 0,
        kernel_init: Initializer,
        bias_init: Initializer,
        **options: Any,
    ) -> ops.Linear:
        """A device's part of a linear.

        Args:
          features: output features of the whole.
          parallel: which features are split: those of the output ("column") or of the input ("row").
          parts: of a column-parallel one: sizes whose product is ``features``, as which its parameters are kept so that
            devices have a part of each; ``split`` is the one that is split.
        """
        if self.axis is None:
            return ops.Linear(features, kernel_init=kernel_init, bias_init=bias_init, **options)
        names: tuple[str | None, ...] = (None,)
        kept = None
        if parallel == "column":
            names = tuple(self.axis if i == split else None for i in range(len(parts or (features,))))
            share = self.share("features", (parts or (features,))[split])
            sizes = tuple(share if i == split else size for i, size in enumerate(parts or (features,)))
            kept, features = (sizes if parts else None), features // self.ranks
        gated = parallel == "column" and parts is not None and len(parts) == 2 and split == 1
        kernel_names = (None, *names) if parallel == "column" else (self.axis, None)
        return ops.Linear(
            features,
            kernel_init=partitioned(kernel_init, kernel_names),
            bias_init=partitioned(bias_init, names),
            kept_features=kept,
            devices=self.order(kept[1]) if gated and kept else 1,
            **options,
        )


@dataclasses.dataclass(frozen=True)
class _Partitioned:
    """An initialiser whose values say how they are split. Compares by its fields, as plans are cached on it.

    Inside of ``shard_map`` values are a device's own, and there is nothing to say.
    """

    init: Initializer
    names: tuple[str | None, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value = self.init(*args, **kwargs)
        if isinstance(value, meta.AxisMetadata) or mesh.manual_axes():
            return value
        box = getattr(self.init, "box", nn.Partitioned)  # te.nnx has one of its own
        return box(value, self.names)


def partitioned(init: Initializer, names: tuple[str | None, ...]) -> Initializer:
    """As ``nn.with_partitioning``; what is wrapped already stays as its user has it."""
    return _Partitioned(init, names)
