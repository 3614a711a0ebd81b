"""Activations, plain (ReLU, GELU, SiLU, ...) and gated (SwiGLU, GEGLU, GLU, ...).

Computed in fp32, rounded once to x's dtype. A gated one halves the last dimension, x [*lead, 2F] -> y [*lead, F]:
y = act(g) u with the gate g = x[..., :F] and u = x[..., F:], as in TransformerEngine; ``gate="second"`` exchanges them
(torch.nn.functional.glu, flax.linen.glu). Weights whose gate and value columns alternate in blocks of k (as by
TransformerEngine's ``glu_interleave_size``; in GPT-OSS with k = 1) are brought into this order once, when they are
loaded: ``kernel.reshape(K, F // k, 2, k).swapaxes(1, 2).reshape(K, 2 * F)``, and the bias in the same way.

All save their input. Both directions are the primitives ``activation`` and ``activation_grad`` where they write FP8
for a linear (te_jax.fusion.rules), and jnp otherwise, which has second derivatives.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from te_jax import primitives
from te_jax.errors import check_type, check_value, required
from te_jax.ops import device_order
from te_jax.ops.base import BackwardContext, ForwardContext, LinkInfo, Op, TensorType, sum_over_lead
from te_jax.parallel import explicit, mesh
from te_jax.primitives.spec import ActivationGradSpec, ActivationSpec

GATES = ("first", "second")


def quick_gelu(x: Array) -> Array:
    """x sigmoid(1.702 x)."""
    return x * jax.nn.sigmoid(1.702 * x)


def squared_relu(x: Array) -> Array:
    """max(x, 0)^2."""
    return jnp.square(jax.nn.relu(x))


@dataclasses.dataclass(frozen=True)
class Activation(Op):
    """Base of all activations: y = function(x)."""

    kind: ClassVar[str]  # as in ActivationSpec
    gated: ClassVar[bool] = False
    devices: ClassVar[int] = 1
    function: ClassVar[Callable[[Array], Array]]  # in fp32

    def _compute(self, x32: Array) -> Array:
        return type(self).function(x32)

    def _fields(self) -> dict[str, Any]:
        """The fields of an ActivationSpec that say which activation it is."""
        return {"kind": self.kind}

    def saves_input(self, info: LinkInfo) -> bool:
        return True

    def forward(self, ctx: ForwardContext, x: Array) -> Array:
        ctx.saved = x
        return self._compute(x.astype(jnp.float32)).astype(x.dtype)

    def forward_quantized(
        self,
        ctx: ForwardContext,
        x: Array,
        scale: Array | None,
        quantizing: dict[str, Any],
        *,
        group_sizes: Array | None = None,
    ) -> primitives.QuantizeOut:
        """The result in FP8 only, as the linear after it wants it (``quantizing``), in one pass over x.

        Not in blocks of scales, nor by groups, where ``devices`` is above 1.
        """
        ctx.saved = x
        spec = ActivationSpec(**self._fields(), **quantizing)
        axes = mesh.amax_axes(x, scale, ctx.info.recipe)
        if self.devices == 1:
            return primitives.activation(x, scale, spec, group_sizes=group_sizes, amax_axes=axes)
        x = device_order.apart(x, self.devices)
        return device_order.joined_results(primitives.activation(x, scale, spec, amax_axes=axes))

    def backward(self, ctx: BackwardContext, dy: Array) -> Array:
        x = ctx.saved
        y, vjp = jax.vjp(self._compute, x.astype(jnp.float32))
        dy = dy.astype(jnp.float32)
        if mesh.regime(y).typed:  # a linear in block scaling may have gathered its own
            dy = explicit.constrain(dy, jax.typeof(y).sharding.spec)
        return vjp(dy)[0].astype(x.dtype)

    def backward_quantized(
        self,
        ctx: BackwardContext,
        dy: Array,
        scale: Array | None,
        quantizing: dict[str, Any],
        *,
        group_sizes: Array | None = None,
    ) -> primitives.QuantizeOut:
        """The cotangent of x in FP8 only, as the linear before it wants it (``quantizing``), in one pass.

        Where ``devices`` is above 1, as ``forward_quantized``; and dbias is summed from the cotangent in x's dtype.
        """
        axes = mesh.amax_axes(dy, scale, ctx.info.recipe)
        if self.devices == 1:
            spec = ActivationGradSpec(**self._fields(), **quantizing)
            return primitives.activation_grad(dy, ctx.saved, scale, spec, group_sizes=group_sizes, amax_axes=axes)
        dbias = quantizing.get("dbias", False)
        wanted: dict[str, Any] = quantizing | {"dbias": False} | ({"hp": True} if dbias else {})
        spec = ActivationGradSpec(**self._fields(), **wanted)
        dy, x = (device_order.apart(a, self.devices) for a in (dy, ctx.saved))
        out = device_order.joined_results(primitives.activation_grad(dy, x, scale, spec, amax_axes=axes))
        if not dbias:
            return out
        hp = required(out.hp, ctx.info.label, "hp")
        return out._replace(hp=None, dbias=sum_over_lead(hp, jnp.dtype(quantizing["dbias_dtype"])))


@dataclasses.dataclass(frozen=True)
class GatedActivation(Activation):
    """Base of the gated ones: y = function(g) u.

    ``gate``: which half of x is g, "first" (the default, as in TransformerEngine) or "second".
    ``devices``: above 1 x is in the order of so many devices (te_jax.ops.device_order), as from a ``Linear``.
    """

    gate: str = dataclasses.field(default="first", kw_only=True)
    devices: int = dataclasses.field(default=1, kw_only=True)  # type: ignore[misc]

    gated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_value(self.gate in GATES, str(self), "gate", " or ".join(map(repr, GATES)), repr(self.gate))

    def out_type(self, x: TensorType) -> TensorType:
        check_value(x.shape[-1] % 2 == 0, str(self), "x", "an even last dimension (gate and value)", f"shape {x.shape}")
        expected = f"a multiple of {2 * self.devices} features, of two halves on each of {self.devices} devices"
        check_value(x.shape[-1] % (2 * self.devices) == 0, str(self), "x", expected, f"shape {x.shape}")
        return TensorType((*x.shape[:-1], x.shape[-1] // 2), x.dtype)

    def _halves(self, x32: Array) -> tuple[Array, Array]:
        """(gate, value)."""
        if self.devices == 1:
            first, second = jnp.split(x32, 2, axis=-1)
        else:
            halves = jnp.split(device_order.apart(x32, self.devices), 2, axis=-1)
            first, second = map(device_order.joined, halves)
        return (first, second) if self.gate == "first" else (second, first)

    def _compute(self, x32: Array) -> Array:
        gate, value = self._halves(x32)
        return type(self).function(gate) * value

    def _fields(self) -> dict[str, Any]:
        return {"kind": self.kind, "gate_second": self.gate == "second"}


@dataclasses.dataclass(frozen=True)
class ReLU(Activation):
    """max(x, 0)."""

    kind: ClassVar[str] = "relu"
    function = staticmethod(jax.nn.relu)


@dataclasses.dataclass(frozen=True)
class GELU(Activation):
    """x Phi(x), tanh approximation (as jax.nn.gelu and TransformerEngine). Source: arXiv:1606.08415."""

    kind: ClassVar[str] = "gelu"
    function = staticmethod(jax.nn.gelu)


@dataclasses.dataclass(frozen=True)
class QuickGELU(Activation):
    """x sigmoid(1.702 x): TransformerEngine's QGELU. Source: arXiv:1606.08415, section 2."""

    kind: ClassVar[str] = "quick_gelu"
    function = staticmethod(quick_gelu)


