"""Norms over the last dimension: RMSNorm, LayerNorm, L2Normalization.

Forward, per token, all in fp32, rounded once to x's dtype:

  RMSNorm    rstd = 1 / sqrt(mean(x^2) + epsilon)                 y = x rstd gamma
  LayerNorm  rstd = 1 / sqrt(mean((x - mean)^2) + epsilon)        y = (x - mean) rstd gamma + beta
  L2         y = x / sqrt(sum(x^2) + epsilon): the RMSNorm of gamma = 1 / sqrt(C) and epsilon / C, as which it runs

Backward, with x^ = (x - mean) rstd, g = dy gamma, and means over the last dimension:

  dx = rstd (g - x^ mean(g x^) [- mean(g) for LayerNorm])    dgamma = sum dy x^    dbeta = sum dy

It saves x and the statistics. In a chain with a recipe both directions are primitives; without one they are jnp, which
has second derivatives.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax
from jax.nn import initializers

from te_jax import primitives
from te_jax.errors import required
from te_jax.ops.base import BackwardContext, ForwardContext, Initializer, LinkInfo, Op, ParamSpec, TensorType
from te_jax.ops.residual import add_cotangents, addable
from te_jax.parallel import mesh
from te_jax.primitives.spec import NormGradSpec, NormSpec


@dataclasses.dataclass(frozen=True)
class Norm(Op):
    """Base of the norms. ``epsilon``: added to the mean square (variance, sum of squares) before the root."""

    epsilon: float = 1e-6

    kind: ClassVar[str]  # as in NormSpec
    centered: ClassVar[bool]  # subtracts the mean and adds a bias

    def _gamma(self, ctx: ForwardContext | BackwardContext) -> Array:
        return ctx.params["scale"]

    @property
    def _zero_centered(self) -> bool:
        """Whether 1 is added to gamma."""
        return False

    def _epsilon(self, x_type: TensorType) -> float:
        del x_type
        return self.epsilon

    def saves_input(self, info: LinkInfo) -> bool:
        return True

    def forward(self, ctx: ForwardContext, x: Array) -> Array:
        if ctx.info.recipe is not None:
            wanted = {"format": ctx.info.recipe.format("x").name, "hp": True, "data": False}
            return required(self.forward_quantized(ctx, x, jnp.zeros((), jnp.float32), wanted).hp, "norm", "hp")
        x32 = x.astype(jnp.float32)
        mean = jnp.mean(x32, axis=-1) if self.centered else None
        if mean is not None:
            x32 = x32 - mean[..., None]
        rstd = lax.rsqrt(jnp.mean(x32 * x32, axis=-1) + self._epsilon(ctx.info.x_type))
        y = x32 * rstd[..., None] * (self._gamma(ctx).astype(jnp.float32) + self._zero_centered)
        if self.centered:
            y = y + ctx.params["bias"].astype(jnp.float32)
        ctx.saved = (x, *ctx.named((mean, rstd), "input_stats"))
        return y.astype(x.dtype)

    def forward_quantized(
        self, ctx: ForwardContext, x: Array, scale: Array | None, quantizing: dict[str, Any]
    ) -> primitives.QuantizeOut:
        """What the fields ``quantizing`` of a QuantizingSpec ask for, in one pass: FP8 for the linear after it."""
        spec = NormSpec(
            kind=self.kind,
            epsilon=self._epsilon(ctx.info.x_type),
            zero_centered_gamma=self._zero_centered,
            stats=ctx.train,
            **quantizing,
        )
        axes = mesh.amax_axes(x, scale, ctx.info.recipe)
        out = primitives.norm(x, self._gamma(ctx), ctx.params.get("bias"), scale, spec, amax_axes=axes)
        ctx.saved = (x, *ctx.named((out.mean, out.rstd), "input_stats"))
        return out

    def backward(self, ctx: BackwardContext, dy: Array) -> Array:
        return self._grad(ctx, dy, None)

    def backward_and_add(self, ctx: BackwardContext, dy: Array, dres: Array) -> Array:
        """The sum of x's cotangent and of ``dres``, which reaches x past the norm, rounded once where it can be."""
        if addable(dres, dy, self._gamma(ctx), *ctx.saved):
            return self._grad(ctx, dy, dres)
        return add_cotangents(self._grad(ctx, dy, None), dres)

    def _grad(self, ctx: BackwardContext, dy: Array, dres: Array | None) -> Array:
        x, mean, rstd = ctx.saved
        spec = NormGradSpec(kind=self.kind, zero_centered_gamma=self._zero_centered, residual=dres is not None)
        norm_grad = primitives.norm_grad_reference if ctx.info.recipe is None else primitives.norm_grad
        out = norm_grad(dy, x, self._gamma(ctx), mean, rstd, spec, dres=dres)
        if "scale" in ctx.params:
            ctx.param_grads["scale"] = out.dgamma.astype(ctx.params["scale"].dtype)
        if out.dbeta is not None:
            ctx.param_grads["bias"] = out.dbeta.astype(ctx.params["bias"].dtype)
        return out.dx


@dataclasses.dataclass(frozen=True)
class _Scaled(Norm):
    """A norm with a gamma. ``zero_centered_gamma``: the parameter ``scale`` is gamma - 1, as in TransformerEngine."""

    zero_centered_gamma: bool = dataclasses.field(default=False, kw_only=True)
    scale_init: Initializer | None = dataclasses.field(default=None, kw_only=True)

    def params(self, x: TensorType) -> tuple[ParamSpec, ...]:
        default = initializers.zeros if self.zero_centered_gamma else initializers.ones
        return (ParamSpec("scale", (x.shape[-1],), self.scale_init or default),)

    @property
    def _zero_centered(self) -> bool:
        return self.zero_centered_gamma


@dataclasses.dataclass(frozen=True)
class RMSNorm(_Scaled):
    """Root-mean-square norm. Parameter ``scale`` [C]. Source: Zhang and Sennrich, arXiv:1910.07467."""

    kind: ClassVar[str] = "rmsnorm"
    centered: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class LayerNorm(_Scaled):
    """Layer norm. Parameters ``scale`` [C], ``bias`` [C]. Source: Ba et al., arXiv:1607.06450."""

    bias_init: Initializer = dataclasses.field(default=initializers.zeros, kw_only=True)

    kind: ClassVar[str] = "layernorm"
    centered: ClassVar[bool] = True

    def params(self, x: TensorType) -> tuple[ParamSpec, ...]:
        return (*super().params(x), ParamSpec("bias", (x.shape[-1],), self.bias_init))


@dataclasses.dataclass(frozen=True)
class L2Normalization(Norm):
    """y = x / sqrt(sum(x^2) + epsilon) over the last dimension, without parameters, as TransformerEngine's op."""

    kind: ClassVar[str] = "rmsnorm"
    centered: ClassVar[bool] = False

    def _gamma(self, ctx: ForwardContext | BackwardContext) -> Array:
        features = ctx.info.x_type.shape[-1]
        return jnp.full((features,), features**-0.5, jnp.float32)

    def _epsilon(self, x_type: TensorType) -> float:
        return self.epsilon / x_type.shape[-1]


NORMS = (RMSNorm, LayerNorm, L2Normalization)
