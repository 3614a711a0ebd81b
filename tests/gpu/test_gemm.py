"""gemm on CUDA against fp64 NumPy, and typed errors for what cuBLASLt doesn't have."""

import jax
import ml_dtypes
import numpy as np
import pytest

from te_jax import primitives as P
from te_jax.testing import tolerance
from te_jax.testing.bits import assert_same_bits

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
HIGH = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def random(shape, dtype, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def check(out, lhs, rhs, hopper="", factor=1.0, add=0.0, twice=False):
    """out against factor * lhs . rhs^T + add, lhs [m, k], rhs [n, k]: every element, and the norm of the error.

    twice: the product is rounded before ``add`` is added, as cuBLASLt does in place with 16-bit results.
    """
    lhs, rhs = lhs.astype(np.float64), rhs.astype(np.float64)
    k = lhs.shape[1]
    product = factor * (lhs @ rhs.T)
    expected = product + add
    error = np.abs(out.astype(np.float64) - expected)
    magnitude = abs(factor) * (np.abs(lhs) @ np.abs(rhs).T)
    bound = tolerance.gemm_error(magnitude, k, expected, out.dtype, hopper=hopper) + tolerance.FP32_UNIT * np.abs(add)
    bound += tolerance.unit_roundoff(out.dtype) * np.abs(product) if twice else 0
    assert np.all(error <= bound), f"error {np.max(error / bound)} times the tolerance"
    rounding = tolerance.unit_roundoff(out.dtype) * np.linalg.norm(expected)
    norm = tolerance.gemm_error_norm(k, hopper=hopper) * np.linalg.norm(product) + rounding
    norm += tolerance.unit_roundoff(out.dtype) * np.linalg.norm(product) if twice else 0
    assert np.linalg.norm(error) <= norm, f"norm of the error {np.linalg.norm(error) / norm} times the tolerance"


@pytest.mark.parametrize("out_dtype", HIGH)
@pytest.mark.parametrize("types", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=["e4m3", "e5m2_lhs", "e5m2_rhs"])
@pytest.mark.parametrize("accumulation", ["fast", "precise"])
@pytest.mark.parametrize("shape", [(16, 16, 16), (272, 144, 400), (1, 64, 2048), (13, 48, 64)])
def test_fp8(on, shape, accumulation, types, out_dtype):
    m, n, k = shape
    lhs, rhs = random((m, k), types[0], 0), random((n, k), types[1], 1)
    spec = P.GemmSpec(out_dtype=out_dtype, fast_accumulation=accumulation == "fast", alpha=0.5)

    def run(lhs, rhs, a, b):
        return P.gemm(lhs, rhs, spec, lhs_scale_inv=a, rhs_scale_inv=b)[0]

    out = on("cuda", run, lhs, rhs, np.float32(0.3), np.float32(7.0))
    check(out, lhs, rhs, accumulation, 0.5 * np.float64(np.float32(0.3)) * 7.0)


@pytest.mark.parametrize("accumulation", ["fast", "precise"])
def test_fp8_exact(on, accumulation):
    """Small integers: every sum fits the narrowest accumulator, so the result has to be exact."""
    rng = np.random.default_rng(0)
    lhs, rhs = (rng.integers(-4, 5, (n, 128)).astype(E4M3) for n in (96, 160))
    spec = P.GemmSpec(out_dtype="float32", fast_accumulation=accumulation == "fast")
    one = np.float32(1)
    out = on("cuda", lambda a, b, s: P.gemm(a, b, spec, lhs_scale_inv=s, rhs_scale_inv=s)[0], lhs, rhs, one)
    assert_same_bits(out, lhs.astype(np.float32) @ rhs.astype(np.float32).T)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("beta", [0.0, 1.0, -0.5])
@pytest.mark.parametrize("bias", [False, True])
def test_fp8_epilogue(on, bias, beta, in_place, out_dtype):
    if in_place and beta == 0:
        pytest.skip("nothing to write in place of")
    m, n, k = 64, 96, 128
    lhs, rhs = random((m, k), E4M3, 0), random((n, k), E5M2, 1)
    bias_dtype = np.float16 if out_dtype == "float16" else ml_dtypes.bfloat16
    b, c = random((n,), bias_dtype, 2), random((m, n), HIGH[out_dtype], 3)
    spec = P.GemmSpec(out_dtype=out_dtype, bias=bias, beta=beta, in_place=in_place)

    def run(lhs, rhs, s, b, c):
        extra = {"bias": b} if bias else {}
        extra |= {"c": c} if beta else {}
        return P.gemm(lhs, rhs, spec, lhs_scale_inv=s, rhs_scale_inv=s, **extra)[0]

    out = on("cuda", run, lhs, rhs, np.float32(0.5), b, c)
    add = beta * c.astype(np.float64) + (b.astype(np.float64) if bias else 0.0)
    check(out, lhs, rhs, "precise", 0.25, add, twice=in_place and out_dtype != "float32")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_result(on, out_dtype, bias):
    """The product scaled and cast in the epilogue; amax is taken before the scale."""
    m, n, k = 64, 96, 128
    lhs, rhs, b = random((m, k), E4M3, 0), random((n, k), E5M2, 1), random((n,), ml_dtypes.bfloat16, 2)
    spec = P.GemmSpec(out_dtype=out_dtype, amax=True, bias=bias)
    out_scale = np.float32(2.0)

    def run(lhs, rhs, s, b, out_scale):
        extra = {"bias": b} if bias else {}
        return P.gemm(lhs, rhs, spec, lhs_scale_inv=s, rhs_scale_inv=s, out_scale=out_scale, **extra)

    out, amax = on("cuda", run, lhs, rhs, np.float32(1.0), b, out_scale)
    expected = lhs.astype(np.float64) @ rhs.astype(np.float64).T + (b.astype(np.float64) if bias else 0.0)
    np.testing.assert_allclose(amax, np.abs(expected).max(), rtol=2.0**-7)
    dtype = ml_dtypes.finfo(out_dtype)
    half_ulp = 2.0 ** -(dtype.nmant + 1)
    error = np.abs(out.astype(np.float64) - 2.0 * expected)
    assert np.all(error <= half_ulp * 1.05 * np.abs(2.0 * expected) + float(dtype.smallest_subnormal) + 2.0**-6)


@pytest.mark.parametrize("lhs_first", [False, True])
@pytest.mark.parametrize("rhs_first", [False, True])
@pytest.mark.parametrize("types", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"),
                                   ("float32", "float32")], ids=lambda t: "-".join(t))  # fmt: skip
