"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), half-split layout as in GPT-NeoX and Llama."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from te_jax import compat
from te_jax.errors import check_value


@compat.numpy_promotion()
def apply_rotary(x: Array, positions: Array, *, base: float = 10000.0) -> Array:
    """Rotates the pair (x[..., i], x[..., D/2 + i]) by positions * base**(-2i/D).

    Args:
      x: [*lead, T, H, D], D even. Angles and rotation are fp32, the result has x's dtype.
      positions: [*lead, T] or [T], integers.
      base: > 0; the longest wavelength is about 2 pi * base positions.

    Raises:
      ValueError: odd D, positions of another shape, base <= 0.
    """
    _check(x, positions, base)
    half = x.shape[-1] // 2
    inverse_wavelength = base ** (-jnp.arange(half, dtype=jnp.float32) / half)  # [D/2]
    angle = positions[..., None, None].astype(jnp.float32) * inverse_wavelength  # [*lead, T, 1, D/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


def _check(x: Array, positions: Array, base: float) -> None:
    check_value(x.ndim >= 3 and x.shape[-1] % 2 == 0, "apply_rotary", "x", "[*lead, T, H, D] with even D", x.shape)
    check_value(base > 0, "apply_rotary", "base", "a number > 0", base)
    *lead, tokens = x.shape[:-2]
    check_positions("apply_rotary", positions, tuple(lead), tokens)


def check_positions(name: str, positions: Array, lead: tuple[int, ...], tokens: int) -> None:
    """Raises unless positions are [*lead, T] or [T] (a leading dimension may be 1): others broadcast to nonsense."""
    shape = jnp.shape(positions)
    batch = shape[:-1]
    ok = len(shape) >= 1 and shape[-1] == tokens and len(batch) in (0, len(lead))
    ok = ok and all(b in (1, n) for b, n in zip(batch, lead, strict=False))
    check_value(ok, name, "positions", f"shape {(*lead, tokens)} or {(tokens,)}", shape)
