"""`quant.division.divide` equals IEEE division."""

import jax
import numpy as np

from te_jax.quant.division import divide


def test_equals_ieee_division_bit_for_bit():
    rng = np.random.default_rng(0)
    bits = rng.integers(1 << 23, 255 << 23, (2, 200_000), dtype=np.uint32)
    a, b = bits.view(np.float32)
    close = rng.integers(0, 1 << 23, (2, 50_000), dtype=np.uint32) | np.uint32(127 << 23)
    a, b = np.concatenate([a, close[0].view(np.float32)]), np.concatenate([b, close[1].view(np.float32)])
    with np.errstate(over="ignore", under="ignore"):
        expected = a / b
    expected[expected < np.finfo(np.float32).tiny] = 0
    np.testing.assert_array_equal(np.asarray(jax.jit(divide)(a, b)), expected)


def test_scales_of_both_formats():
    amax = np.random.default_rng(1).lognormal(0, 12, 100_000).astype(np.float32)
    for fp8_max in (np.float32(448), np.float32(57344)):
        np.testing.assert_array_equal(np.asarray(jax.jit(divide)(fp8_max, amax)), fp8_max / amax)
