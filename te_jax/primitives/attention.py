"""``attention`` and ``attention_grad``: softmax(q k^T) v with grouped heads; cuDNN's flash attention on CUDA.

The custom calls are XLA's own (``te_jax/primitives/cudnn.py``), so there is no handler of te_jax: on every other
platform the jnp references below run.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from te_jax import errors
from te_jax.parallel.sharding import Reductions, ShardingRule
from te_jax.primitives import cudnn
from te_jax.primitives.batching import merge_examples
from te_jax.primitives.custom_call import CustomCall
from te_jax.primitives.definition import Definition
from te_jax.primitives.spec import AttentionGradSpec, AttentionSpec

_MASKED = -1e30  # finite: a row without any key to attend to (none with a causal mask) would be NaN


def attention(q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec) -> tuple[jax.Array, jax.Array | None]:
    """out = softmax(spec.scale * q k^T) v, each query head with the keys and values of its group.

    Args:
      q: [*lead, T, G, R, D], bfloat16 or float16: R query heads for each of G groups.
      k, v: [*lead, S, G, D], q's dtype.
      spec: whether position t sees positions <= t only, the scale, and whether the statistics are wanted.

    Returns:
      out, as q; and f32[*lead, G, R, T], the logarithm of the softmax's denominator, if ``spec.stats``, otherwise None.
    """
    out, *stats = _ATTENTION(spec, q, k, v, amax_axes=())
    return out, stats[0] if stats else None


def attention_grad(
    q: jax.Array, k: jax.Array, v: jax.Array, stats: jax.Array, out: jax.Array, dout: jax.Array, spec: AttentionGradSpec
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The cotangents of q, k and v, given that of ``attention``'s out; stats and out are its results."""
    return _ATTENTION_GRAD(spec, q, k, v, stats, out, dout, amax_axes=())


def _check(spec, q, k, v, *rest):
    name = "attention_grad" if rest else "attention"
    errors.check_value(q.ndim >= 4, name, "q", "[*lead, T, G, R, D]", q.shape)
    errors.check_type(q.dtype in (jnp.bfloat16, jnp.float16), name, "q", "dtype bfloat16 or float16", q.dtype)
    *lead, t, groups, ratio, head_dim = q.shape
    expected = (*lead, *k.shape[len(lead) : len(lead) + 1], groups, head_dim)
    shapes = {"k": (k, expected), "v": (v, expected)}
    if rest:
        stats, out, dout = rest
        errors.check_type(stats.dtype == jnp.float32, name, "stats", "dtype float32", stats.dtype)
        errors.check_value(
            stats.shape == (*lead, groups, ratio, t), name, "stats", f"shape {(*lead, groups, ratio, t)}", stats.shape
        )
        shapes |= {"out": (out, q.shape), "dout": (dout, q.shape)}
    for operand, (aval, shape) in shapes.items():
        errors.check_value(aval.shape == shape, name, operand, f"shape {shape}", aval.shape)
        errors.check_type(aval.dtype == q.dtype, name, operand, f"q's dtype {q.dtype}", aval.dtype)


def _probabilities(spec, q, k, stats=None):
    """(softmax [*lead, G, R, T, S] in f32, its statistics [*lead, G, R, T])."""
    logits = jnp.einsum("...tgrd,...sgd->...grts", q, k, preferred_element_type=jnp.float32) * jnp.float32(spec.scale)
    if spec.causal:
        seen = jnp.arange(q.shape[-4])[:, None] >= jnp.arange(k.shape[-3])
        logits = jnp.where(seen, logits, _MASKED)
    if stats is None:
        stats = jax.nn.logsumexp(logits, axis=-1)
    return jnp.exp(logits - stats[..., None]), stats


def _reference(spec, q, k, v):
    p, stats = _probabilities(spec, q, k)
    out = jnp.einsum("...grts,...sgd->...tgrd", p.astype(q.dtype), v, preferred_element_type=jnp.float32)
    return (out.astype(q.dtype), stats)[: 1 + spec.stats]


