"""``norm_grad``: the gradients of RMSNorm and LayerNorm, summed with the gradient of a residual around the norm."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from te_jax import errors
from te_jax.parallel.sharding import ShardingRule
from te_jax.primitives import quantizing
from te_jax.primitives.custom_call import CustomCall
from te_jax.primitives.definition import Definition
from te_jax.primitives.spec import NORMS, NormGradSpec

_MAX_BLOCKS, _MAX_ROW_COLS = 160, 8192  # kMaxBlocks and kMaxRowCols in csrc/kernels/norm_grad.cu


class NormGradOut(NamedTuple):
    """dx [*lead, C] in x's dtype; dgamma f32[C]; dbeta f32[C], None for rmsnorm."""

    dx: jax.Array
    dgamma: jax.Array
    dbeta: jax.Array | None = None


def norm_grad(
    dy: jax.Array,
    x: jax.Array,
    gamma: jax.Array,
    mean: jax.Array | None,
    rstd: jax.Array,
    spec: NormGradSpec,
    *,
    dres: jax.Array | None = None,
) -> NormGradOut:
    """The cotangents of x, gamma and beta for ``norm``'s result, given its statistics; computed in fp32, rounded once.

    With x^ = (x - mean) rstd, g = dy gamma, and means over C (mean 0 and no mean(g) for rmsnorm):

      dx = rstd (g - x^ mean(g x^) - mean(g)) + dres    dgamma = sum dy x^    dbeta = sum dy

    In ``shard_map`` dgamma and dbeta are the sums of one device's part.

    Args:
      dy: [*lead, C], the cotangent of the norm's result; float32, bfloat16 or float16.
      x: [*lead, C], what the norm was applied to, in dy's dtype.
      gamma: [C], one of the same dtypes; ``1 + gamma`` is used if ``spec.zero_centered_gamma``.
      mean: f32[*lead]; None for rmsnorm.
      rstd: f32[*lead].
      spec: kind of norm, and whether there is a residual.
      dres: [*lead, C] in dy's dtype: the cotangent that reaches x past the norm; with ``spec.residual`` only.
    """
    given = {"dy": dy, "x": x, "gamma": gamma, "mean": mean, "rstd": rstd, "dres": dres}
    wanted = _operands(spec)
    for name, operand in given.items():
        expected = "an array" if name in wanted else "None"
        got = "None" if operand is None else "an array"
        errors.check_value(expected == got, "norm_grad", name, f"{expected} for this spec", got)
    operands = tuple(operand for operand in given.values() if operand is not None)
    return NormGradOut(*_NORM_GRAD(spec, *operands, amax_axes=()))


def norm_grad_reference(
    dy: jax.Array,
    x: jax.Array,
    gamma: jax.Array,
    mean: jax.Array | None,
    rstd: jax.Array,
    spec: NormGradSpec,
    *,
    dres: jax.Array | None = None,
) -> NormGradOut:
    """The same in jnp, unchecked: the oracle, and differentiable itself."""
    dy, x_hat, rstd = dy.astype(jnp.float32), x.astype(jnp.float32), rstd[..., None]
    if mean is not None:
        x_hat = x_hat - mean[..., None]
    x_hat = x_hat * rstd
    g = dy * (gamma.astype(jnp.float32) + spec.zero_centered_gamma)
    dx = g - x_hat * jnp.mean(g * x_hat, axis=-1, keepdims=True)
    if mean is not None:
        dx = dx - jnp.mean(g, axis=-1, keepdims=True)
    dx = dx * rstd
    if dres is not None:
        dx = dx + dres.astype(jnp.float32)
    lead = tuple(range(dy.ndim - 1))
    dbeta = None if mean is None else jnp.sum(dy, axis=lead)
    return NormGradOut(dx.astype(x.dtype), jnp.sum(dy * x_hat, axis=lead), dbeta)


def _operands(spec) -> tuple[str, ...]:
    wanted = {"dy": True, "x": True, "gamma": True, "mean": spec.kind == "layernorm", "rstd": True}
    wanted |= {"dres": spec.residual}
    return tuple(name for name, want in wanted.items() if want)


def _check(spec, dy, x, gamma, *rest):
    errors.check_value(spec.kind in NORMS, "norm_grad", "kind", " or ".join(NORMS), spec.kind)
    quantizing.check_high_precision("norm_grad", "dy", dy)
    quantizing.check_rank("norm_grad", "dy", dy)
    quantizing.check_high_precision("norm_grad", "gamma", gamma)
    errors.check_value(gamma.shape == dy.shape[-1:], "norm_grad", "gamma", f"shape {dy.shape[-1:]}", gamma.shape)
    rest = dict(zip(_operands(spec)[3:], rest, strict=True))
    for name, operand in {"x": x, **rest}.items():
        dtype, shape = (jnp.float32, dy.shape[:-1]) if name in ("mean", "rstd") else (dy.dtype, dy.shape)
        of_dy = "" if name in ("mean", "rstd") else "dy's "
        expected = f"{of_dy}dtype {np.dtype(dtype).name}"
        errors.check_type(operand.dtype == dtype, "norm_grad", name, expected, operand.dtype)
        errors.check_value(operand.shape == shape, "norm_grad", name, f"shape {shape}", operand.shape)


def _results(spec, dy, *rest):
    columns = (dy.shape[-1:], np.dtype(np.float32))
    return ((dy.shape, dy.dtype), *(columns,) * (2 if spec.kind == "layernorm" else 1))


def _reference(spec, dy, x, gamma, *rest):
    rest = dict(zip(_operands(spec)[3:], rest, strict=True))
    out = norm_grad_reference(dy, x, gamma, rest.get("mean"), rest["rstd"], spec, dres=rest.get("dres"))
    return tuple(result for result in out if result is not None)


def _rule(spec, dy, *rest):
    lead = quantizing.lead_factors(len(dy.shape))
    known = {"gamma": ("c",), "mean": lead, "rstd": lead}
    return ShardingRule(
        operands=tuple(known.get(name, (*lead, "c")) for name in _operands(spec)),
        results=((*lead, "c"), *(("c",),) * (2 if spec.kind == "layernorm" else 1)),
        replicated=("c",),
        sums=lead,
    )


def _local(call, spec, reductions, *operands):
    dx, *sums = call(spec, *operands)
    if reductions.sums:
        sums = [jax.lax.psum(s, reductions.sums) for s in sums]
    return (dx, *sums)


def _why_not(spec, dy, *rest):
    rows, cols = math.prod(dy.shape[:-1]), dy.shape[-1]
    if rows == 0 or cols == 0:
        return f"shape {dy.shape} has no elements"
    if cols % quantizing.ALIGNMENT:
        return f"last dimension {cols} is not a multiple of {quantizing.ALIGNMENT}"
    return None


def _workspace(spec, dy, *rest):
    """``NormGradWorkspaceBytes`` in csrc/kernels/norm_grad.cu: the blocks' column sums; two means a wide row."""
    rows, cols = math.prod(dy.shape[:-1]), dy.shape[-1]
    planes = 2 if spec.kind == "layernorm" else 1
    return 4 * (_MAX_BLOCKS * planes * cols + (2 * rows if cols > _MAX_ROW_COLS else 0))


_NORM_GRAD = CustomCall(
    Definition(
        name="norm_grad",
        spec_type=NormGradSpec,
        operands=_operands,
        check=_check,
        results=_results,
        reference=_reference,
        why_not=_why_not,
        rule=_rule,
        local=_local,
        workspace=_workspace,
    )
)
