"""The type of a cotangent is its primal's: dtype, manual axes it varies over, Explicit sharding. Set in one place."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec

from te_jax import compat
from te_jax.parallel import mesh


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Like:
    """What a cotangent's type takes from its primal."""

    dtype: Any
    varying: frozenset[str]
    spec: PartitionSpec | None

    @classmethod
    def of(cls, primal: Array) -> Like:
        spec = jax.typeof(primal).sharding.spec if mesh.regime(primal).typed else None
        return cls(primal.dtype, compat.varying_axes(primal), spec)

    def match(self, grad: Array) -> Array:
        """``grad`` in that type: a primal that is the same on several devices gets the sum of their gradients."""
        summed = compat.varying_axes(grad) - self.varying
        if summed:
            grad = jax.lax.psum(grad, tuple(sorted(summed)))
        grad = compat.pvary(grad.astype(self.dtype), self.varying)
        if self.spec is None or jax.typeof(grad).sharding.spec == self.spec:
            return grad
        return compat.reshard(grad, self.spec)


def is_like(node: Any) -> bool:
    return isinstance(node, Like)
