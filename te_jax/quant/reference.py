"""What per-tensor FP8 quantization means, in jnp: the oracle of the custom calls, and what runs where they can't.

Everything is computed in fp32 whatever the dtype of the input. Elementwise results (``cast``, ``quantize``,
``dequantize``, scales, amax) are what the C++ and CUDA kernels give bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from te_jax.quant.division import divide, reciprocal
from te_jax.quant.format import MAX_SCALE, NAN_CODE, Format, format_of, is_fp8


def scale_from_amax(amax, fp8_max, *, margin: int = 0, power_of_two: bool = False) -> jax.Array:
    """The scale f32 that maps ``amax`` f32 (any shape) onto ``fp8_max``.

    ``(fp8_max / amax) * 2**-margin``, at most ``MAX_SCALE``, floored to a power of two if asked; 1 where amax is 0,
    infinite or NaN (a tensor without a usable range is not rescaled).
    """
    amax = jnp.asarray(amax, jnp.float32)
    usable = (amax > 0) & (amax < jnp.inf)
    # A subnormal amax gives the largest scale, like the smallest normal one.
    divisor = jnp.where(usable, jnp.maximum(amax, np.finfo(np.float32).tiny), 1)
    scale = jnp.minimum(divide(fp8_max, divisor) * jnp.float32(2.0**-margin), jnp.float32(MAX_SCALE))
    if power_of_two:
        # Clearing the mantissa is the exact floor; log2 and exp2 are not exact.
        bits = jax.lax.bitcast_convert_type(scale, jnp.int32) & np.int32(0x7F800000)
        scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(usable, scale, jnp.float32(1))


def cast(y: jax.Array, scale: jax.Array, format: Format | str) -> jax.Array:
    """FP8 of ``y * scale``: saturating, round to nearest even; NaN where y is not finite or the scale is NaN."""
    fmt = format_of(format)
    y = y.astype(jnp.float32)
    scaled = y * scale
    # Clamp before the conversion: float8_e4m3fn has no infinity and turns anything above 464 into NaN.
    codes = jnp.clip(scaled, -fmt.max, fmt.max).astype(fmt.dtype)
    nan = np.array(NAN_CODE, np.uint8).view(fmt.dtype)[()]  # a constant: jax_debug_nans would stop at a computed one
    return jnp.where(jnp.isfinite(y) & ~jnp.isnan(scaled), codes, nan)


def amax(y: jax.Array, axes: int | tuple[int, ...] | None = None) -> jax.Array:
    """max |y| over ``axes`` (all) as f32; NaN if y holds a NaN, 0 if y is empty.

    Taken on the bits, whose order is that of the magnitudes with NaN on top: XLA's maximum on CPUs (0.10 to 0.12) loses
    NaNs of float32 tensors beyond some size.
    """
    bits = jax.lax.bitcast_convert_type(y.astype(jnp.float32), jnp.int32) & np.int32(0x7FFFFFFF)
    return jax.lax.bitcast_convert_type(jnp.max(bits, axes, initial=np.int32(0)), jnp.float32)


class Quantized(NamedTuple):
    """Result of :func:`quantize`: FP8 data (shape of y), and f32[] scale, scale_inv and amax."""

    data: jax.Array
    scale: jax.Array
    scale_inv: jax.Array
    amax: jax.Array


def quantize(
    y: jax.Array, scale: jax.Array, format: Format | str, *, margin: int = 0, power_of_two: bool = False
) -> Quantized:
    """Quantizes y, of any shape, with ``scale`` f32[]; a scale of 0 is replaced by the one that y's amax gives."""
    fmt = format_of(format)
    y_amax = amax(y)
    seeded = scale_from_amax(y_amax, fmt.max, margin=margin, power_of_two=power_of_two)
    used = jnp.where(scale == 0, seeded, scale)
    return Quantized(cast(y, used, fmt), used, reciprocal(used), y_amax)


def dequantize(data: jax.Array, scale_inv: jax.Array, dtype) -> jax.Array:
    """``float32(data) * scale_inv``, rounded to ``dtype``. ``scale_inv`` f32[]."""
    return (data.astype(jnp.float32) * scale_inv).astype(dtype)


def gemm(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    contract_dims: int = 1,
    lhs_contract_first: bool = False,
    rhs_contract_first: bool = False,
    scale: jax.Array | float = 1.0,
) -> jax.Array:
    """f32 [*L, *R] = scale * (lhs [*L, *C] . rhs [*R, *C]), accumulated in fp32.

    ``contract_dims`` dimensions *C are contracted; they come last, or first where ``*_contract_first`` says so.
    """
    contracted = (
        _contracted(lhs.ndim, contract_dims, lhs_contract_first),
        _contracted(rhs.ndim, contract_dims, rhs_contract_first),
    )
    # FP8 values are exact in bf16 and their products exact in fp32, so only the order of the sum is left open.
    lhs, rhs = (x.astype(jnp.bfloat16) if is_fp8(x.dtype) else x for x in (lhs, rhs))
    product = jax.lax.dot_general(
        lhs,
        rhs,
        (contracted, ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return product * scale


def _contracted(ndim: int, count: int, first: bool) -> tuple[int, ...]:
    return tuple(range(count)) if first else tuple(range(ndim - count, ndim))
