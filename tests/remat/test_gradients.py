"""Gradients don't depend on what is saved, offloaded or recomputed: bit for bit, FP8 state included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import te_jax as te
from te_jax.testing.compare import assert_trees_identical

BF16 = jnp.bfloat16
POLICIES = {
    "some": te.remat.policy(("fc1",), ("attn_norm", "core_attn", "context", "act", "fc2"), min_bytes=0),
    "all": te.remat.policy([name for name in te.remat.NAMES if name.endswith(("_input", "_kernel"))] + ["context"]),
}


def x_of(seed=0):
    return jax.random.normal(jax.random.key(seed), (2, 32, 64), BF16)


def total(y):
    return jnp.mean(y.astype(jnp.float32) ** 2)


@pytest.fixture(scope="module", params=[None, te.DelayedScaling(amax_history_len=2)], ids=["none", "delayed"])
def linen(request):
    """policy -> gradients of a stack of linen layers, and those without a policy."""
    layer = te.flax.TransformerLayer(4, 64, num_kv_heads=2, recipe=request.param, dtype=BF16, dropout_rate=0.1)
    variables = te.flax.LayerStack(layer, 3).init(jax.random.key(1), x_of())

    def gradients(policy):
        def loss(variables, x):
            key = {"dropout": jax.random.key(2)}
            return total(te.flax.LayerStack(layer, 3, policy).apply(variables, x, deterministic=False, rngs=key))

        return te.remat.jit(jax.value_and_grad(loss, argnums=(0, 1)))(variables, x_of())

    return gradients, gradients(None)


@pytest.mark.parametrize("policy", POLICIES)
def test_stack_of_linen_layers(linen, policy):
    gradients, want = linen
    assert_trees_identical(gradients(POLICIES[policy]), want)


def test_stack_of_nnx_layers():
    recipe = te.DelayedScaling(amax_history_len=2)

    def step(policy):
        def make(rngs):
            return te.nnx.LayerNormMLP(64, 64, recipe=recipe, dtype=BF16, dropout_rate=0.1, rngs=rngs)

        model = te.nnx.LayerStack(make, 3, policy=policy, rngs=nnx.Rngs(0, dropout=1))
        graphdef, state = nnx.split(model)

        def gradients(state, x):
            model = nnx.merge(graphdef, state)
            grads = te.nnx.grad(lambda model: total(model(x)))(model)
            return nnx.to_pure_dict(grads), nnx.to_pure_dict(nnx.state(model, te.nnx.FP8State))

        return te.remat.jit(gradients)(state, x_of())

    want = step(None)
    assert len({leaf.shape[0] for leaf in jax.tree.leaves(want)}) == 1  # stacked over layers
    assert_trees_identical(step(POLICIES["some"]), want)


def test_stacks_have_the_layers_of_a_loop():
    """linen's stack, nnx's and a loop over slices of the parameters are the same function."""
    layer = te.flax.LayerNormMLP(64, 64, residual=True, recipe=None, dtype=jnp.float32)
    stack, x = te.flax.LayerStack(layer, 3, POLICIES["some"]), x_of().astype(jnp.float32)
    variables = stack.init(jax.random.key(1), x)
    want = x
    for i in range(3):
        want = layer.apply({"params": jax.tree.map(lambda leaf, i=i: leaf[i], variables["params"]["layers"])}, want)
    np.testing.assert_allclose(stack.apply(variables, x), want, rtol=1e-5, atol=1e-5)

    model = te.nnx.LayerStack(
        lambda rngs: te.nnx.LayerNormMLP(64, 64, residual=True, rngs=rngs), 3, policy=None, rngs=nnx.Rngs(0)
    )
    te.nnx.update(model, variables)
    np.testing.assert_allclose(model(x), want, rtol=1e-5, atol=1e-5)


def test_a_plain_scan():
    weights = jax.random.normal(jax.random.key(0), (3, 2, 64, 64)) / 8
    x = x_of(1).astype(jnp.float32)

    def layer(x, w):
        x = te.remat.name(x, "attn_norm")
        return x + jnp.tanh(x @ w[0]) @ w[1], None

    def loop(weights, x):
        for w in weights:
            x = x + jnp.tanh(x @ w[0]) @ w[1]
        return total(x)

    policy = te.remat.policy(offload=("decoder_layer_input",), min_bytes=0)
    loss = lambda weights, x: total(te.remat.scan(layer, x, weights, policy=policy)[0])  # noqa: E731
    got = te.remat.jit(jax.grad(loss, argnums=(0, 1)), carry=True)(weights, x)
    for a, b in zip(got, jax.grad(loop, argnums=(0, 1))(weights, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
