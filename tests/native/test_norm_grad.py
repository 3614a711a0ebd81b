"""norm_grad on CPU: values against NumPy float64, and its errors."""

import jax
import ml_dtypes
import numpy as np
import pytest
from handlers import F32, call

from te_jax.primitives.spec import NormGradSpec
from te_jax.testing import oracle

DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16]
# dx is computed in fp32 and rounded once: half a unit in the last place, and the fp32 error, which matters at ties.
RTOL = {np.float32: 2e-6, ml_dtypes.bfloat16: 2.0**-8, np.float16: 2.0**-11}


def randn(shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def results(shape, dtype, kind):
    return [(shape, np.dtype(dtype))] + [((shape[-1],), F32)] * (2 if kind == "layernorm" else 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 48), (1, 16), (16,)])
def test_norm_grad(dtype, kind, zero_centered, residual, shape):
    dy, x, dres = (randn(shape, dtype, seed) for seed in range(3))
    x, gamma = x + dtype(0.5), randn(shape[-1], seed=3)
    options = {"epsilon": 1e-3, "layernorm": kind == "layernorm", "zero_centered": zero_centered}
    _, mean, rstd = oracle.norm(x, gamma, **options)
    spec = NormGradSpec(kind=kind, zero_centered_gamma=zero_centered, residual=residual)
    operands = [dy, x, gamma, *([np.float32(mean)] if kind == "layernorm" else []), np.float32(rstd)]
    outs = call("norm_grad", spec, results(shape, dtype, kind), *operands, *([dres] if residual else []))
    dx, *sums = oracle.norm_grad(dy, x, gamma, **options)
    if residual:
        dx = dx + dres.astype(np.float64)
    np.testing.assert_allclose(outs[0].astype(np.float64), dx, rtol=RTOL[dtype] * 1.01, atol=4e-6)
    for got, want in zip(outs[1:], sums[: len(outs) - 1], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("param", [ml_dtypes.bfloat16, np.float16])
def test_gamma_in_16_bits(param):
    dy, x, gamma = randn((16, 32)), randn((16, 32), seed=1), randn(32, param, seed=2)
    _, _, rstd = oracle.norm(x, gamma, epsilon=1e-6, layernorm=False)
    got = call("norm_grad", NormGradSpec(), results(x.shape, np.float32, "rmsnorm"), dy, x, gamma, np.float32(rstd))
    want = oracle.norm_grad(dy, x, gamma, epsilon=1e-6, layernorm=False)
    np.testing.assert_allclose(got[0], want[0], rtol=2e-6, atol=4e-6)


def test_nan_stays_in_its_row_and_shows_in_the_sums():
    dy, x, rstd = randn((4, 16)), randn((4, 16), seed=1), np.ones(4, np.float32)
    dy[2, 5] = np.nan
    dx, dgamma = call("norm_grad", NormGradSpec(), results(x.shape, np.float32, "rmsnorm"), dy, x, np.ones(16), rstd)
    assert np.isnan(dx).all(1).tolist() == [False, False, True, False]
    assert np.isnan(dgamma).tolist() == [c == 5 for c in range(16)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((4, 16), np.float16)}, "x dtype: expected float32, got float16"),
        ({"x": np.zeros((2, 16), np.float32)}, r"x shape: expected \[4, 16\], got \[2, 16\]"),
        ({"gamma": np.ones(8, np.float32)}, r"gamma shape: expected \[16\], got \[8\]"),
        ({"gamma": np.ones(16, np.int8)}, "gamma dtype: expected float32 or bfloat16 or float16"),
        ({"rstd": np.ones(3, np.float32)}, r"rstd shape: expected \[4\], got \[3\]"),
        ({"dy": np.zeros((4, 20), np.float32)}, "last dimension: expected a positive multiple of 16, got 20"),
        ({"dy": np.zeros((0, 16), np.float32)}, "number of rows: expected at least 1, got 0"),
        ({"kind": "layernorm"}, "operand rstd is missing"),
        ({"kind": "batchnorm"}, 'kind: expected "rmsnorm" or "layernorm", got batchnorm'),
        ({"residual": True}, "operand dres is missing"),
    ],
)
def test_errors(change, message):
    operands = {"dy": np.zeros((4, 16), np.float32), "x": np.zeros((4, 16), np.float32)}
    operands |= {"gamma": np.ones(16, np.float32), "rstd": np.ones(4, np.float32)}
    spec = NormGradSpec(**{name: value for name, value in change.items() if name not in operands})
    operands |= {name: value for name, value in change.items() if name in operands}
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: te_jax norm_grad: {message}"):
        call("norm_grad", spec, results((4, 16), np.float32, "rmsnorm"), *operands.values())
