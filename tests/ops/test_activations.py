"""Every activation op without a recipe: values and gradients against fp64, and its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_jax as te
from te_jax import ops
from te_jax.ops.activation import ACTIVATIONS, GATED
from te_jax.primitives.spec import ActivationSpec
from te_jax.testing import oracle

CLAMPS = {"limit": 1.5, "alpha": 0.75, "linear_offset": -0.5}
CASES = {
    **{op.__name__: (op(), {}) for op in ACTIVATIONS},
    **{f"{op.__name__}, second": (op(gate="second"), {"gate_second": True}) for op in GATED},
    "clamped": (ops.ClampedSwiGLU(**CLAMPS), CLAMPS),
}


@pytest.mark.parametrize(("op", "fields"), CASES.values(), ids=CASES)
def test_values_and_gradients(op, fields):
    x = 2 * np.random.default_rng(0).standard_normal((3, 5, 14)).astype(np.float32)
    chain = te.Sequential([op])
    y, pullback = jax.vjp(lambda x: chain.apply({}, x), x)
    dy = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    np.testing.assert_allclose(y, oracle.activation(op.kind, x, **fields), rtol=2e-6, atol=1e-6)
    want = oracle.activation_grad(op.kind, dy, x, **fields)
    # A slope is a sum of terms that cancel, and each is off by some units of fp32: of the tanh form of GELU,
    # (1 + tanh) / 2 and x (1 - tanh^2) du / 2 with du < 1 + x^2 / 8.
    # They are multiplied by dy, and by the other half if gated.
    halves = np.split(np.abs(x), 2 if type(op) in GATED else 1, axis=-1)
    most = np.max(halves, axis=0)
    size = np.abs(dy) * (1 + most * (1 + most**2 / 8)) * (1 + most if len(halves) > 1 else 1)
    error = np.abs(pullback(dy)[0] - want)
    assert np.all(error <= 4e-6 * np.abs(want) + 4 * 2.0**-24 * np.concatenate([size] * len(halves), -1))


def test_a_clamp_passes_the_cotangent_on_at_its_limit():
    """As TransformerEngine's; half of it, as jnp.minimum gives, is neither side's derivative."""
    limit, outside = 2.0, 2.5
    x = jnp.array([[limit, limit, outside, limit, 2.0, -2.0, 1.0, -outside]])  # gates, then values
    dx = jax.grad(lambda x: te.Sequential([ops.ClampedSwiGLU(limit=limit)]).apply({}, x).sum())(x)[0]
    s = 1 / (1 + np.exp(-1.702 * limit))
    slope, value = s * (1 + 1.702 * limit * (1 - s)), limit * s
    np.testing.assert_allclose(dx, [3 * slope, -slope, 0, -slope, value, value, value, 0], rtol=1e-5)


def test_flax_and_torch_glu_gate_the_second_half():
    import flax.linen as nn

    x = jax.random.normal(jax.random.key(0), (4, 16))
    np.testing.assert_allclose(te.Sequential([ops.GLU(gate="second")]).apply({}, x), nn.glu(x), rtol=1e-6)


def test_interleaved_weights_are_brought_into_order_as_the_docstring_says():
    """Gate and value columns in alternating blocks of k, as TransformerEngine's glu_interleave_size and GPT-OSS."""
    rows, features = 6, 8
    x, kernel = jax.random.normal(jax.random.key(0), (3, rows)), jax.random.normal(jax.random.key(1), (rows, 16))
    for k in (1, 4):
        h = np.asarray(x @ kernel).reshape(3, features // k, 2, k)
        want = oracle.activation("swiglu", np.concatenate([h[:, :, 0].reshape(3, -1), h[:, :, 1].reshape(3, -1)], -1))
        ordered = kernel.reshape(rows, features // k, 2, k).swapaxes(1, 2).reshape(rows, 2 * features)
        chain = te.Sequential([ops.Linear(16, use_bias=False), ops.SwiGLU()])
        got = chain.apply({"params": {"ops_0": {"kernel": ordered}}}, x)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ops.GLU(gate="left"), ValueError, "te_jax.GLU: gate: expected 'first' or 'second', got 'left'"),
        (lambda: ops.ClampedSwiGLU(limit=-1), ValueError, "limit: expected a positive number, got -1.0"),
        (lambda: ops.ClampedSwiGLU(alpha="1"), TypeError, "alpha: expected a Python number, got '1'"),
        (lambda: ops.ClampedSwiGLU(linear_offset=float("inf")), ValueError, "linear_offset: expected a finite number"),
        (lambda: te.Sequential([ops.SReGLU()]).apply({}, jnp.ones((2, 5))), ValueError, "SReGLU: x: expected an even"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_defaults_of_the_primitive_and_of_the_op_are_one():
    op, spec = ops.ClampedSwiGLU(), ActivationSpec(format="e4m3")
    assert (op.limit, op.alpha, op.linear_offset) == (spec.limit, spec.alpha, spec.linear_offset)


@pytest.mark.parametrize("activation", ["squared_relu", "clamped_swiglu"])
def test_modules_take_every_kind(activation):
    x = jax.random.normal(jax.random.key(0), (4, 16))
    mlp = te.flax.LayerNormMLP(16, 32, activation=activation)
    variables = mlp.init(jax.random.key(1), x)
    params = variables["params"]
    h = np.asarray(x, np.float64)
    h = h / np.sqrt((h**2).mean(-1, keepdims=True) + 1e-6) @ oracle.f64(params["fc1"]["kernel"])
    want = oracle.activation(activation, h) @ oracle.f64(params["fc2"]["kernel"])
    np.testing.assert_allclose(mlp.apply(variables, x), want, rtol=1e-4, atol=1e-5)
