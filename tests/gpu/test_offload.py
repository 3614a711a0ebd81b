"""Activations in host memory on a GPU: the same gradients, less device memory, and warnings where copies don't hide."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_jax as te

NAMES = ("attn_norm", "core_attn", "context", "qkv_linear", "fc1")
BF16 = jnp.bfloat16
LAYERS, X = 4, (2, 512, 512)


def compiled(policy, recipe):
    layer = te.flax.TransformerLayer(8, 1024, num_kv_heads=2, recipe=recipe, dtype=BF16)
    model = te.flax.LayerStack(layer, LAYERS, policy)
    x = jax.random.normal(jax.random.key(0), X, BF16)
    variables = jax.jit(model.init)(jax.random.key(1), x)

    def loss(variables, x):
        return jnp.mean(model.apply(variables, x).astype(jnp.float32) ** 2)

    step = te.remat.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    return step.lower(variables, x).compile(), variables, x


@pytest.mark.parametrize("recipe", [None, te.DelayedScaling(amax_history_len=2)], ids=["none", "delayed"])
def test_gradients_are_those_of_tensors_on_the_device(recipe):
    """A residual of another layer, which older compilers of XLA read, is an error of order 1."""
    on_device, *args = compiled(te.remat.policy(NAMES), recipe)
    on_host, *_ = compiled(te.remat.policy(offload=NAMES, min_bytes=0), recipe)
    memory, without = (c.memory_analysis() for c in (on_host, on_device))
    assert memory.host_temp_size_in_bytes > LAYERS * np.prod(X) * 2 * 4  # x, context, and what attention reads
    assert without.host_temp_size_in_bytes == 0
    assert memory.temp_size_in_bytes < without.temp_size_in_bytes
    want = jax.device_get(on_device(*args))
    for _ in range(3):  # what is in host memory from the call before doesn't matter
        got = jax.device_get(on_host(*args))
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
            print(recipe, jax.tree_util.keystr(path), error)
            assert error < (1e-2 if recipe is None else 5e-2), jax.tree_util.keystr(path)


def test_a_program_without_the_options_warns():
    policy = te.remat.policy(offload=("attn_norm",), min_bytes=0)
    layer = jax.checkpoint(lambda x: jnp.tanh(te.remat.name(jnp.sin(x), "attn_norm")), policy=policy)
    x = jnp.linspace(0, 1, 1024)
    grad = lambda x: jax.grad(lambda x: layer(x).sum())(x)  # noqa: E731
    with pytest.warns(te.remat.ExposedCopiesWarning, match="te.remat.jit"):
        exposed = jax.jit(grad)(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hidden = te.remat.jit(grad)(x)
    np.testing.assert_allclose(hidden, (1 - jnp.tanh(jnp.sin(x)) ** 2) * jnp.cos(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(exposed, hidden, rtol=1e-6)
