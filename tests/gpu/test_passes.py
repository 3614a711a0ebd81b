"""norm, activation and activation_grad on CUDA against fp64 NumPy."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from te_jax import primitives as P
from te_jax.primitives.spec import ACTIVATIONS, GATED_ACTIVATIONS
from te_jax.testing import oracle
from te_jax.testing.bits import assert_same_bits, quantize_fp64

DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
E4M3 = ml_dtypes.float8_e4m3fn
KINDS = {
    **{kind: (kind, {}) for kind in ACTIVATIONS + GATED_ACTIVATIONS},
    **{f"{kind}-second": (kind, {"gate_second": True}) for kind in ("geglu", "swiglu")},
    "clamped-second": ("clamped_swiglu", {"gate_second": True, "limit": 1.5, "alpha": 0.5, "linear_offset": -0.25}),
}
SHAPES = [(16, 16), (3, 48, 144), (144, 400)]
# kind, fields, shape, scale: the activations with kernels of their own in all shapes, the others in one.
ACTIVATION_CASES = [
    pytest.param(kind, fields, shape, scale, id=f"{name}-{'x'.join(map(str, shape))}-{scale}")
    for name, (kind, fields) in KINDS.items()
    for shape, scale in itertools.product(SHAPES, [0.0, 5.0])
    if name in ("gelu", "silu", "relu", "geglu", "swiglu", "glu") or (shape, scale) == ((3, 48, 144), 0.0)
]
# Half a unit in the last place of the dtype, and some units of fp32.
TOLERANCE = {"f32": 3e-6, "bf16": 2.0**-8, "f16": 2.0**-11 + 3e-6}


def random(shape, dtype, seed=0):
    return (3 * np.random.default_rng(seed).standard_normal(shape)).astype(DTYPES[dtype])


def assert_near(actual, expected, dtype, scale_of_error=None):
    """|actual - expected| within the dtype's rounding of ``scale_of_error`` (default: of the expected value)."""
    magnitude = np.abs(expected) if scale_of_error is None else scale_of_error
    error = np.abs(actual.astype(np.float64) - expected)
    smallest = 2.0**-24 if dtype == "f16" else 1e-30
    worst = np.max(error - TOLERANCE[dtype] * magnitude)
    assert worst <= smallest, f"off by {worst} more than the tolerance"


def assert_consistent(out, scale):
    """What was quantized is the rounded tensor: hp, data, data_t, amax, scale and dbias tell the same story."""
    hp = out.hp.astype(np.float32)
    assert out.amax == np.abs(hp).max()
    expected_scale = np.float32(448) / out.amax if scale == 0 else np.float32(scale)
    assert out.scale == expected_scale
    assert out.scale_inv == np.float32(1) / out.scale
    assert_same_bits(out.data, quantize_fp64(out.hp, out.scale, E4M3), "data")
    assert_same_bits(out.data_t, np.moveaxis(out.data, -1, 0), "data_t")
    if out.dbias is not None:
        lead = tuple(range(hp.ndim - 1))
        bound = np.abs(hp.astype(np.float64)).sum(lead)
        assert np.all(np.abs(out.dbias - hp.astype(np.float64).sum(lead)) <= 1e-6 * bound)


ALL = {"format": "e4m3", "hp": True, "data_t": True, "amax": True, "dbias": True}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "fields", "shape", "scale"), ACTIVATION_CASES)
def test_activation(on, shape, kind, fields, dtype, scale):
    x = random((*shape[:-1], shape[-1] * (2 if kind in GATED_ACTIVATIONS else 1)), dtype)
    spec = P.ActivationSpec(kind=kind, **fields, **ALL)
    out = on("cuda", lambda x, s: P.activation(x, s, spec), x, np.float32(scale))
    expected = oracle.activation(kind, x, **fields)
    # fp64's own 1 + tanh cancels far left of 0: errors are relative to |x| there
    assert_near(out.hp, expected, dtype, np.abs(expected) + 1e-7)
    assert_consistent(out, scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "fields", "shape", "scale"), ACTIVATION_CASES)
def test_activation_grad(on, shape, kind, fields, dtype, scale):
    gated = kind in GATED_ACTIVATIONS
    x, dy = random((*shape[:-1], shape[-1] * (2 if gated else 1)), dtype), random(shape, dtype, seed=1)
    spec = P.ActivationGradSpec(kind=kind, **fields, **ALL)
    out = on("cuda", lambda dy, x, s: P.activation_grad(dy, x, s, spec), dy, x, np.float32(scale))
    expected = oracle.activation_grad(kind, dy, x, **fields)
    # The slope is a difference of terms up to 1 + |x| in fp32: off by some units of those, before it is rounded.
    terms = [np.abs(dy.astype(np.float64))]
    if gated:
        linear = np.split(x, 2, -1)[0 if fields.get("gate_second") else 1].astype(np.float64)
        factor = np.abs(linear) + abs(fields.get("linear_offset", kind == "clamped_swiglu"))
        terms = [terms[0] * factor, terms[0]][:: -1 if fields.get("gate_second") else 1]
    size = np.abs(expected) + 3e-7 / TOLERANCE[dtype] * np.concatenate(terms, -1)
    assert_near(out.hp, expected, dtype, size + 1e-6)
    assert_consistent(out, scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["relu", "squared_relu", "reglu", "sreglu"])