def _reference_grad(spec, q, k, v, stats, out, dout):
    """With z = scale q k^T, p = softmax(z): dv = p^T dout, dz = p (dout v^T - sum(dout out)), dq = scale dz k, .."""

    def product(subscripts, a, b):
        return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)

    p, _ = _probabilities(spec, q, k, stats)
    dv = product("...grts,...tgrd->...sgd", p.astype(q.dtype), dout)
    dp = product("...tgrd,...sgd->...grts", dout, v)
    delta = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)  # [*lead, T, G, R]
    dz = (p * (dp - jnp.moveaxis(delta, -3, -1)[..., None]) * jnp.float32(spec.scale)).astype(q.dtype)
    dq, dk = product("...grts,...sgd->...tgrd", dz, k), product("...grts,...tgrd->...sgd", dz, q)
    return dq.astype(q.dtype), dk.astype(q.dtype), dv.astype(q.dtype)


def _factors(lead: int):
    batch = tuple(f"l{i}" for i in range(lead))
    return (*batch, "t", "g", "r", "d"), (*batch, "s", "g", "d"), (*batch, "g", "r", "t")


def _rule(spec, q, *rest):
    """Batch and heads may be split: a shard then has all it needs, but for the sums of dk and dv over a split group."""
    q_factors, k_factors, stats = _factors(len(q.shape) - 4)
    grad = isinstance(spec, AttentionGradSpec)
    return ShardingRule(
        operands=(q_factors, k_factors, k_factors, *((stats, q_factors, q_factors) if grad else ())),
        results=(q_factors, k_factors, k_factors) if grad else (q_factors, stats)[: 1 + spec.stats],
        replicated=("t", "d", "s"),  # in the order in which factors appear: Shardy wants that
        sums=("r",),
    )


def _local(call, spec, reductions: Reductions, *operands: jax.Array):
    results = call(spec, *operands)
    if isinstance(spec, AttentionGradSpec) and reductions.sums:
        dq, *dkv = results
        return dq, *(jax.lax.psum(x, reductions.sums) for x in dkv)
    return results


def _cuda(spec, q, k, v, *rest):
    """cuDNN knows one batch dimension, and query heads in one."""
    *lead, t, groups, ratio, head_dim = q.shape
    batch, heads = math.prod(lead), groups * ratio
    q, *out = (x.reshape(batch, t, heads, head_dim) for x in (q, *rest[1:]))
    k, v = (x.reshape(batch, *x.shape[-3:]) for x in (k, v))
    if rest:
        stats = rest[0].reshape(batch, heads, t)
        dq, dk, dv = cudnn.flash_attention_grad(q, k, v, stats, *out, causal=spec.causal, scale=spec.scale)
        return dq.reshape(*lead, t, groups, ratio, head_dim), *(x.reshape(*lead, *x.shape[1:]) for x in (dk, dv))
    out, *stats = cudnn.flash_attention(q, k, v, causal=spec.causal, scale=spec.scale, stats=spec.stats)
    out = out.reshape(*lead, t, groups, ratio, head_dim)
    return out, *(x.reshape(*lead, groups, ratio, t) for x in stats)


def _why_not(spec, q, k, *rest):
    return cudnn.why_not_flash_attention(q.dtype, q.shape[-1], math.prod(q.shape), (q.shape[-4], k.shape[-3]))


def _results(spec: AttentionSpec, q, *rest) -> tuple:
    stats = ((*q.shape[:-4], *q.shape[-3:-1], q.shape[-4]), np.dtype(np.float32))
    return ((q.shape, q.dtype), stats)[: 1 + spec.stats]


_ATTENTION = CustomCall(
    Definition(
        name="attention",
        spec_type=AttentionSpec,
        operands=lambda spec: ("q", "k", "v"),
        check=_check,
        results=_results,
        reference=_reference,
        why_not=_why_not,
        rule=_rule,
        local=_local,
        examples=merge_examples,
        library_call=_cuda,
    )
)
_ATTENTION_GRAD = CustomCall(
    Definition(
        name="attention_grad",
        spec_type=AttentionGradSpec,
        operands=lambda spec: ("q", "k", "v", "stats", "out", "dout"),
        check=_check,
        results=lambda spec, q, k, v, *rest: tuple((x.shape, x.dtype) for x in (q, k, v)),
        reference=_reference_grad,
        why_not=_why_not,
        rule=_rule,
        local=_local,
        examples=merge_examples,
        library_call=_cuda,
    )
)
