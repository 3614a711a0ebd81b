"""norm_grad on CUDA against fp64 NumPy and the host kernel."""

import ml_dtypes
import numpy as np
import pytest

from te_jax import primitives as P

DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
# Half a unit in the last place of the dtype, and some units of fp32.
TOLERANCE = {"f32": 3e-6, "bf16": 2.0**-8, "f16": 2.0**-11 + 3e-6}
# One row to many; a warp, several and all of a block for a row; idle threads; rows too wide for a block.
SHAPES = [(1, 16), (3, 48, 144), (300, 512), (7, 1040), (1000, 2048), (33, 5120), (5, 8192), (3, 8208), (40, 16384)]
KINDS = ["rmsnorm", "layernorm"]


def random(shape, dtype, seed=0, size=1.0):
    return (size * np.random.default_rng(seed).standard_normal(shape)).astype(DTYPES[dtype])


def operands_of(shape, kind, dtype, param="f32"):
    """(dy, x, gamma, mean, rstd, dres), mean also where it isn't used."""
    dy, x, dres = random(shape, dtype), random(shape, dtype, 1, 3.0), random(shape, dtype, 2, 2.0)
    x64 = x.astype(np.float64)
    mean = x64.mean(-1) if kind == "layernorm" else np.zeros(shape[:-1])
    rstd = 1 / np.sqrt(((x64 - mean[..., None]) ** 2).mean(-1) + 1e-5)
    return dy, x, random(shape[-1:], param, 3), np.float32(mean), np.float32(rstd), dres


def run(on, platform, spec, operands):
    def function(dy, x, gamma, mean, rstd, dres):
        mean, dres = mean if spec.kind == "layernorm" else None, dres if spec.residual else None
        return P.norm_grad(dy, x, gamma, mean, rstd, spec, dres=dres)

    return on(platform, function, *operands)


def check(out, spec, operands, dtype):
    """Against fp64 with the same statistics; errors relative to the terms of each sum."""
    dy, x, gamma, mean, rstd, dres = (a.astype(np.float64) for a in operands)
    rstd = rstd[..., None]
    x_hat = (x - mean[..., None]) * rstd
    g = dy * (gamma + spec.zero_centered_gamma)
    terms = [g, -x_hat * (g * x_hat).mean(-1, keepdims=True)]
    terms += [-g.mean(-1, keepdims=True)] if spec.kind == "layernorm" else []
    terms = [rstd * term for term in terms] + ([dres] if spec.residual else [])
    error, want = np.abs(out.dx.astype(np.float64) - sum(terms)), sum(terms)
    size = sum(np.abs(term) for term in terms) + rstd * np.abs(g * x_hat).mean(-1, keepdims=True) * (1 + np.abs(x_hat))
    smallest = 2.0**-24 if dtype == "f16" else 0.0
    assert np.all(error <= TOLERANCE[dtype] * np.abs(want) + 2e-6 * size + smallest), np.max(error)

    lead = tuple(range(dy.ndim - 1))
    for got, term in ((out.dgamma, dy * x_hat), (out.dbeta, dy)):
        if got is not None:
            assert np.all(np.abs(got - term.sum(lead)) <= 2e-6 * np.abs(term).sum(lead) + 1e-30)
    assert (out.dbeta is not None) == (spec.kind == "layernorm")


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(on, shape, kind, dtype, residual):
    spec = P.NormGradSpec(kind=kind, residual=residual, zero_centered_gamma=kind == "rmsnorm")
    operands = operands_of(shape, kind, dtype)
    out = run(on, "cuda", spec, operands)
    assert out.dx.dtype == operands[1].dtype
    check(out, spec, operands, dtype)


@pytest.mark.parametrize("param", DTYPES)
@pytest.mark.parametrize("cols", [144, 16384])
def test_dtypes_of_gamma(on, cols, param):
    spec = P.NormGradSpec(kind="layernorm", residual=True)
    operands = operands_of((40, cols), "layernorm", "bf16", param)
    check(run(on, "cuda", spec, operands), spec, operands, "bf16")


def test_the_widest_rows(on):
    spec = P.NormGradSpec(residual=True)
    operands = operands_of((17, 65536), "rmsnorm", "bf16")
    check(run(on, "cuda", spec, operands), spec, operands, "bf16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_against_the_host_kernel(on, kind, dtype):
    """The same formula in fp32, sums in another order: at most one unit in the last place apart, and hardly ever."""
    spec = P.NormGradSpec(kind=kind, residual=True)
    operands = operands_of((64, 1024), kind, dtype)
    cuda, cpu = (run(on, platform, spec, operands) for platform in ("cuda", "cpu"))
    a, b = (out.dx.astype(np.float64) for out in (cuda, cpu))
    close = 4e-6 if dtype == "f32" else 2 * TOLERANCE[dtype]
    assert np.all(np.abs(a - b) <= close * np.abs(b) + 4e-6 * np.abs(b).max())
    assert np.mean(a != b) < (1.0 if dtype == "f32" else 0.01)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3000, 1024), (100, 16384)], ids=str)
def test_repeats_bit_for_bit(on, shape, kind):
    spec = P.NormGradSpec(kind=kind, residual=True)
    operands = operands_of(shape, kind, "bf16")
    first, second = (run(on, "cuda", spec, operands) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a is b is None or a.tobytes() == b.tobytes()


@pytest.mark.parametrize("cols", [144, 16384])
def test_nan_stays_in_its_row(on, cols):
    operands = operands_of((64, cols), "rmsnorm", "bf16")
    operands[0][5, 7] = np.nan
    out = run(on, "cuda", P.NormGradSpec(), operands)
    assert np.flatnonzero(np.isnan(out.dx.astype(np.float32)).any(1)).tolist() == [5]
    assert np.flatnonzero(np.isnan(out.dgamma)).tolist() == [7]
