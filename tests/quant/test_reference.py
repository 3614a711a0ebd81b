"""The jnp oracle against fp64 NumPy and ml_dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax.quant import format as fp8
from te_jax.quant import reference
from te_jax.testing import oracle
from te_jax.testing.compiling import OPTIMIZED


def edge_values(fmt: str) -> np.ndarray:
    """f32: every FP8 value, every midpoint between neighbours, the floats next to both, and what is out of range."""
    values = np.arange(256, dtype=np.uint8).view(oracle.DTYPES[fmt]).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    midpoints = (values[1:] + values[:-1]) / 2
    exact = np.concatenate([values, midpoints])
    around = [np.nextafter(exact, np.float32(side)) for side in (-np.inf, np.inf)]
    normal = [a[(np.abs(a) == 0) | (np.abs(a) > 2e-38)] for a in around]  # XLA's CPU code flushes subnormal inputs
    special = np.array([np.inf, -np.inf, np.nan, 3e38, -3e38, 464, 465, 61440, 61441, -0.0], np.float32)
    return np.concatenate([exact, *normal, special])


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**126, 1e-3, np.nan])
def test_cast_rounds_to_nearest_even_and_saturates(fmt, scale):
    y = edge_values(fmt)
    got = jax.jit(reference.cast, static_argnums=2, compiler_options=OPTIMIZED)(y, jnp.float32(scale), fmt)
    np.testing.assert_array_equal(oracle.codes(got), oracle.cast(y, scale, fmt))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("fmt", [fp8.E4M3, fp8.E5M2], ids=lambda f: f.name)
def test_scale_from_amax(fmt, margin, power_of_two):
    amax = np.array([0, 1, 3.3, 448, 449, 1e-30, 1e-37, 3e38, np.inf, np.nan, 2.0**-126], np.float32)
    got = reference.scale_from_amax(amax, fmt.max, margin=margin, power_of_two=power_of_two)
    want = [oracle.scale_from_amax(float(a), fmt.max, margin, power_of_two) for a in amax]
    np.testing.assert_array_equal(got, np.array(want, np.float32))
    assert np.all(np.asarray(got) <= fp8.MAX_SCALE)


def test_quantize_derives_an_unseeded_scale_and_keeps_a_given_one():
    y = np.linspace(-3, 5, 64, dtype=np.float32).reshape(4, 16)
    seeded = reference.quantize(y, jnp.float32(0), "e4m3")
    assert seeded.amax == 5
    assert seeded.scale == np.float32(448) / np.float32(5)
    assert seeded.scale_inv == np.float32(1) / seeded.scale
    given = reference.quantize(y, jnp.float32(2), "e4m3")
    assert given.scale == 2
    np.testing.assert_array_equal(oracle.codes(given.data), oracle.cast(y, 2.0, "e4m3"))
    assert np.isnan(np.asarray(reference.quantize(y, jnp.float32(np.nan), "e4m3").data, np.float32)).all()


def test_amax_of_nan_is_nan_and_of_nothing_is_zero():
    assert np.isnan(reference.amax(jnp.array([1.0, jnp.nan, 2.0])))
    assert reference.amax(jnp.array([1.0, -jnp.inf])) == np.inf
    assert reference.amax(jnp.zeros((0, 16))) == 0
    # A tensor that XLA's CPU backend reduces in vectors, where its floating point maximum loses a NaN.
    large = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)
    large[130, 5] = np.nan
    assert np.isnan(reference.amax(jnp.asarray(large)))
    np.testing.assert_array_equal(np.isnan(reference.amax(jnp.asarray(large), 1)), np.arange(256) == 130)


@pytest.mark.parametrize("dtypes", [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3")])
def test_gemm_of_exact_values_is_exact(dtypes):
    rng = np.random.default_rng(0)
    lhs = rng.integers(-4, 5, (3, 5, 32)).astype(oracle.DTYPES[dtypes[0]])
    rhs = rng.integers(-4, 5, (7, 32)).astype(oracle.DTYPES[dtypes[1]])
    got = reference.gemm(jnp.asarray(lhs), jnp.asarray(rhs), scale=jnp.float32(0.25))
    np.testing.assert_array_equal(got, 0.25 * oracle.f64(lhs) @ oracle.f64(rhs).T)


def test_gemm_layouts():
    rng = np.random.default_rng(0)
    lhs = jnp.asarray(rng.normal(size=(4, 6, 5)), jnp.float32)  # [*C, L]
    rhs = jnp.asarray(rng.normal(size=(3, 4, 6)), jnp.float32)  # [R, *C]
    got = reference.gemm(lhs, rhs, contract_dims=2, lhs_contract_first=True)
    np.testing.assert_allclose(got, np.einsum("abl,rab->lr", oracle.f64(lhs), oracle.f64(rhs)), rtol=1e-5, atol=1e-5)


def test_format_of():
    assert fp8.format_of("e5m2") is fp8.E5M2
    assert fp8.format_of(jnp.float8_e4m3fn) is fp8.E4M3
    with pytest.raises(ValueError, match="expected e4m3, e5m2 or one of their dtypes, got 'e4m3b11'"):
        fp8.format_of("e4m3b11")
