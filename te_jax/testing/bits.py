"""Comparing arrays to the last bit, and references in fp64."""

from __future__ import annotations

import ml_dtypes
import numpy as np

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits(x) -> np.ndarray:
    """The bits of a floating point array, with one pattern for all NaNs (their payload means nothing)."""
    x = np.asarray(x)
    pattern = x.view(_UNSIGNED[x.dtype.itemsize]).copy()
    pattern[np.isnan(x.astype(np.float64))] = np.iinfo(pattern.dtype).max
    return pattern


def assert_same_bits(actual, expected, what: str = "") -> None:
    """Same dtype, shape and bits; any NaN equals any other, and 0 is not -0."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype} instead of {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape} instead of {expected.shape}"
    wrong = np.argwhere(np.atleast_1d(bits(actual) != bits(expected)))
    if len(wrong):
        at = tuple(wrong[0])
        got, want = np.atleast_1d(actual)[at], np.atleast_1d(expected)[at]
        raise AssertionError(f"{what}: {len(wrong)} of {actual.size} differ; at {at} got {got!r}, expected {want!r}")


def quantize_fp64(y: np.ndarray, scale: float, dtype) -> np.ndarray:
    """cast(clamp(fp32(y) * scale)) with numpy and ml_dtypes; NaN where y is not finite."""
    limit = float(ml_dtypes.finfo(dtype).max)
    with np.errstate(over="ignore", invalid="ignore"):
        product = y.astype(np.float32) * np.float32(scale)
    product = np.where(np.isfinite(y.astype(np.float32)), np.clip(product, -limit, limit), np.float32(np.nan))
    return product.astype(dtype)
