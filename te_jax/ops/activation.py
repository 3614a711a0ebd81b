"""Activations, plain (ReLU, GELU, SiLU) and gated (SwiGLU, GEGLU).

Computed in fp32, rounded once to x's dtype. A gated one halves the last dimension: act(x[..., :F]) * x[..., F:] for
x [*lead, 2F] (the first half is the gate, as in TransformerEngine). It saves its input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from te_jax import primitives
from te_jax.errors import check_value
from te_jax.ops.base import BackwardContext, ForwardContext, Op, TensorType
from te_jax.parallel import mesh
from te_jax.primitives.spec import ActivationGradSpec, ActivationSpec


@dataclasses.dataclass(frozen=True)
class _Activation(Op):
    kind: ClassVar[str]
    gated: ClassVar[bool] = False
    function: ClassVar[Callable[[Array], Array]]  # in fp32

    def out_type(self, x: TensorType) -> TensorType:
        if not self.gated:
            return x
        check_value(x.shape[-1] % 2 == 0, str(self), "x", "an even last dimension (gate and value)", f"shape {x.shape}")
        return TensorType((*x.shape[:-1], x.shape[-1] // 2), x.dtype)

    def _compute(self, x32: Array) -> Array:
        function = type(self).function
        if not self.gated:
            return function(x32)
        gate, value = jnp.split(x32, 2, axis=-1)
        return function(gate) * value

    def forward(self, ctx: ForwardContext, x: Array) -> Array:
        ctx.saved = x
        return self._compute(x.astype(jnp.float32)).astype(x.dtype)

    def forward_quantized(
        self, ctx: ForwardContext, x: Array, scale: Array | None, quantizing: dict[str, Any]
    ) -> primitives.QuantizeOut:
        """The result in FP8 only, as the linear after it wants it (``quantizing``), in one pass over x."""
        ctx.saved = x
        axes = mesh.amax_axes(x, scale, ctx.info.recipe)
        return primitives.activation(x, scale, ActivationSpec(kind=self.kind, **quantizing), amax_axes=axes)

    def backward(self, ctx: BackwardContext, dy: Array) -> Array:
        x = ctx.saved
        _, vjp = jax.vjp(self._compute, x.astype(jnp.float32))
        return vjp(dy.astype(jnp.float32))[0].astype(x.dtype)

    def backward_quantized(
        self, ctx: BackwardContext, dy: Array, scale: Array | None, quantizing: dict[str, Any]
    ) -> primitives.QuantizeOut:
        """The cotangent of x in FP8 only, as the linear before it wants it (``quantizing``), in one pass."""
        spec = ActivationGradSpec(kind=self.kind, **quantizing)
        axes = mesh.amax_axes(dy, scale, ctx.info.recipe)
        return primitives.activation_grad(dy, ctx.saved, scale, spec, amax_axes=axes)


@dataclasses.dataclass(frozen=True)
class ReLU(_Activation):
    """max(x, 0)."""

    kind: ClassVar[str] = "relu"
    function = staticmethod(jax.nn.relu)


@dataclasses.dataclass(frozen=True)
class GELU(_Activation):
    """x Phi(x), tanh approximation (as jax.nn.gelu and TransformerEngine). Source: arXiv:1606.08415."""

    kind: ClassVar[str] = "gelu"
    function = staticmethod(jax.nn.gelu)


@dataclasses.dataclass(frozen=True)
class SiLU(_Activation):
    """x sigmoid(x)."""

    kind: ClassVar[str] = "silu"
    function = staticmethod(jax.nn.silu)


@dataclasses.dataclass(frozen=True)
class GEGLU(_Activation):
    """gelu(x[..., :F]) * x[..., F:]. Source: Shazeer, arXiv:2002.05202."""

    kind: ClassVar[str] = "geglu"
    gated: ClassVar[bool] = True
    function = staticmethod(jax.nn.gelu)


@dataclasses.dataclass(frozen=True)
class SwiGLU(_Activation):
    """silu(x[..., :F]) * x[..., F:]. Source: Shazeer, arXiv:2002.05202."""

    kind: ClassVar[str] = "swiglu"
    gated: ClassVar[bool] = True
    function = staticmethod(jax.nn.silu)
