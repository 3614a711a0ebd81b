"""L2Normalization, with a recipe (the norm's custom calls) and without one: values and gradients against fp64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_jax as te
from te_jax import ops
from te_jax.testing import oracle


def reference(x, dy, epsilon):
    """(y, dx): dx by the Jacobian of each row."""
    x, dy = oracle.f64(x), oracle.f64(dy)
    inverse = 1 / np.sqrt((x**2).sum(-1, keepdims=True) + epsilon)
    y = x * inverse
    jacobian = (np.eye(x.shape[-1]) - y[..., :, None] * y[..., None, :]) * inverse[..., None]
    return y, np.einsum("...i,...ij->...j", dy, jacobian)


@pytest.mark.parametrize("recipe", [None, te.CurrentScaling()], ids=["none", "current"])
@pytest.mark.parametrize(("dtype", "rounding"), [(jnp.float32, 3e-6), (jnp.bfloat16, 2.0**-8)], ids=["f32", "bf16"])
@pytest.mark.parametrize("epsilon", [1e-6, 30.0])
def test_values_and_gradients(epsilon, dtype, rounding, recipe):
    x, dy = (jnp.asarray(np.random.default_rng(i).standard_normal((2, 5, 48)), dtype) for i in (0, 1))
    x = x.at[0, 0].set(0)  # epsilon is all that is under the root
    chain = te.Sequential([ops.L2Normalization(epsilon)], recipe=recipe, dtype=dtype)
    assert chain.init(jax.random.key(0), x) == {}
    y, pullback = jax.vjp(jax.jit(lambda x: chain.apply({}, x)), x)
    want, dx = reference(x, dy, epsilon)
    np.testing.assert_allclose(oracle.f64(y), want, rtol=rounding, atol=1e-7)
    # dx is a difference; its error is relative to the terms, those of dy / |x|.
    np.testing.assert_allclose(oracle.f64(pullback(dy)[0]), dx, rtol=rounding, atol=1e-6 * float(np.abs(dx).max()))
    calls = {} if recipe is None else {"te_jax_norm": 1, "te_jax_norm_grad": 1}
    assert chain.plan(x).custom_calls == calls


def test_second_derivatives_without_a_recipe():
    x = jax.random.normal(jax.random.key(0), (3, 8))
    plain = lambda x: jnp.sum(jnp.sin(x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)))  # noqa: E731
    chain = te.Sequential([ops.L2Normalization()])
    got = jax.hessian(lambda x: jnp.sum(jnp.sin(chain.apply({}, x))))(x)
    np.testing.assert_allclose(got, jax.hessian(plain)(x), rtol=1e-4, atol=1e-4)
