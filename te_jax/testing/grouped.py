"""References in fp64 NumPy for tensors whose rows are in groups, and sizes of groups to try them with."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from te_jax.testing import oracle

ROWS = 37
SIZES = {
    "ragged": (5, 0, 17, 9),  # 31 of 37 rows
    "all rows": (16, 1, 0, 20),
    "one group": (0, 0, 37, 0),
    "none": (0, 0, 0, 0),
}


def skewed(groups: int, rows: int, seed: int = 0) -> np.ndarray:
    """i32[groups]: sizes that add up to ``rows``, a few groups with most of them and some empty ones (Zipf's law)."""
    weights = 1.0 / np.arange(1, groups + 1)
    np.random.default_rng(seed).shuffle(weights)
    sizes = np.floor(weights / weights.sum() * rows).astype(np.int32)
    sizes[np.argsort(sizes)[: groups // 8]] = 0
    sizes[np.argmax(sizes)] += rows - sizes.sum()
    return sizes


def rows_of(sizes) -> Iterator[slice]:
    """The rows of every group."""
    start = 0
    for size in np.asarray(sizes):
        yield slice(start, start + int(size))
        start += int(size)


def rows_product(lhs, rhs, sizes) -> np.ndarray:
    """[T, N] in fp64: the rows of each group of lhs [T, K] times rhs[g] [K, N]; 0 in the rows of none."""
    lhs, rhs = oracle.f64(lhs), oracle.f64(rhs)
    out = np.zeros((lhs.shape[0], rhs.shape[-1]))
    for g, rows in enumerate(rows_of(sizes)):
        out[rows] = lhs[rows] @ rhs[g]
    return out


def contracted_product(lhs, rhs, sizes) -> np.ndarray:
    """[G, M, N] in fp64: the product of the rows of each group of lhs [T, M] and rhs [T, N]."""
    lhs, rhs = oracle.f64(lhs), oracle.f64(rhs)
    return np.stack([lhs[rows].T @ rhs[rows] for rows in rows_of(sizes)])


def quantize(y, sizes, scale, format: str, *, margin: int = 0, power_of_two: bool = False) -> dict[str, np.ndarray]:
    """data (codes), data_t (codes), scale, scale_inv and amax of y [T, C] quantized by group."""
    y = np.asarray(y).astype(np.float32)
    data, used, amaxes = np.zeros(y.shape, np.uint8), [], []
    for g, rows in enumerate(rows_of(sizes)):
        amax = np.float32(np.abs(y[rows]).max(initial=0))
        s = np.float32(scale[g] or oracle.scale_from_amax(float(amax), oracle.MAX[format], margin, power_of_two))
        data[rows] = oracle.cast(y[rows], float(s), format)
        used.append(s)
        amaxes.append(amax)
    used = np.array(used, np.float32)
    padded = np.pad(data.T, ((0, 0), (0, -len(y) % 16)))
    return {"data": data, "data_t": padded, "scale": used, "scale_inv": np.float32(1) / used, "amax": np.array(amaxes)}


def dequantize(data, scale_inv, sizes) -> np.ndarray:
    """[T, C] in fp64 of FP8 data and the scale of each group."""
    values = np.asarray(data).astype(np.float64)
    for g, rows in enumerate(rows_of(sizes)):
        values[rows] *= float(np.asarray(scale_inv)[g])
    return values


FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
