"""Inputs for tests and benchmarks."""

from __future__ import annotations

import numpy as np

EXACT_LIMIT = 7
"""Largest magnitude of `exact`: 448 and 57344 are 7 times a power of two."""


def exact(rng: np.random.Generator, shape: tuple[int, ...], dtype=np.float32) -> np.ndarray:
    """Integers from -7 to 7, with a 7: quantizing them with a scale derived from their amax loses nothing.

    Their amax is 7, so fp8_max / amax is a power of two in both formats (64 and 8192), and every integer up to 7 has at
    most 3 significant bits, as many as E5M2 holds. Sums of products of two such tensors are exact in fp32 in any order
    as long as the contraction is shorter than 2**24 / 49 = 342392. So a GEMM must equal fp64 exactly.
    """
    x = rng.integers(-EXACT_LIMIT, EXACT_LIMIT, shape, endpoint=True).astype(np.float32)
    if x.size:
        x.flat[0] = EXACT_LIMIT
    return x.astype(dtype)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype=np.float32, scale: float = 1.0) -> np.ndarray:
    """Gaussian values with standard deviation `scale`."""
    return (rng.standard_normal(shape) * scale).astype(dtype)


def wide(rng: np.random.Generator, shape: tuple[int, ...], dtype=np.float32, octaves: float = 12.0) -> np.ndarray:
    """Random signs, magnitudes over many octaves: subnormals and underflow occur once scaled to FP8."""
    magnitude = np.exp2(rng.uniform(-octaves, octaves, shape))
    return (magnitude * rng.choice([-1.0, 1.0], shape)).astype(dtype)


SPECIALS = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 1e-38, 3e38, -3e38, 464.0, 448.1], np.float32)
"""Values that quantizers get wrong: signed zeros, infinities, NaN, subnormals, near overflow, E4M3's NaN limit."""
