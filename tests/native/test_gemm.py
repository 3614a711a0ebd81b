"""te_jax_gemm on CPU against NumPy float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from handlers import F32, FP8, call, cast

from te_jax.primitives.spec import GemmSpec

E4M3, E5M2 = FP8["e4m3"], FP8["e5m2"]
BF16 = np.dtype(ml_dtypes.bfloat16)
# The result's own rounding, and the fp32 sum over k <= 96 terms.
RTOL = {F32: 0.0, BF16: 2.0**-8, np.dtype(np.float16): 2.0**-11}


def randn(shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def close(got, want, magnitude):
    """``magnitude``: sum of |products|, which bounds the error of the fp32 sum (Higham, section 3.1)."""
    error = np.abs(got.astype(np.float64) - want)
    bound = RTOL[got.dtype] * np.abs(want) * 1.01 + 96 * 2.0**-24 * magnitude
    assert (error <= bound).all(), (error - bound).max()


@pytest.mark.parametrize("lhs_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("out_dtype", [F32, BF16, np.dtype(np.float16)])
def test_fp8(lhs_dtype, out_dtype):
    lhs, rhs = randn((3, 5, 96), lhs_dtype), randn((32, 96), E4M3, seed=1)
    si, sj = np.float32(0.25), np.float32(3.0)
    spec = GemmSpec(out_dtype=out_dtype.name)
    (got,) = call("gemm", spec, [((3, 5, 32), out_dtype)], lhs, rhs, si, sj)
    l64, r64 = lhs.astype(np.float64), rhs.astype(np.float64)
    close(got, l64 @ r64.T * 0.75, np.abs(l64) @ np.abs(r64.T) * 0.75)


def test_contracts_leading_dimensions_of_transposed_copies():
    """The weight gradient: x.data_t [K, *lead] . dy.data_t [N, *lead]."""
    lhs, rhs = randn((48, 2, 16), E4M3), randn((32, 2, 16), E5M2, seed=1)
    one = np.float32(1)
    spec = GemmSpec(contract_dims=2, out_dtype="float32")
    (got,) = call("gemm", spec, [((48, 32), F32)], lhs, rhs, one, one)
    l64, r64 = lhs.astype(np.float64).reshape(48, -1), rhs.astype(np.float64).reshape(32, -1)
    close(got, l64 @ r64.T, np.abs(l64) @ np.abs(r64.T))


@pytest.mark.parametrize("lhs_first", [False, True])
@pytest.mark.parametrize("rhs_first", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_operand_layouts(lhs_first, rhs_first, dtype):
    m, n, k = 48, 32, 64
    lhs = randn((k, m) if lhs_first else (m, k), dtype)
    rhs = randn((k, n) if rhs_first else (n, k), dtype, seed=1)
    spec = GemmSpec(fp8=False, lhs_contract_first=lhs_first, rhs_contract_first=rhs_first, out_dtype="float32")
    (got,) = call("gemm", spec, [((m, n), F32)], lhs, rhs)
    l64 = lhs.astype(np.float64).T if lhs_first else lhs.astype(np.float64)
    r64 = rhs.astype(np.float64) if rhs_first else rhs.astype(np.float64).T
    close(got, l64 @ r64, np.abs(l64) @ np.abs(r64))


@pytest.mark.parametrize("out_dtype", [F32, BF16])
@pytest.mark.parametrize("in_place", [False, True])
def test_epilogue(out_dtype, in_place):
    lhs, rhs = randn((7, 64), E4M3), randn((32, 64), E4M3, seed=1)
    bias, c = randn(32, BF16, seed=2), randn((7, 32), out_dtype, seed=3)
    si = np.float32(0.5)
    spec = GemmSpec(out_dtype=out_dtype.name, bias=True, alpha=2.0, beta=-0.5, in_place=in_place)
    (got,) = call("gemm", spec, [((7, 32), out_dtype)], lhs, rhs, si, si, bias, c)
    l64, r64, c64 = lhs.astype(np.float64), rhs.astype(np.float64), c.astype(np.float64)
    want = 0.5 * (l64 @ r64.T) - 0.5 * c64 + bias.astype(np.float64)
    close(got, want, 0.5 * np.abs(l64) @ np.abs(r64.T) + np.abs(c64) + 4)


def test_aliased_accumulation():
    """c and out are one buffer, as XLA makes them for a donated accumulator."""
    lhs, rhs, c = randn((16, 32), E4M3), randn((16, 32), E4M3, seed=1), randn((16, 16), seed=2)
    one = np.float32(1)
    spec = GemmSpec(out_dtype="float32", beta=1.0, in_place=True)

    def add(lhs, rhs, c):
        result = jax.ShapeDtypeStruct((16, 16), F32)
        gemm = jax.ffi.ffi_call("te_jax_gemm", result, input_output_aliases={4: 0})
        return gemm(lhs, rhs, one, one, c, spec=spec.attributes())

    got = np.asarray(jax.jit(add, donate_argnums=2)(lhs, rhs, jnp.asarray(c)))
    l64, r64 = lhs.astype(np.float64), rhs.astype(np.float64)
    close(got, l64 @ r64.T + c, np.abs(l64) @ np.abs(r64.T) + np.abs(c))


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_fp8_output(fmt):
    """Exact products and sums, so that the result is known bit for bit."""
    rng = np.random.default_rng(0)
    lhs, rhs = rng.integers(-4, 5, (16, 32)).astype(E4M3), rng.integers(-4, 5, (32, 32)).astype(E4M3)
    spec = GemmSpec(out_dtype=FP8[fmt].name, amax=True)
    results = [((16, 32), FP8[fmt]), ((), F32)]
    got, amax = call("gemm", spec, results, lhs, rhs, np.float32(0.5), np.float32(1), np.float32(3))
    want = lhs.astype(np.float32) @ rhs.astype(np.float32).T * np.float32(0.5)
    np.testing.assert_array_equal(got.view(np.uint8), cast(want, 3.0, fmt).view(np.uint8))
    assert amax == np.abs(want).max()


def test_nan_operand_gives_nan_rows_only():
    lhs, rhs = randn((4, 32), E4M3), randn((16, 32), E4M3, seed=1)
    lhs[2, 7] = np.nan
    one = np.float32(1)
    (got,) = call("gemm", GemmSpec(), [((4, 16), BF16)], lhs, rhs, one, one)
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)).all(1), [False, False, True, False])
    assert np.isfinite(got[[0, 1, 3]].astype(np.float32)).all()


def test_same_bits_every_time():
    lhs, rhs = randn((64, 256), E4M3), randn((128, 256), E4M3, seed=1)
    one = np.float32(1)
    first, second = (call("gemm", GemmSpec(), [((64, 128), BF16)], lhs, rhs, one, one)[0] for _ in range(2))
    np.testing.assert_array_equal(first.view(np.uint16), second.view(np.uint16))


@pytest.mark.parametrize(
    ("lhs", "rhs", "message"),
    [
        ((4, 24), (16, 24), "contracted dimension: expected a positive multiple of 16, got 24"),
        ((4, 32), (20, 32), r"rhs's kept dimension \(the result's last\): expected a positive multiple of 16, got 20"),
        ((4, 32), (16, 48), r"rhs's contracted dimensions: expected \[32\], got \[48\]"),
        ((32,), (16, 32), "lhs rank: expected at least contract_dims"),
    ],
)
def test_errors(lhs, rhs, message):
    one = np.float32(1)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: te_jax gemm: {message}"):
        call("gemm", GemmSpec(), [((*lhs[:-1], rhs[0]), BF16)], np.zeros(lhs, E4M3), np.zeros(rhs, E4M3), one, one)


def test_e5m2_by_e5m2_is_an_error():
    one = np.float32(1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="expected at least one float8_e4m3fn, got float8_e5m2 twice"):
        call("gemm", GemmSpec(), [((4, 16), BF16)], np.zeros((4, 16), E5M2), np.zeros((16, 16), E5M2), one, one)
