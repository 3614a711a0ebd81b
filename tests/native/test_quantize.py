"""te_jax_quantize and te_jax_dequantize on CPU against ml_dtypes, bit for bit."""

import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest
from handlers import F32, FP8, FP8_MAX, call, check_quantized, codes, everything, results_of

from te_jax.primitives.spec import DequantizeSpec, QuantizeSpec

DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16]
FORMATS = ["e4m3", "e5m2"]


def quantize(spec, x, scale):
    return call("quantize", spec, results_of(spec, x.dtype, x.shape), x, np.float32(scale))


def randn(shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e4])
def test_everything(dtype, fmt, scale):
    spec = everything(QuantizeSpec, fmt)
    x = randn((3, 16, 80), dtype)
    check_quantized(spec, x, scale, quantize(spec, x, scale))


@pytest.mark.parametrize("wanted", ["data", "data_t", "amax", "dbias"])
def test_one_result_alone(wanted):
    none = dict.fromkeys(("data", "data_t", "amax", "dbias"), False)
    spec = QuantizeSpec(format="e4m3", **(none | {wanted: True}))
    x = randn((48, 32))
    check_quantized(spec, x, 0.0, quantize(spec, x, 0.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dbias_is_rounded_once_to_the_dtype_asked_for(dtype):
    spec = QuantizeSpec(format="e5m2", dbias=True, dbias_dtype=np.dtype(dtype).name)
    x = randn((48, 32), ml_dtypes.bfloat16)
    results = [*results_of(dataclasses.replace(spec, dbias=False), x.dtype, x.shape), ((32,), np.dtype(dtype))]
    dbias = call("quantize", spec, results, x, np.float32(2))[-1]
    want = x.astype(np.float64).sum(0).astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(dbias.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_float16_value_and_every_rounding_tie(fmt):
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    spec = QuantizeSpec(format=fmt)
    data, *_ = quantize(spec, every.reshape(256, 256), 1.0)
    clamped = np.clip(every.astype(np.float32), -FP8_MAX[fmt], FP8_MAX[fmt])
    want = np.where(np.isfinite(every), clamped, np.nan).astype(FP8[fmt])
    np.testing.assert_array_equal(codes(data).ravel(), codes(want))


@pytest.mark.parametrize("margin", [0, 3, -2])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_seeded_scale(margin, power_of_two):
    spec = everything(QuantizeSpec, "e5m2", margin=margin, power_of_two=power_of_two)
    x = randn((16, 16)) * 7.3
    check_quantized(spec, x, 0.0, quantize(spec, x, 0.0))


@pytest.mark.parametrize("value", [0.0, np.inf, np.nan, 1e-37, 1e-42])
def test_amax_without_a_scale(value):
    """amax 0, inf and NaN give scale 1; a tiny one the largest scale there is. Subnormals count."""
    spec = everything(QuantizeSpec, "e4m3")
    x = np.zeros((16, 16), np.float32)
    x[3, 5] = value
    outs = quantize(spec, x, 0.0)
    check_quantized(spec, x, 0.0, outs)
    assert outs[2] == (2.0**126 if 0 < value < 1 else 1.0)


def test_nan_scale_is_loud():
    data, scale, scale_inv = quantize(QuantizeSpec(format="e4m3"), randn((2, 16)), np.nan)
    assert np.isnan(data.astype(np.float32)).all()
    assert np.isnan(scale)
    assert np.isnan(scale_inv)


def test_not_finite_gives_nan_beside_finite_neighbours():
    x = randn((16, 16))
    x[0, :3] = np.inf, -np.inf, np.nan
    spec = everything(QuantizeSpec, "e5m2", margin=1)
    outs = quantize(spec, x, 2.0)
    np.testing.assert_array_equal(np.isnan(outs[0].astype(np.float32)), ~np.isfinite(x))


def test_saturates():
    x = np.full((1, 16), 3e38, np.float32)
    data, *_ = quantize(QuantizeSpec(format="e4m3"), x, 1e30)
    assert (data.astype(np.float32) == 448).all()


@pytest.mark.parametrize(("scale", "amax"), [(0.0, 9.0), (2.0, 0.0), (np.nan, 0.0)])
def test_if_unseeded_reads_nothing_where_a_scale_is_given(scale, amax):
    spec = QuantizeSpec(format="e4m3", data=False, amax=True, if_unseeded=True)
    x = randn((4, 16))
    x[1, 1] = -9
    (got,) = quantize(spec, x, scale)
    assert got == amax


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_every_code(fmt, dtype):
    data = np.arange(256, dtype=np.uint8).view(FP8[fmt]).reshape(4, 64)
    scale_inv = np.float32(0.0123)
    spec = DequantizeSpec(out_dtype=np.dtype(dtype).name)
    (got,) = call("dequantize", spec, [((4, 64), dtype)], data, scale_inv)
    with np.errstate(over="ignore"):
        want = (data.astype(np.float32) * scale_inv).astype(dtype)
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize(
    ("x", "scale", "message"),
    [
        (np.zeros((4, 24), np.float32), np.float32(1), "last dimension: expected a positive multiple of 16, got 24"),
        (np.zeros((0, 16), np.float32), np.float32(1), "number of rows: expected at least 1, got 0"),
        (np.zeros((4, 16), np.int32), np.float32(1), "x dtype: expected float32 or bfloat16 or float16"),
        (np.zeros((4, 16), np.float32), np.ones(1, np.float32), r"scale shape: expected \[\], got \[1\]"),
        (np.zeros((4, 16), np.float32), np.float16(1), "scale dtype: expected float32, got float16"),
    ],
)
def test_errors_name_op_operand_expected_and_got(x, scale, message):
    results = [(x.shape, FP8["e4m3"]), ((), F32), ((), F32)]
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: te_jax quantize: {message}"):
        call("quantize", QuantizeSpec(format="e4m3"), results, x, scale)


def test_unknown_format_is_an_error():
    with pytest.raises(jax.errors.JaxRuntimeError, match='format: expected "e4m3" or "e5m2", got e3m4'):
        call(
            "quantize", QuantizeSpec(format="e3m4"), [((4, 16), FP8["e4m3"]), ((), F32), ((), F32)], randn((4, 16)), 1.0
        )
