"""The tolerances hold, and are not much larger than what occurs."""

import ml_dtypes
import numpy as np
import pytest

from te_jax.testing import cases, tolerance
from te_jax.testing.compare import assert_trees_identical, assert_within

DTYPES = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}


def quantized(x, format):
    dtype, fp8_max = DTYPES[format]
    scale = np.float32(fp8_max / np.abs(x).max())
    return np.clip(x * scale, -fp8_max, fp8_max).astype(dtype).astype(np.float64) / scale, scale


@pytest.mark.parametrize("format", DTYPES)
def test_quantization_error_is_tight(format):
    x = cases.wide(np.random.default_rng(0), (100_000,))
    values, scale = quantized(x, format)
    bound = tolerance.quantization_error(x, format, scale)
    assert_within(values, x, bound)
    assert (np.abs(values - x) / bound).max() > 0.95


@pytest.mark.parametrize("k", [64, 4096])
def test_gemm_error_bounds_fp32_accumulation(k):
    rng = np.random.default_rng(1)
    a, b = cases.normal(rng, (32, k)), cases.normal(rng, (k, 32))
    out = np.zeros((32, 32), np.float32)
    for i in range(k):  # one by one: the worst order
        out += a[:, i : i + 1] * b[i]
    expected, magnitude = a.astype(np.float64) @ b, np.abs(a).astype(np.float64) @ np.abs(b)
    bound = tolerance.gemm_error(magnitude, k, expected, "float32")
    assert_within(out, expected, bound)
    assert (np.abs(out - expected) / bound).max() > 0.01


@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e4m3", "e5m2")])
def test_relative_rms_error(formats):
    rng = np.random.default_rng(2)
    a, b = cases.normal(rng, (64, 1024)), cases.normal(rng, (1024, 64))
    full = a.astype(np.float64) @ b
    error = np.linalg.norm(quantized(a, formats[0])[0] @ quantized(b, formats[1])[0] - full) / np.linalg.norm(full)
    assert 0.7 < error / tolerance.relative_rms_error(*formats) < 1.3


def test_exact_cases_survive_both_formats():
    x = cases.exact(np.random.default_rng(3), (64, 64))
    for format in DTYPES:
        values, scale = quantized(x, format)
        np.testing.assert_array_equal(values, x)
        assert np.frexp(scale)[0] == 0.5


def test_comparisons_fail_when_they_should():
    with pytest.raises(AssertionError, match=r"'a'.*bits differ in 1 of 2"):
        assert_trees_identical({"a": np.array([0.0, 1.0])}, {"a": np.array([-0.0, 1.0])})
    with pytest.raises(AssertionError, match=r"expected float32\[1\], got float64\[1\]"):
        assert_trees_identical([np.zeros(1)], [np.zeros(1, np.float32)])
    with pytest.raises(AssertionError, match=r"1 of 2 elements off; worst at \(1,\)"):
        assert_within(np.array([1.0, 2.0]), np.array([1.0, 2.5]), 0.4)
    with pytest.raises(AssertionError, match="NaN expected or not"):
        assert_within(np.array([np.nan]), np.array([1.0]), 10.0)
    assert_within(np.array([np.nan, np.inf, 1.0]), np.array([np.nan, np.inf, 1.1]), 0.2)
