"""The attention between the projections: cuDNN's where a program is lowered for CUDA, otherwise XLA's."""

from __future__ import annotations

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from te_jax import compat
from te_jax.errors import check_value
from te_jax.parallel import explicit, mesh
from te_jax.primitives import AttentionGradSpec, AttentionSpec, attention, attention_grad, support
from te_jax.remat import names

Implementation = Literal["xla", "cudnn"]


def why_not_cudnn(
    query: Array | jax.ShapeDtypeStruct, key: Array | jax.ShapeDtypeStruct, platform: str | None = None
) -> str | None:
    """Why attention isn't cuDNN's on ``platform`` (None: on CUDA); None if it is.

    Args:
      query: [*lead, T, H, D].
      key: [*lead, S, G, D].
      platform: as for ``support.why_not``.
    """
    *lead, heads, head_dim = query.shape
    groups = key.shape[-2]
    grouped = jax.ShapeDtypeStruct((*lead, groups, heads // groups, head_dim), query.dtype)
    return support.why_not(AttentionSpec(causal=False, scale=1.0), grouped, key, key, platform=platform)


def core_attention(
    query: Array, key: Array, value: Array, *, causal: bool, implementation: Implementation | None = None
) -> Array:
    """softmax(query key^T / sqrt(D)) value, in the shape and dtype of query.

    The choice depends on dtypes and shapes, never on where the tracing process runs: a program that may use cuDNN does
    where it is lowered for CUDA, and has the same maths from XLA where it is lowered for another platform. It has first
    derivatives in reverse mode only; "xla" has all.

    Args:
      query: [*lead, T, H, D].
      key, value: [*lead, S, G, D], G a divisor of H.
      causal: whether position t attends to positions <= t only.
      implementation: "xla"; "cudnn": ValueError where cuDNN doesn't take dtype, D or lengths; None: cuDNN where it
        takes them.
    """
    reason = None if implementation == "xla" else why_not_cudnn(query, key)
    ok = implementation != "cudnn" or not reason
    check_value(ok, "core_attention", "implementation='cudnn'", "what cuDNN takes", reason)
    if implementation == "xla" or reason:
        query, key, value = names.name((query, key, value), "core_attn")
        return names.name(_xla_attention(query, key, value, causal), names.CONTEXT)
    *lead, heads, head_dim = query.shape
    groups = key.shape[-2]
    # One type of varying axes, so that cotangents have that of their primals: pvary's transpose is the sum.
    varying = frozenset().union(*map(compat.varying_axes, (query, key, value)))
    query, key, value = (compat.pvary(x, varying) for x in (query, key, value))
    grouped = query.reshape(*lead, groups, heads // groups, head_dim)
    return _attention(causal, 1 / math.sqrt(head_dim), grouped, key, value).reshape(query.shape)


def _xla_attention(query: Array, key: Array, value: Array, causal: bool) -> Array:
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation="xla")
    # jax asks for float16 products with the algorithm F16_F16_F32. XLA's GPU compiler has it in libraries only and
    # fails on products with vectors, which it compiles itself: these are in float32, where memory is what takes time.
    if query.dtype == jnp.float16 and 1 in (query.shape[-3], key.shape[-3], query.shape[-1]):
        return attend(*(x.astype(jnp.float32) for x in (query, key, value))).astype(query.dtype)
    return attend(query, key, value)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(causal: bool, scale: float, query: Array, key: Array, value: Array) -> Array:
    return attention(query, key, value, AttentionSpec(causal=causal, scale=scale))[0]


def _forward(causal: bool, scale: float, query: Array, key: Array, value: Array):
    # Named here, where the backward pass needs them: a policy that saves them doesn't run the forward pass again.
    query, key, value = names.name((query, key, value), "core_attn")
    out, stats = attention(query, key, value, AttentionSpec(causal=causal, scale=scale, stats=True))
    out, stats = names.name((out, stats), names.CONTEXT)
    return out, (query, key, value, stats, out)


def _backward(causal: bool, scale: float, residuals, dout: Array):
    query, key, value, stats, out = residuals
    spec = AttentionGradSpec(causal=causal, scale=scale)
    grads = attention_grad(query, key, value, stats, out, dout, spec)
    return tuple(map(_like, grads, (query, key, value)))


_attention.defvjp(_forward, _backward)


def _like(grad: Array, primal: Array) -> Array:
    """``grad`` with the Explicit sharding of its primal."""
    if not mesh.regime(primal).typed:
        return grad
    return explicit.constrain(grad, jax.typeof(primal).sharding.spec)
