"""``norm``: RMSNorm or LayerNorm over the last dimension, ending in a quantizing pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from te_jax import errors
from te_jax.parallel.sharding import ShardingRule
from te_jax.primitives import quantizing
from te_jax.primitives.custom_call import CustomCall
from te_jax.primitives.definition import Definition
from te_jax.primitives.quantizing import QuantizeOut
from te_jax.primitives.spec import NORMS, NormSpec


def norm(
    x: jax.Array,
    gamma: jax.Array,
    beta: jax.Array | None,
    scale: jax.Array | None,
    spec: NormSpec,
    *,
    amax_axes: tuple[str, ...] | None = None,
) -> QuantizeOut:
    """Normalizes x [*lead, C] over C, in fp32; y is rounded to x's dtype and goes through the quantizing pass.

    rmsnorm:   y = x * rstd * gamma,                rstd = 1 / sqrt(mean(x^2) + epsilon)
    layernorm: y = (x - mean) * rstd * gamma + beta, rstd = 1 / sqrt(var(x) + epsilon)

    Args:
      x: float32, bfloat16 or float16.
      gamma: [C], one of the same dtypes; ``1 + gamma`` is used if ``spec.zero_centered_gamma``.
      beta: [C], gamma's dtype; None for rmsnorm.
      scale: f32[], as for ``quantize``; ignored unless quantized results are wanted.
      spec: which results are wanted.
      amax_axes: as for ``quantize``.
    """
    expected = "an array" if spec.kind == "layernorm" else "None"
    got = "None" if beta is None else "an array"
    errors.check_value(expected == got, "norm", "beta", f"{expected} for {spec.kind}", got)
    tensors = (x, gamma) if beta is None else (x, gamma, beta)
    operands = quantizing.with_scale(spec, "norm", scale, *tensors)
    return quantizing.to_out(spec, _NORM(spec, *operands, amax_axes=amax_axes), _stats(spec))


def _stats(spec) -> tuple[str, ...]:
    if not spec.stats:
        return ()
    return ("mean", "rstd") if spec.kind == "layernorm" else ("rstd",)


def _operands(spec) -> tuple[str, ...]:
    return quantizing.operands(spec, *_tensors(spec))


def _tensors(spec) -> tuple[str, ...]:
    return ("x", "gamma", "beta") if spec.kind == "layernorm" else ("x", "gamma")


def _split(spec, rest) -> tuple[tuple, tuple]:
    """(beta or nothing, scale or nothing): the operands after gamma."""
    count = len(_tensors(spec)) - 2
    return tuple(rest[:count]), tuple(rest[count:])


def _check(spec, x, gamma, *rest):
    errors.check_value(spec.kind in NORMS, "norm", "kind", " or ".join(NORMS), spec.kind)
    quantizing.check_high_precision("norm", "x", x)
    quantizing.check_rank("norm", "x", x)
    quantizing.check_high_precision("norm", "gamma", gamma)
    errors.check_value(gamma.shape == x.shape[-1:], "norm", "gamma", f"shape {x.shape[-1:]}", gamma.shape)
    betas, scale = _split(spec, rest)
    for beta in betas:
        errors.check_type(beta.dtype == gamma.dtype, "norm", "beta", f"gamma's dtype {gamma.dtype}", beta.dtype)
        errors.check_value(beta.shape == gamma.shape, "norm", "beta", f"shape {gamma.shape}", beta.shape)
    quantizing.check(spec, "norm", x.shape, *scale)


def _results(spec, x, *rest):
    stats = ((x.shape[:-1], np.dtype(np.float32)),) * len(_stats(spec))
    return quantizing.results(spec, x.shape, x.dtype) + stats


def _reference(spec, x, gamma, *rest):
    beta, scale = _split(spec, rest)
    wide = x.astype(jnp.float32)
    gamma = gamma.astype(jnp.float32) + spec.zero_centered_gamma
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    centered = wide - mean if spec.kind == "layernorm" else wide
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + jnp.float32(spec.epsilon))
    y = centered * rstd * gamma
    if beta:
        y = y + beta[0].astype(jnp.float32)
    known = {"mean": mean[..., 0], "rstd": rstd[..., 0]}
    return quantizing.finish(spec, y.astype(x.dtype), *scale) + tuple(known[name] for name in _stats(spec))


def _rule(spec, x, *rest):
    lead = quantizing.lead_factors(len(x.shape))
    return ShardingRule(
        operands=((*lead, "c"), *(("c",),) * (len(_tensors(spec)) - 1), *quantizing.scale_factors(spec)),
        results=quantizing.factors(spec, lead, "c", x.shape) + (lead,) * len(_stats(spec)),
        replicated=tuple({"c": None} | dict.fromkeys(quantizing.replicated(spec, lead, "c", x.shape))),
        amax=lead,
        sums=lead,
    )


_NORM = CustomCall(
    Definition(
        name="norm",
        spec_type=NormSpec,
        operands=_operands,
        check=_check,
        results=_results,
        reference=_reference,
        why_not=lambda spec, x, *rest: quantizing.why_not(spec, x.shape),
        rule=_rule,
        local=quantizing.local,
        workspace=lambda spec, x, *rest: quantizing.workspace_bytes(spec, x.shape, norm=True),
    )
)
