"""Norms over the last dimension: RMSNorm, LayerNorm.

Forward, per token, all in fp32, rounded once to x's dtype:

  RMSNorm    rstd = 1 / sqrt(mean(x^2) + epsilon)                 y = x rstd gamma
  LayerNorm  rstd = 1 / sqrt(mean((x - mean)^2) + epsilon)        y = (x - mean) rstd gamma + beta

Backward, with x^ = (x - mean) rstd, g = dy gamma, and means over the last dimension:

  dx = rstd (g - x^ mean(g x^) [- mean(g) for LayerNorm])    dgamma = sum dy x^    dbeta = sum dy

It saves x and the statistics.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax
from jax.nn import initializers

from te_jax import primitives
from te_jax.ops.base import BackwardContext, ForwardContext, Initializer, Op, ParamSpec, TensorType, sum_over_lead
from te_jax.parallel import mesh
from te_jax.primitives.spec import NormSpec


@dataclasses.dataclass(frozen=True)
class _Norm(Op):
    epsilon: float = 1e-6
    zero_centered_gamma: bool = dataclasses.field(default=False, kw_only=True)
    scale_init: Initializer | None = dataclasses.field(default=None, kw_only=True)

    kind: ClassVar[str]
    centered: ClassVar[bool]  # subtracts the mean and adds a bias

    def params(self, x: TensorType) -> tuple[ParamSpec, ...]:
        default = initializers.zeros if self.zero_centered_gamma else initializers.ones
        return (ParamSpec("scale", (x.shape[-1],), self.scale_init or default),)

    def _gamma(self, scale: Array) -> Array:
        gamma = scale.astype(jnp.float32)
        return 1.0 + gamma if self.zero_centered_gamma else gamma

    def forward(self, ctx: ForwardContext, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        mean = jnp.mean(x32, axis=-1) if self.centered else None
        if mean is not None:
            x32 = x32 - mean[..., None]
        rstd = lax.rsqrt(jnp.mean(x32 * x32, axis=-1) + self.epsilon)
        y = x32 * rstd[..., None] * self._gamma(ctx.params["scale"])
        if self.centered:
            y = y + ctx.params["bias"].astype(jnp.float32)
        ctx.saved = (x, mean, rstd)
        return y.astype(x.dtype)

    def forward_quantized(
        self, ctx: ForwardContext, x: Array, scale: Array, quantizing: dict[str, Any]
    ) -> primitives.QuantizeOut:
        """The result in FP8 only, as the linear after it wants it (``quantizing``), in one pass over x."""
        spec = NormSpec(
            kind=self.kind,
            epsilon=self.epsilon,
            zero_centered_gamma=self.zero_centered_gamma,
            stats=ctx.train,
            **quantizing,
        )
        axes = mesh.amax_axes(x, scale, ctx.info.recipe)
        out = primitives.norm(x, ctx.params["scale"], ctx.params.get("bias"), scale, spec, amax_axes=axes)
        ctx.saved = (x, out.mean, out.rstd)
        return out

    def backward(self, ctx: BackwardContext, dy: Array) -> Array:
        x, mean, rstd = ctx.saved
        x32, dy32 = x.astype(jnp.float32), dy.astype(jnp.float32)
        if mean is not None:
            x32 = x32 - mean[..., None]
        x_hat = x32 * rstd[..., None]
        g = dy32 * self._gamma(ctx.params["scale"])
        dx = g - x_hat * jnp.mean(g * x_hat, axis=-1, keepdims=True)
        if self.centered:
            dx = dx - jnp.mean(g, axis=-1, keepdims=True)
            ctx.param_grads["bias"] = sum_over_lead(dy32, ctx.params["bias"].dtype)
        ctx.param_grads["scale"] = sum_over_lead(dy32 * x_hat, ctx.params["scale"].dtype)
        return (dx * rstd[..., None]).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class RMSNorm(_Norm):
    """Root-mean-square norm. Parameter ``scale`` [C]. Source: Zhang and Sennrich, arXiv:1910.07467."""

    kind: ClassVar[str] = "rmsnorm"
    centered: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class LayerNorm(_Norm):
    """Layer norm. Parameters ``scale`` [C], ``bias`` [C]. Source: Ba et al., arXiv:1607.06450."""

    bias_init: Initializer = dataclasses.field(default=initializers.zeros, kw_only=True)

    kind: ClassVar[str] = "layernorm"
    centered: ClassVar[bool] = True

    def params(self, x: TensorType) -> tuple[ParamSpec, ...]:
        return (*super().params(x), ParamSpec("bias", (x.shape[-1],), self.bias_init))