@dataclasses.dataclass(frozen=True)
class SiLU(Activation):
    """x sigmoid(x)."""

    kind: ClassVar[str] = "silu"
    function = staticmethod(jax.nn.silu)


@dataclasses.dataclass(frozen=True)
class SquaredReLU(Activation):
    """max(x, 0)^2: TransformerEngine's SReLU. Source: So et al., arXiv:2109.08668."""

    kind: ClassVar[str] = "squared_relu"
    function = staticmethod(squared_relu)


@dataclasses.dataclass(frozen=True)
class GLU(GatedActivation):
    """sigmoid(g) u. Source: Dauphin et al., arXiv:1612.08083."""

    kind: ClassVar[str] = "glu"
    function = staticmethod(jax.nn.sigmoid)


@dataclasses.dataclass(frozen=True)
class GEGLU(GatedActivation):
    """gelu(g) u, tanh approximation. Source: Shazeer, arXiv:2002.05202."""

    kind: ClassVar[str] = "geglu"
    function = staticmethod(jax.nn.gelu)


@dataclasses.dataclass(frozen=True)
class ReGLU(GatedActivation):
    """max(g, 0) u. Source: Shazeer, arXiv:2002.05202."""

    kind: ClassVar[str] = "reglu"
    function = staticmethod(jax.nn.relu)


