"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), half-split layout as in GPT-NeoX and Llama."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def apply_rotary(x: Array, positions: Array, *, base: float = 10000.0) -> Array:
    """Rotates the pair (x[..., i], x[..., D/2 + i]) by positions * base**(-2i/D).

    Args:
      x: [*lead, T, H, D], D even. Angles and rotation are fp32, the result has x's dtype.
      positions: [*lead, T] or [T], integers.
      base: the longest wavelength is about 2 pi * base positions.
    """
    half = x.shape[-1] // 2
    inverse_wavelength = base ** (-jnp.arange(half, dtype=jnp.float32) / half)  # [D/2]
    angle = positions[..., None, None].astype(jnp.float32) * inverse_wavelength  # [*lead, T, 1, D/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)
