"""``activation`` and ``activation_grad``: elementwise and gated activations, ending in a quantizing pass.

GELU is the tanh approximation, as ``jax.nn.gelu`` is by default. Everything is computed in fp32 and y is rounded to
x's dtype. A gated activation takes [*lead, 2C]; ``ActivationSpec`` has the formulas.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from te_jax import errors
from te_jax.parallel.sharding import ShardingRule
from te_jax.primitives import quantizing
from te_jax.primitives.custom_call import CustomCall
from te_jax.primitives.definition import Definition
from te_jax.primitives.quantizing import QuantizeOut
from te_jax.primitives.spec import ACTIVATIONS, GATED_ACTIVATIONS, ActivationGradSpec, ActivationSpec
from te_jax.quant.block_reference import BLOCK

QUICK_GELU_ALPHA = 1.702


def activation(
    x: jax.Array,
    scale: jax.Array | None,
    spec: ActivationSpec,
    *,
    group_sizes: jax.Array | None = None,
    amax_axes: tuple[str, ...] | None = None,
) -> QuantizeOut:
    """y [*lead, C] = act(x), x [*lead, C] or [*lead, 2C] if gated; all but x as for ``quantize``."""
    operands = quantizing.with_scale(spec, "activation", scale, x, group_sizes=group_sizes)
    return quantizing.to_out(spec, _ACTIVATION(spec, *operands, amax_axes=amax_axes))


def activation_grad(
    dy: jax.Array,
    x: jax.Array,
    scale: jax.Array | None,
    spec: ActivationGradSpec,
    *,
    group_sizes: jax.Array | None = None,
    amax_axes: tuple[str, ...] | None = None,
) -> QuantizeOut:
    """y, in x's shape: the cotangent of x for dy [*lead, C], in x's dtype; the rest as for ``quantize``."""
    operands = quantizing.with_scale(spec, "activation_grad", scale, dy, x, group_sizes=group_sizes)
    return quantizing.to_out(spec, _ACTIVATION_GRAD(spec, *operands, amax_axes=amax_axes))


# The function of x, or of the gate.
_FUNCTION = {kind: kind for kind in ACTIVATIONS} | {
    "geglu": "gelu",
    "swiglu": "silu",
    "glu": "sigmoid",
    "reglu": "relu",
    "qgeglu": "quick_gelu",
    "sreglu": "squared_relu",
    "clamped_swiglu": "swish",
}


def _act(spec, x: jax.Array) -> jax.Array:
    match _FUNCTION[spec.kind]:
        case "gelu":
            return 0.5 * x * (1 + jnp.tanh(_gelu_inner(x)))
        case "relu":
            return jnp.maximum(x, 0)
        case "squared_relu":
            return jnp.square(jnp.maximum(x, 0))
        case "sigmoid":
            return jax.nn.sigmoid(x)
    return x * jax.nn.sigmoid(_alpha(spec) * x)


def _act_derivative(spec, x: jax.Array) -> jax.Array:
    match _FUNCTION[spec.kind]:
        case "gelu":
            t = jnp.tanh(_gelu_inner(x))
            inner_derivative = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
            return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner_derivative
        case "relu":
            return jnp.where(x > 0, jnp.float32(1), jnp.float32(0))
        case "squared_relu":
            return 2 * jnp.maximum(x, 0)
        case "sigmoid":
            s = jax.nn.sigmoid(x)
            return s * (1 - s)
    s = jax.nn.sigmoid(_alpha(spec) * x)
    return s * (1 + _alpha(spec) * x * (1 - s))


def _alpha(spec) -> float:
    """of x sigmoid(alpha x)."""
    return {"silu": 1.0, "quick_gelu": QUICK_GELU_ALPHA, "swish": spec.alpha}[_FUNCTION[spec.kind]]


def _gelu_inner(x: jax.Array) -> jax.Array:
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)


def _halves(spec, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(gate, linear)."""
    first, second = jnp.split(x, 2, axis=-1)
    return (second, first) if spec.gate_second else (first, second)