def test_without_an_exponential_cuda_equals_cpu(on, kind, dtype):
    """Only products and rounding to the dtype: the same bits."""
    x, dy = random((48, 160 if kind in GATED_ACTIVATIONS else 80), dtype), random((48, 80), dtype, seed=1)
    forward, backward = P.ActivationSpec(kind=kind, **ALL), P.ActivationGradSpec(kind=kind, **(ALL | {"dbias": False}))
    zero = np.float32(0)
    for spec, primitive, operands in ((forward, P.activation, (x,)), (backward, P.activation_grad, (dy, x))):
        run = lambda *args, spec=spec, primitive=primitive: primitive(*args, spec)  # noqa: E731
        cuda, cpu = (on(platform, run, *operands, zero) for platform in ("cuda", "cpu"))
        for name in ("hp", "data", "data_t", "scale", "scale_inv", "amax"):
            assert_same_bits(getattr(cuda, name), getattr(cpu, name), name)


def check_norm(on, shape, kind, dtype, param, scale):
    layer = kind == "layernorm"
    x, gamma, beta = random(shape, dtype), random(shape[-1:], param, 1), random(shape[-1:], param, 2)
    spec = P.NormSpec(kind=kind, stats=True, zero_centered_gamma=not layer, epsilon=1e-5, **ALL)
    operands = (x, gamma, beta) if layer else (x, gamma)

    def run(scale, x, gamma, beta=None):
        return P.norm(x, gamma, beta, scale, spec)

    out = on("cuda", run, np.float32(scale), *operands)
    x, gamma, beta = (a.astype(np.float64) for a in (x, gamma, beta))
    mean = x.mean(-1) if layer else np.zeros(shape[:-1])
    centred = x - mean[..., None]
    rstd = 1 / np.sqrt((centred**2).mean(-1) + 1e-5)
    terms = [centred * rstd[..., None] * (gamma if layer else 1 + gamma), beta if layer else 0 * beta]
    assert_near(out.hp, sum(terms), dtype, sum(map(np.abs, terms)) + 1e-6)
    assert np.max(np.abs(out.rstd / rstd - 1)) < 2e-6
    if layer:
        assert np.max(np.abs(out.mean - mean)) < 2e-6
    assert_consistent(out, scale)


@pytest.mark.parametrize("scale", [0.0, 5.0])
@pytest.mark.parametrize("param", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("shape", [(16, 16), (3, 48, 144), (32, 5120)])
def test_norm(on, shape, kind, dtype, param, scale):
    check_norm(on, shape, kind, dtype, param, scale)


@pytest.mark.parametrize("scale", [0.0, 5.0])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("shape", [(16, 20480), (4240, 512), (3200, 1552)])
def test_norm_of_many_rows(on, shape, kind, dtype, scale):
    """Rows too long for registers; more blocks than take the amax; warps that share a row."""
    check_norm(on, shape, kind, dtype, "f32", scale)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norm_amax_alone(on, kind):
    x, gamma = random((300, 144), "bf16"), random((144,), "f32", 1)
    beta = gamma[::-1].copy() if kind == "layernorm" else None
    hp = P.NormSpec(kind=kind, format="e4m3", hp=True, data=False)
    expected = np.abs(
        np.asarray(on("cuda", lambda x, s: P.norm(x, gamma, beta, s, hp).hp, x, np.float32(0)), np.float32)
    )
    for if_unseeded in (False, True):
        spec = P.NormSpec(kind=kind, format="e4m3", data=False, amax=True, if_unseeded=if_unseeded)
        for scale in (0.0, 2.0):
            amax = on("cuda", lambda x, s, spec=spec: P.norm(x, gamma, beta, s, spec).amax, x, np.float32(scale))
            assert amax == (0.0 if if_unseeded and scale else expected.max())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_finite_is_loud(on, value):
    x = random((32, 64), "bf16")
    x[3, 5] = value
    spec = P.ActivationSpec(kind="swiglu", **ALL)
    out = on("cuda", lambda x, s: P.activation(x, s, spec), x, np.float32(0))
    assert not np.isfinite(out.amax)
    assert np.isnan(out.data.astype(np.float32)[3, 5])
