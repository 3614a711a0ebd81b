"""Correctly rounded float32 division on every device.

XLA compiles division for GPUs to `div.full.f32`, which may be off by 2 ulp, so a scale derived there would differ from
the one that the CPU derives, and with it every FP8 value. Long division of the mantissas in integers does not.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

_HIDDEN_BIT = 1 << 23


@functools.partial(jax.jit, inline=True)  # one program where it is called outside of one
def divide(a: jax.typing.ArrayLike, b: jax.typing.ArrayLike) -> jax.Array:
    """a / b, rounded to nearest, for positive normal f32 a and b, elementwise.

    A quotient too large is inf, one below the smallest normal number is 0.
    """
    a_bits, b_bits = (jax.lax.bitcast_convert_type(jnp.asarray(x, jnp.float32), jnp.uint32) for x in (a, b))
    a_mantissa, b_mantissa = ((bits & 0x7FFFFF) | _HIDDEN_BIT for bits in (a_bits, b_bits))
    smaller = (a_mantissa < b_mantissa).astype(jnp.uint32)
    # 1 <= quotient < 2 from here on; its first bit is 1, 24 more follow, 8 at a time, as remainder * 256 < 2**32.
    remainder = (a_mantissa << smaller) - b_mantissa
    quotient = jnp.ones_like(remainder)
    for _ in range(3):
        remainder = remainder << 8
        digits = remainder // b_mantissa
        remainder = remainder - digits * b_mantissa
        quotient = (quotient << 8) | digits
    # 24 bits and the one after them, which decides: a quotient of two f32 is never halfway between two f32.
    mantissa = (quotient >> 1) - _HIDDEN_BIT + (quotient & 1)
    exponent = (a_bits >> 23).astype(jnp.int32) - (b_bits >> 23).astype(jnp.int32) - smaller.astype(jnp.int32) + 127
    exponent = exponent + (mantissa >> 23).astype(jnp.int32)  # rounded up to 2
    bits = (jnp.clip(exponent, 1, 254).astype(jnp.uint32) << 23) | (mantissa & 0x7FFFFF)
    result = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(exponent > 254, jnp.inf, jnp.where(exponent < 1, 0.0, result))


def reciprocal(scale: jax.Array) -> jax.Array:
    """1 / scale f32, rounded to nearest; NaN for a scale that is not > 0 (as the kernels have it)."""
    positive = scale > 0
    return jnp.where(positive, divide(1.0, jnp.where(positive, scale, 1.0)), jnp.nan)