@dataclasses.dataclass(frozen=True)
class QGEGLU(GatedActivation):
    """g sigmoid(1.702 g) u: GEGLU with QuickGELU."""

    kind: ClassVar[str] = "qgeglu"
    function = staticmethod(quick_gelu)


@dataclasses.dataclass(frozen=True)
class SReGLU(GatedActivation):
    """max(g, 0)^2 u: ReGLU with SquaredReLU."""

    kind: ClassVar[str] = "sreglu"
    function = staticmethod(squared_relu)


@dataclasses.dataclass(frozen=True)
class SwiGLU(GatedActivation):
    """silu(g) u. Source: Shazeer, arXiv:2002.05202."""

    kind: ClassVar[str] = "swiglu"
    function = staticmethod(jax.nn.silu)


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU(GatedActivation):
    """g' sigmoid(alpha g') (u' + linear_offset), where g' = min(g, limit) and u' is u clamped to +-limit.

    The activation of GPT-OSS; arguments and defaults are those of TransformerEngine's op of this name. Up to and
    including its limit a clamp passes a cotangent on, beyond it nothing.
    """

    limit: float = dataclasses.field(default=7.0, kw_only=True)
    alpha: float = dataclasses.field(default=1.702, kw_only=True)
    linear_offset: float = dataclasses.field(default=1.0, kw_only=True)

    kind: ClassVar[str] = "clamped_swiglu"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("limit", "alpha", "linear_offset"):
            value = getattr(self, name)
            ok = isinstance(value, numbers.Real) and not isinstance(value, bool)
            check_type(ok, str(self), name, "a Python number", repr(value))
            object.__setattr__(self, name, float(value))
            check_value(math.isfinite(value), str(self), name, "a finite number", repr(value))
        check_value(self.limit > 0, str(self), "limit", "a positive number", repr(self.limit))

    def _compute(self, x32: Array) -> Array:
        gate, value = self._halves(x32)
        # jnp.minimum would give half of the cotangent to a value at the limit itself.
        gate = jnp.where(gate > self.limit, self.limit, gate)
        value = jnp.where(jnp.abs(value) > self.limit, jnp.copysign(self.limit, value), value)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (value + self.linear_offset)

    def _fields(self) -> dict[str, Any]:
        return super()._fields() | {"limit": self.limit, "alpha": self.alpha, "linear_offset": self.linear_offset}


PLAIN = (ReLU, GELU, QuickGELU, SiLU, SquaredReLU)
GATED = (GEGLU, SwiGLU, GLU, ReGLU, QGEGLU, SReGLU, ClampedSwiGLU)
ACTIVATIONS = (*PLAIN, *GATED)
