"""Norms, activations and activation gradients on CPU: values against NumPy float64, results against the rounded y."""

import jax
import ml_dtypes
import numpy as np
import pytest
from handlers import F32, FP8, call, check_quantized, everything, results_of

from te_jax.primitives.spec import (
    GATED_ACTIVATIONS,
    ActivationGradSpec,
    ActivationSpec,
    NormSpec,
)

DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16]
# y is computed in fp32 and rounded once: half a unit in the last place, and the fp32 error, which matters at ties.
RTOL = {np.float32: 2e-6, ml_dtypes.bfloat16: 2.0**-8, np.float16: 2.0**-11}


def randn(shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def close(got, want, dtype, atol):
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=RTOL[dtype] * 1.01, atol=atol)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


VALUES = {"gelu": gelu, "silu": lambda x: x * sigmoid(x), "relu": lambda x: np.maximum(x, 0)}
VALUES |= {"quick_gelu": lambda x: x * sigmoid(1.702 * x), "squared_relu": lambda x: np.maximum(x, 0) ** 2}
VALUES |= {"geglu": VALUES["gelu"], "swiglu": VALUES["silu"], "glu": sigmoid, "reglu": VALUES["relu"]}
VALUES |= {"qgeglu": VALUES["quick_gelu"], "sreglu": VALUES["squared_relu"]}
KINDS = tuple(VALUES)


