"""``quantize`` and ``dequantize``: between high precision and FP8 with one scale per tensor."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from te_jax import errors
from te_jax.parallel.sharding import ShardingRule
from te_jax.primitives import quantizing
from te_jax.primitives.custom_call import CustomCall
from te_jax.primitives.definition import Definition
from te_jax.primitives.quantizing import HIGH_PRECISION, QuantizeOut
from te_jax.primitives.spec import DequantizeSpec, QuantizeSpec
from te_jax.quant import reference
from te_jax.quant.format import is_fp8


def quantize(
    x: jax.Array,
    scale: jax.Array | None,
    spec: QuantizeSpec,
    *,
    group_sizes: jax.Array | None = None,
    amax_axes: tuple[str, ...] | None = None,
) -> QuantizeOut:
    """Quantizes x [*lead, C] (float32, bfloat16 or float16) in one pass over it; see :class:`QuantizeSpec`.

    Args:
      x: the tensor.
      scale: f32[]; > 0 is used, 0 asks for the scale that x's own amax gives, NaN gives NaN data. None in block
        scaling, where every block has the scale that its amax gives.
        With a scale for each group f32[groups].
      spec: which results are wanted.
      group_sizes: i32[groups], in "group" scaling only.
      amax_axes: in ``shard_map``, the mesh axes that amax is reduced over; None: those x varies over, scale doesn't.

    Raises:
      ValueError, TypeError: for a shape, memory space or dtype that is not as above.
    """
    operands = quantizing.with_scale(spec, "quantize", scale, x, group_sizes=group_sizes)
    return quantizing.to_out(spec, _QUANTIZE(spec, *operands, amax_axes=amax_axes))


def dequantize(data: jax.Array, scale_inv: jax.Array, spec: DequantizeSpec) -> jax.Array:
    """``float32(data) * scale_inv`` in ``spec.out_dtype``; data FP8 [*lead, C], scale_inv f32[]."""
    (out,) = _DEQUANTIZE(spec, data, scale_inv)
    return out


def _check_quantize(spec, x, *scale):
    quantizing.check_high_precision("quantize", "x", x)
    quantizing.check_rank("quantize", "x", x)
    errors.check_value(not spec.hp, "quantize", "hp", "False (it would be a copy of x)", spec.hp)
    quantizing.check(spec, "quantize", x.shape, *scale)


def _quantize_rule(spec, x, *scale):
    lead = quantizing.lead_factors(len(x.shape))
    return ShardingRule(
        operands=((*lead, "c"), *quantizing.scale_factors(spec)),
        results=quantizing.factors(spec, lead, "c", x.shape),
        replicated=quantizing.replicated(spec, lead, "c", x.shape),
        amax=(*lead[1:], "c") if spec.scaling == "leading" else (*lead, "c"),
        sums=lead,
    )


_QUANTIZE = CustomCall(
    Definition(
        name="quantize",
        spec_type=QuantizeSpec,
        operands=lambda spec: quantizing.operands(spec, "x"),
        check=_check_quantize,
        results=lambda spec, x, *scale: quantizing.results(spec, x.shape, x.dtype),
        reference=quantizing.finish,
        why_not=lambda spec, x, *scale: quantizing.why_not(spec, x.shape),
        rule=_quantize_rule,
        local=quantizing.local,
        workspace=lambda spec, x, *scale: quantizing.workspace_bytes(spec, x.shape),
        on_device=quantizing.on_device,
    )
)


def _check_dequantize(spec, data, scale_inv):
    errors.check_type(is_fp8(data.dtype), "dequantize", "data", "dtype float8_e4m3fn or float8_e5m2", data.dtype)
    quantizing.check_rank("dequantize", "data", data)
    quantizing.check_scalar("dequantize", "scale_inv", scale_inv)
    expected = [dtype.name for dtype in HIGH_PRECISION]
    errors.check_type(spec.out_dtype in expected, "dequantize", "out_dtype", " or ".join(expected), spec.out_dtype)


def _why_not_dequantize(spec, data, scale_inv):
    if 0 in data.shape:
        return f"shape {data.shape} has no elements"
    if data.shape[-1] % quantizing.ALIGNMENT:
        return f"last dimension {data.shape[-1]} is not a multiple of {quantizing.ALIGNMENT}"
    return None


def _dequantize_rule(spec, data, scale_inv):
    dims = tuple(f"l{i}" for i in range(len(data.shape)))
    return ShardingRule(operands=(dims, ()), results=(dims,))


_DEQUANTIZE = CustomCall(
    Definition(
        name="dequantize",
        spec_type=DequantizeSpec,
        operands=lambda spec: ("data", "scale_inv"),
        check=_check_dequantize,
        results=lambda spec, data, scale_inv: ((data.shape, np.dtype(jnp.dtype(spec.out_dtype))),),
        reference=lambda spec, data, scale_inv: (reference.dequantize(data, scale_inv, jnp.dtype(spec.out_dtype)),),
        why_not=_why_not_dequantize,
        rule=_dequantize_rule,
        local=lambda call, spec, reductions, *operands: call(spec, *operands),
    )
)
