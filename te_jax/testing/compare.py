"""Comparisons that say where and by how much."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def assert_trees_identical(actual: Any, expected: Any) -> None:
    """Same structure, dtypes, shapes and bits (so NaN equals the same NaN, and 0 is not -0)."""
    actual_leaves, actual_def = jax.tree_util.tree_flatten_with_path(actual)
    expected_leaves, expected_def = jax.tree_util.tree_flatten_with_path(expected)
    assert actual_def == expected_def, f"tree structure: expected {expected_def}, got {actual_def}"
    wrong = []
    for (path, a), (_, e) in zip(actual_leaves, expected_leaves, strict=True):
        a, e = np.asarray(a), np.asarray(e)
        name = jax.tree_util.keystr(path)
        if (a.dtype, a.shape) != (e.dtype, e.shape):
            wrong.append(f"{name}: expected {e.dtype}{list(e.shape)}, got {a.dtype}{list(a.shape)}")
        elif a.tobytes() != e.tobytes():
            a_bytes, e_bytes = (np.frombuffer(x.tobytes(), np.uint8).reshape(x.size, -1) for x in (a, e))
            wrong.append(f"{name}: bits differ in {int((a_bytes != e_bytes).any(-1).sum())} of {a.size} elements")
    assert not wrong, "\n".join(wrong)


def assert_within(actual: Any, expected: np.ndarray, error: np.ndarray | float, what: str = "values") -> None:
    """|actual - expected| <= error, elementwise in fp64; NaN only where expected. Reports the worst element.

    Args:
      error: the bound of each element, from `te_jax.testing.tolerance`.
    """
    actual = np.asarray(actual).astype(np.float64)
    expected = np.asarray(expected).astype(np.float64)
    assert actual.shape == expected.shape, f"{what}: shape: expected {expected.shape}, got {actual.shape}"
    nan = np.isnan(expected)
    wrong = np.argwhere(np.isnan(actual) != nan)
    assert not wrong.size, f"{what}: NaN expected or not expected at {wrong[:5].tolist()}"
    same = (actual == expected) | nan  # infinities
    with np.errstate(invalid="ignore"):
        excess = np.where(same, 0.0, np.abs(actual - expected) / np.maximum(error, np.finfo(np.float64).tiny))
    if excess.size and not excess.max() <= 1:
        at = np.unravel_index(np.argmax(excess), excess.shape)
        bound = np.broadcast_to(error, excess.shape)[at]
        raise AssertionError(
            f"{what}: {int((excess > 1).sum())} of {excess.size} elements off; worst at {tuple(map(int, at))}: "
            f"expected {expected[at]!r} within {bound:.3g}, got {actual[at]!r}"
        )