def derivative(function, x, step=1e-5):
    """Central difference in float64: error about step**2, 1e-10."""
    return (function(x + step) - function(x - step)) / (2 * step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("scale", [0.0, 17.0])
def test_norm(dtype, kind, zero_centered, scale):
    x, gamma, beta = randn((2, 16, 48), dtype) + dtype(0.5), randn(48, seed=1), randn(48, seed=2)
    spec = everything(NormSpec, "e4m3", kind=kind, zero_centered_gamma=zero_centered, epsilon=1e-3, stats=True)
    layernorm = kind == "layernorm"
    lead = [(x.shape[:-1], F32)]
    results = results_of(spec, x.dtype, x.shape) + lead * (2 if layernorm else 1)
    operands = (x, gamma, beta) if layernorm else (x, gamma)
    outs = call("norm", spec, results, *operands, np.float32(scale))

    x64 = x.astype(np.float64)
    mean = x64.mean(-1, keepdims=True) if layernorm else 0.0
    rstd = 1 / np.sqrt(((x64 - mean) ** 2).mean(-1, keepdims=True) + 1e-3)
    want = (x64 - mean) * rstd * (gamma.astype(np.float64) + zero_centered) + (beta if layernorm else 0)
    close(outs[0], want, dtype, atol=1e-6)
    np.testing.assert_allclose(outs.pop(), rstd[..., 0], rtol=1e-6)
    if layernorm:
        np.testing.assert_allclose(outs.pop(), mean[..., 0], rtol=1e-5, atol=1e-6)
    check_quantized(spec, outs[0], scale, outs)


def test_norm_parameters_in_bfloat16():
    x, gamma = randn((16, 32)), randn(32, ml_dtypes.bfloat16, seed=1)
    spec = NormSpec(format="e4m3", hp=True, data=False)
    (got,) = call("norm", spec, [((16, 32), F32)], x, gamma, np.float32(0))
    x64 = x.astype(np.float64)
    want = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6) * gamma.astype(np.float64)
    close(got, want, np.float32, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_activation(dtype, kind):
    gated = kind in GATED_ACTIVATIONS
    x = (3 * randn((2, 16, 96 if gated else 48))).astype(dtype)
    spec = everything(ActivationSpec, "e4m3", kind=kind)
    outs = call("activation", spec, results_of(spec, x.dtype, (2, 16, 48)), x, np.float32(0))
    x64 = x.astype(np.float64)
    want = VALUES[kind](x64[..., :48]) * (x64[..., 48:] if gated else 1)
    close(outs[0], want, dtype, atol=1e-6)
    check_quantized(spec, outs[0], 0.0, outs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_activation_grad(dtype, kind):
    gated = kind in GATED_ACTIVATIONS
    x = (3 * randn((2, 16, 96 if gated else 48))).astype(dtype)
    dy = randn((2, 16, 48), dtype, seed=1)
    spec = everything(ActivationGradSpec, "e5m2", kind=kind)
    outs = call("activation_grad", spec, results_of(spec, x.dtype, x.shape), dy, x, np.float32(0))
    x64, dy64, function = x.astype(np.float64), dy.astype(np.float64), VALUES[kind]
    if gated:
        a, b = x64[..., :48], x64[..., 48:]
        want = np.concatenate([dy64 * b * derivative(function, a), dy64 * function(a)], -1)
    else:
        want = dy64 * derivative(function, x64)
    close(outs[0], want, dtype, atol=2e-6)
    check_quantized(spec, outs[0], 0.0, outs)


@pytest.mark.parametrize("gate_second", [False, True])
def test_clamped_swiglu(gate_second):
    """By hand, at the limits too: they belong to the inside of a clamp."""
    gate = np.array([-9, -2, 0, 1.5, 2, 2.5, 1e30, np.nan] * 2, np.float32)
    linear = np.array([3, -2, -2.5, 2, 0.5, 1, -1e30, 1] * 2, np.float32)
    x = np.concatenate([linear, gate] if gate_second else [gate, linear])[None]
    fields = {"kind": "clamped_swiglu", "gate_second": gate_second, "limit": 2.0, "alpha": 0.5, "linear_offset": 3.0}
    spec = ActivationSpec(format="e4m3", hp=True, data=False, **fields)
    (got,) = call("activation", spec, [((1, 16), F32)], x, np.float32(0))
    g, u = np.minimum(gate, 2.0).astype(np.float64), np.clip(linear, -2, 2).astype(np.float64) + 3
    np.testing.assert_allclose(got[0], g * sigmoid(g / 2) * u, rtol=2e-6)
    grad = ActivationGradSpec(format="e5m2", hp=True, data=False, **fields)
    (got,) = call("activation_grad", grad, [((1, 32), F32)], np.ones((1, 16), np.float32), x, np.float32(0))
    inside = np.where(gate > 2, 0.0, 1.0), np.where(abs(linear) > 2, 0.0, 1.0)
    s = sigmoid(g / 2)
    want = [inside[0] * u * (s + g / 2 * s * (1 - s)), inside[1] * g * s]
    np.testing.assert_allclose(got[0], np.concatenate(want[::-1] if gate_second else want), rtol=4e-6)


def test_activations_far_out():
    """exp overflows nowhere: silu and gelu go to x and to 0."""
    x = np.tile(np.array([-1e4, -200, -90, 0, 90, 200, 1e4, 3e38], np.float32), (1, 2))
    for kind in ("silu", "gelu", "quick_gelu"):
        spec = ActivationSpec(format="e4m3", hp=True, data=False, kind=kind)
        (got,) = call("activation", spec, [(x.shape, F32)], x, np.float32(0))
        np.testing.assert_allclose(got, np.maximum(x, 0), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("kind", ["relu", "squared_relu"])
def test_relu_passes_nan_on(kind):
    x = np.full((1, 16), np.nan, np.float32)
    spec = ActivationSpec(format="e4m3", hp=True, data=False, kind=kind)
    (got,) = call("activation", spec, [(x.shape, F32)], x, np.float32(0))
    assert np.isnan(got).all()


def test_if_unseeded_norm_reads_nothing_where_a_scale_is_given():
    spec = NormSpec(format="e4m3", data=False, amax=True, if_unseeded=True)
    x, gamma = randn((16, 32)), np.ones(32, np.float32)
    (seeded,) = call("norm", spec, [((), F32)], x, gamma, np.float32(3))
    (unseeded,) = call("norm", spec, [((), F32)], x, gamma, np.float32(0))
    assert seeded == 0
    assert unseeded > 1


@pytest.mark.parametrize(
    ("x", "gamma", "message"),
    [
        (np.zeros((4, 16), np.float32), np.ones(8, np.float32), r"gamma shape: expected \[16\], got \[8\]"),
        (np.zeros((4, 20), np.float32), np.ones(20, np.float32), "last dimension: expected a positive multiple of 16"),
        (np.zeros((4, 16), np.float32), np.ones(16, np.int8), "gamma dtype: expected float32 or bfloat16 or float16"),
    ],
)
def test_norm_errors(x, gamma, message):
    results = [(x.shape, FP8["e4m3"]), ((), F32), ((), F32)]
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: te_jax norm: {message}"):
        call("norm", NormSpec(format="e4m3"), results, x, gamma, np.float32(1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "mish"}, "kind: expected gelu, silu, relu, quick_gelu, .*, clamped_swiglu, got mish"),
        ({"kind": "silu", "gate_second": True}, "gate_second: expected false for an activation without a gate, got"),
        ({"kind": "clamped_swiglu", "limit": -1.0}, "limit: expected a positive number, got -1"),
        ({"kind": "glu", "scaling": "block_128x128"}, "scaling: expected tensor or block_1x128 .*, got block_128x128"),
    ],
)
def test_activation_errors(fields, message):
    x = np.zeros((16, 32), np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: te_jax activation: {message}"):
        call("activation", ActivationSpec(format="e4m3", **fields), [((16, 16), FP8["e4m3"]), ((), F32)], x)


def test_gated_activation_needs_an_even_last_dimension():
    x = np.zeros((4, 33), np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="gated activation: expected an even number, got 33"):
        call(
            "activation",
            ActivationSpec(format="e4m3", kind="swiglu"),
            [((4, 16), FP8["e4m3"]), ((), F32), ((), F32)],
            x,
            np.float32(1),
        )
