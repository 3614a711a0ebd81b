"""Bias: y = x + bias."""

from __future__ import annotations

import dataclasses

from jax import Array
from jax.nn import initializers

from te_jax.ops.base import BackwardContext, ForwardContext, Initializer, Op, ParamSpec, TensorType, sum_over_lead


@dataclasses.dataclass(frozen=True)
class Bias(Op):
    """Adds a bias over the last dimension. Parameter ``bias`` [C].

    ``kept_features``, ``devices``: as of the linear before it.
    """

    init: Initializer = initializers.zeros
    kept_features: tuple[int, ...] | None = None
    devices: int = 1

    def params(self, x: TensorType) -> tuple[ParamSpec, ...]:
        return (ParamSpec("bias", (x.shape[-1],), self.init, self.kept_features, self.devices),)

    def forward(self, ctx: ForwardContext, x: Array) -> Array:
        return x + ctx.params["bias"].astype(x.dtype)

    def backward(self, ctx: BackwardContext, dy: Array) -> Array:
        ctx.param_grads["bias"] = sum_over_lead(dy, ctx.params["bias"].dtype)
        return dy
