import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax.quant.division import divide
from te_jax.testing.bits import assert_same_bits


@pytest.mark.parametrize("numerator", [1.0, 448.0, 57344.0, 0.1, 3.0e-30])
def test_rounds_like_numpy(numerator):
    rng = np.random.default_rng(0)
    b = np.exp2(rng.uniform(-40, 20, 200_000)).astype(np.float32)
    assert_same_bits(jax.jit(divide)(np.float32(numerator), b), np.float32(numerator) / b)


def test_rounds_half_way_neighbours():
    """Quotients next to a tie and next to a power of two, where a wrong last bit or carry shows."""
    a = np.arange(2**23, 2**23 + 4096, dtype=np.float32)
    for b in (np.float32(3), np.nextafter(np.float32(1), np.float32(2)), np.nextafter(np.float32(2), np.float32(1))):
        assert_same_bits(divide(a, b), a / b)


def test_what_is_not_normal():
    a = np.float32([1, 0, np.inf, np.nan, 1, 448])
    b = np.float32([np.inf, 1, 1, 1, 0, np.nan])
    with np.errstate(divide="ignore"):
        assert_same_bits(divide(jnp.asarray(a), jnp.asarray(b)), a / b)