def _clamped(spec, gate: jax.Array, linear: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What act and the product take: (min(gate, limit), linear clamped to +-limit, plus the offset)."""
    if spec.kind != "clamped_swiglu":
        return gate, linear
    limit = jnp.float32(spec.limit)
    return jnp.minimum(gate, limit), jnp.clip(linear, -limit, limit) + jnp.float32(spec.linear_offset)


def _check_kind(op: str, spec) -> bool:
    """The fields that say which activation; returns whether it is gated."""
    kinds = ACTIVATIONS + GATED_ACTIVATIONS
    errors.check_value(spec.kind in kinds, op, "kind", " or ".join(kinds), spec.kind)
    gated = spec.kind in GATED_ACTIVATIONS
    errors.check_value(gated or not spec.gate_second, op, "gate_second", f"False for {spec.kind}", spec.gate_second)
    if spec.kind == "clamped_swiglu":
        errors.check_value(spec.limit > 0, op, "limit", "a positive number", spec.limit)
        return gated
    for field in dataclasses.fields(ActivationSpec):
        if field.name in ("limit", "alpha", "linear_offset"):
            value = getattr(spec, field.name)
            errors.check_value(value == field.default, op, field.name, f"{field.default} for {spec.kind}", value)
    return gated


def _y_shape(spec, x) -> tuple[int, ...]:
    return (*x.shape[:-1], x.shape[-1] // 2) if spec.kind in GATED_ACTIVATIONS else x.shape


def _check_activation(spec, x, *scale):
    gated = _check_kind("activation", spec)
    quantizing.check_high_precision("activation", "x", x)
    quantizing.check_rank("activation", "x", x)
    errors.check_value(
        not gated or x.shape[-1] % 2 == 0, "activation", "x", "an even last dimension (gated)", f"shape {x.shape}"
    )
    quantizing.check(spec, "activation", _y_shape(spec, x), *scale)


def _activation_reference(spec, x, *scale):
    wide = x.astype(jnp.float32)
    if spec.kind in GATED_ACTIVATIONS:
        gate, linear = _clamped(spec, *_halves(spec, wide))
        y = _act(spec, gate) * linear
    else:
        y = _act(spec, wide)
    return quantizing.finish(spec, y.astype(x.dtype), *scale)


def _activation_rule(spec, x, *scale):
    lead, y_shape = quantizing.lead_factors(len(x.shape)), _y_shape(spec, x)
    results = quantizing.factors(spec, lead, "c", y_shape)
    replicated = quantizing.replicated(spec, lead, "c", y_shape)
    if spec.kind in GATED_ACTIVATIONS:  # a shard of [act | gate] doesn't hold the pairs
        whole = ("c2", "c") if _has_cols(spec) else ("c2",)
        return ShardingRule(
            operands=((*lead, "c2"), *quantizing.scale_factors(spec)),
            results=results,
            replicated=tuple(dict.fromkeys(whole + replicated)),
            amax=lead,
            sums=lead,
        )
    return ShardingRule(
        operands=((*lead, "c"), *quantizing.scale_factors(spec)),
        results=results,
        replicated=replicated,
        amax=(*lead, "c"),
        sums=lead,
    )


def _has_cols(spec) -> bool:
    return spec.hp or spec.quantizes or spec.dbias


_ACTIVATION = CustomCall(
    Definition(
        name="activation",
        spec_type=ActivationSpec,
        operands=lambda spec: quantizing.operands(spec, "x"),
        check=_check_activation,
        results=lambda spec, x, *scale: quantizing.results(spec, _y_shape(spec, x), x.dtype),
        reference=_activation_reference,
        why_not=lambda spec, x, *scale: quantizing.why_not(spec, _y_shape(spec, x)),
        rule=_activation_rule,
        local=quantizing.local,
        workspace=lambda spec, x, *scale: quantizing.workspace_bytes(spec, _y_shape(spec, x)),
        on_device=quantizing.on_device,
    )
)


def _check_activation_grad(spec, dy, x, *scale):
    gated = _check_kind("activation_grad", spec)
    quantizing.check_high_precision("activation_grad", "dy", dy)
    quantizing.check_rank("activation_grad", "dy", dy)
    errors.check_type(x.dtype == dy.dtype, "activation_grad", "x", f"dy's dtype {dy.dtype}", x.dtype)
    shape = (*dy.shape[:-1], dy.shape[-1] * (2 if gated else 1))
    errors.check_value(x.shape == shape, "activation_grad", "x", f"shape {shape}", x.shape)
    quantizing.check(spec, "activation_grad", x.shape, *scale)


def _activation_grad_reference(spec, dy, x, *scale):
    """d/dx of act(x): dy * act'(x); gated, y = act(g) * u: dg = dy * u * act'(g), du = dy * act(g)."""
    wide, dy = x.astype(jnp.float32), dy.astype(jnp.float32)
    if spec.kind in GATED_ACTIVATIONS:
        gate, linear = _halves(spec, wide)
        inner, factor = _clamped(spec, gate, linear)
        slope, value = _act_derivative(spec, inner), _act(spec, inner)
        if spec.kind == "clamped_swiglu":
            slope = jnp.where(gate > spec.limit, 0, slope)
            value = jnp.where(jnp.abs(linear) > spec.limit, 0, value)
        parts = (dy * factor * slope, dy * value)
        dx = jnp.concatenate(parts[::-1] if spec.gate_second else parts, axis=-1)
    else:
        dx = dy * _act_derivative(spec, wide)
    return quantizing.finish(spec, dx.astype(x.dtype), *scale)


def _activation_grad_rule(spec, dy, x, *scale):
    lead = quantizing.lead_factors(len(x.shape))
    gated = spec.kind in GATED_ACTIVATIONS
    whole = ("f", "c") if gated else ()
    return ShardingRule(
        operands=((*lead, "f" if gated else "c"), (*lead, "c"), *quantizing.scale_factors(spec)),
        results=quantizing.factors(spec, lead, "c", x.shape),
        replicated=tuple(dict.fromkeys(whole + quantizing.replicated(spec, lead, "c", x.shape))),
        amax=lead if gated else (*lead, "c"),
        sums=lead,
    )


def _why_not_grad(spec, dy, x, *scale):
    if spec.blocks and spec.kind in GATED_ACTIVATIONS and dy.shape[-1] % BLOCK:
        return f"blocks of both halves of a gated gradient: {dy.shape[-1]} is not a multiple of {BLOCK}"
    return quantizing.why_not(spec, dy.shape)


_ACTIVATION_GRAD = CustomCall(
    Definition(
        name="activation_grad",
        spec_type=ActivationGradSpec,
        operands=lambda spec: quantizing.operands(spec, "dy", "x"),
        check=_check_activation_grad,
        results=lambda spec, dy, x, *scale: quantizing.results(spec, x.shape, x.dtype),
        reference=_activation_grad_reference,
        why_not=_why_not_grad,
        rule=_activation_grad_rule,
        local=quantizing.local,
        workspace=lambda spec, dy, x, *scale: quantizing.workspace_bytes(spec, x.shape),
        on_device=quantizing.on_device,
    )
)