@pytest.mark.parametrize("epilogue", [False, True])
def test_high_precision(on, epilogue, types, rhs_first, lhs_first):
    m, n, k = 48, 80, 272
    dtype, out_dtype = HIGH[types[0]], types[1]
    lhs, rhs = random((m, k), dtype, 0), random((n, k), dtype, 1)
    b, c = random((n,), HIGH[out_dtype], 2), random((m, n), HIGH[out_dtype], 3)
    spec = P.GemmSpec(
        fp8=False, out_dtype=out_dtype, lhs_contract_first=lhs_first, rhs_contract_first=rhs_first,
        bias=epilogue, beta=2.0 if epilogue else 0.0,
    )  # fmt: skip

    def run(lhs, rhs, b, c):
        return P.gemm(lhs, rhs, spec, **({"bias": b, "c": c} if epilogue else {}))[0]

    out = on("cuda", run, lhs.T.copy() if lhs_first else lhs, rhs.T.copy() if rhs_first else rhs, b, c)
    add = b.astype(np.float64) + 2.0 * c.astype(np.float64) if epilogue else 0.0
    check(out, lhs, rhs, add=add)


def test_several_contracted_dimensions(on):
    """The weight gradient: x.data_t [K, *lead] . dy.data_t [N, *lead]."""
    lhs, rhs = random((48, 4, 64), E4M3, 0), random((80, 4, 64), E5M2, 1)
    spec = P.GemmSpec(out_dtype="float32", contract_dims=2)
    one = np.float32(1)
    out = on("cuda", lambda a, b, s: P.gemm(a, b, spec, lhs_scale_inv=s, rhs_scale_inv=s)[0], lhs, rhs, one)
    check(out, lhs.reshape(48, -1), rhs.reshape(80, -1), "precise")


def test_nan_scale_gives_nan(on):
    lhs, rhs = random((32, 64), E4M3, 0), random((48, 64), E4M3, 1)
    spec = P.GemmSpec(out_dtype="bfloat16")
    bad = np.float32(np.nan)
    out = on("cuda", lambda a, b, s: P.gemm(a, b, spec, lhs_scale_inv=s, rhs_scale_inv=s)[0], lhs, rhs, bad)
    assert np.isnan(out.astype(np.float32)).all()


def test_repeats_exactly(on):
    lhs, rhs = random((512, 4096), E4M3, 0), random((256, 4096), E4M3, 1)
    spec = P.GemmSpec(out_dtype="bfloat16")
    one = np.float32(1)
    first, second = (
        on("cuda", lambda a, b, s: P.gemm(a, b, spec, lhs_scale_inv=s, rhs_scale_inv=s)[0], lhs, rhs, one)
        for _ in range(2)
    )
    assert_same_bits(first, second)


@pytest.mark.parametrize(
    ("kwargs", "dtypes", "bias_dtype", "message"),
    [
        (
            {"out_dtype": "bfloat16", "bias": True},
            (E4M3, E4M3),
            np.float32,
            "bias: expected dtype bfloat16, got float32",
        ),
        ({"out_dtype": "float8_e5m2"}, (E4M3, E4M3), None, "out_dtype: expected float8_e4m3fn"),
        ({"out_dtype": "bfloat16", "fp8": False}, (np.float32, np.float32), None, "out_dtype: expected float32"),
    ],
    ids=["bias", "e5m2_result", "narrow_result"],
)
def test_unsupported_combinations_are_named(on, kwargs, dtypes, bias_dtype, message):
    spec = P.GemmSpec(**kwargs)
    lhs, rhs = random((32, 64), dtypes[0], 0), random((48, 64), dtypes[1], 1)
    one = np.float32(1)
    extra = {"lhs_scale_inv": one, "rhs_scale_inv": one} if spec.fp8 else {}
    extra |= {"bias": random((48,), bias_dtype, 2)} if spec.bias else {}
    extra |= {"out_scale": one} if "float8" in spec.out_dtype else {}
    with pytest.raises((jax.errors.JaxRuntimeError, TypeError, ValueError), match=message):
        on("cuda", lambda lhs, rhs, extra: P.gemm(lhs, rhs, spec, **extra)[0], lhs, rhs, extra)
