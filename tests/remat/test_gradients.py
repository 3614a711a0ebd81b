"""Gradients don't depend on what is saved, offloaded or recomputed. Another layer's residual is an error of order 1."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import te_jax as te

# One policy for models with attention and without.
pytestmark = pytest.mark.filterwarnings("ignore::te_jax.remat.UnusedNamesWarning")

RECIPE = te.DelayedScaling(amax_history_len=2)
F32 = jnp.float32
SOME = te.remat.policy(("fc1",), ("attn_norm", "core_attn", "context", "act", "fc2"), min_bytes=0)
ALL = te.remat.policy([name for name in te.remat.NAMES if name.endswith(("_input", "_kernel"))] + ["context"])
EXACT, FP8 = 1e-5, 1e-2  # XLA fuses differently; the last bit of a float32 may then choose another FP8 number


def x_of(seed=0):
    return jax.random.normal(jax.random.key(seed), (2, 16, 32), F32)


def total(y):
    return jnp.mean(y.astype(F32) ** 2)


def assert_close(got, want, rtol):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= rtol * np.linalg.norm(b), jax.tree_util.keystr(path)


def linen_gradients(layer, policy):
    stack = te.flax.LayerStack(layer, 3, policy)
    variables = jax.jit(te.flax.LayerStack(layer, 3).init)(jax.random.key(1), x_of())

    def loss(variables, x):
        return total(stack.apply(variables, x, deterministic=False, rngs={"dropout": jax.random.key(2)}))

    return te.remat.jit(jax.value_and_grad(loss, argnums=(0, 1)))(variables, x_of())


def test_attention():
    layer = te.flax.TransformerLayer(2, 32, dtype=F32, dropout_rate=0.1)
    assert_close(linen_gradients(layer, SOME), linen_gradients(layer, None), EXACT)


@pytest.mark.parametrize("policy", [SOME, ALL], ids=["some", "all"])
def test_fp8_and_its_state(policy):
    layer = te.flax.LayerNormMLP(32, 32, residual=True, recipe=RECIPE, dtype=F32, dropout_rate=0.1)
    assert_close(linen_gradients(layer, policy), linen_gradients(layer, None), FP8)


def test_stack_of_nnx_layers():
    def step(policy):
        def make(rngs):
            return te.nnx.LayerNormMLP(32, 32, residual=True, recipe=RECIPE, dtype=F32, dropout_rate=0.1, rngs=rngs)

        model = te.nnx.LayerStack(make, 3, policy=policy, rngs=nnx.Rngs(0, dropout=1))
        graphdef, state = nnx.split(model)

        def gradients(state, x):
            model = nnx.merge(graphdef, state)
            grads = te.nnx.grad(lambda model: total(model(x)))(model)
            return nnx.to_pure_dict(grads), nnx.to_pure_dict(nnx.state(model, te.nnx.FP8State))

        return te.remat.jit(gradients)(state, x_of())

    want = step(None)
    assert len({leaf.shape[0] for leaf in jax.tree.leaves(want)}) == 1  # stacked over layers
    assert_close(step(SOME), want, FP8)


def test_stacks_have_the_layers_of_a_loop():
    """linen's stack, nnx's and a loop over slices of the parameters are the same function."""
    layer = te.flax.LayerNormMLP(32, 32, residual=True, dtype=F32)
    stack, x = te.flax.LayerStack(layer, 3, SOME), x_of()
    variables = stack.init(jax.random.key(1), x)
    want = x
    for i in range(3):
        want = layer.apply({"params": jax.tree.map(lambda leaf, i=i: leaf[i], variables["params"]["layers"])}, want)
    np.testing.assert_allclose(stack.apply(variables, x), want, rtol=1e-5, atol=1e-5)

    model = te.nnx.LayerStack(
        lambda rngs: te.nnx.LayerNormMLP(32, 32, residual=True, rngs=rngs), 3, policy=None, rngs=nnx.Rngs(0)
    )
    te.nnx.update(model, variables)
    np.testing.assert_allclose(model(x), want, rtol=1e-5, atol=1e-5)


def test_a_plain_scan():
    weights = jax.random.normal(jax.random.key(0), (3, 2, 32, 32)) / 6
    x = x_of(1)

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
