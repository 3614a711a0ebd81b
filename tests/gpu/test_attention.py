"""cuDNN's attention against the jnp reference in float32, at lengths and head sizes that don't divide anything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_jax as te
from te_jax.flax.core_attention import core_attention, why_not_cudnn


def value_and_grads(q, k, v, dout, causal, implementation=None):
    out, vjp = jax.vjp(lambda *x: core_attention(*x, causal=causal, implementation=implementation), q, k, v)
    return (out, *vjp(dout))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("tokens", "heads", "groups", "head_dim"),
    [(1, 2, 1, 64), (7, 4, 4, 8), (64, 4, 2, 128), (100, 6, 2, 40), (333, 2, 2, 128), (1024, 8, 1, 96)],
)
def test_values_and_gradients(tokens, heads, groups, head_dim, dtype, causal):
    rng = np.random.default_rng(0)
    shapes = [(2, tokens, n, head_dim) for n in (heads, groups, groups, heads)]
    operands = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    taken = tokens > 1
    assert (why_not_cudnn(*operands[:2], "cuda") is None) == taken
    compiled = jax.jit(lambda *x: value_and_grads(*x, causal)).lower(*operands).compile()
    calls = compiled.as_text().count("__cudnn$fmhaSoftmax")
    assert calls >= 2 if taken else calls == 0
    wide = [x.astype(jnp.float32) for x in operands]
    want = jax.jit(lambda *x: value_and_grads(*x, causal, "xla"))(*wide)
    for name, a, b in zip(("out", "dq", "dk", "dv"), compiled(*operands), want, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        # dq and dk of a single token are 0: compare with what they are sums of.
        size = np.linalg.norm(b) + 1e-2 * np.linalg.norm(np.asarray(want[0]))
        assert np.linalg.norm(a - b) <= (0.012 if dtype == jnp.bfloat16 else 0.003) * size, name


def test_a_layer_with_cudnn_is_one_with_xla():
    """Forward and backward, bfloat16, without quantization, so that nothing else differs."""
    layers = [
        te.flax.TransformerLayer(4, 256, num_kv_heads=2, dtype=jnp.bfloat16, attention_implementation=how)
        for how in ("cudnn", "xla")
    ]
    x = jax.random.normal(jax.random.key(0), (2, 256, 256), jnp.bfloat16)
    variables = layers[0].init(jax.random.key(1), x)

    def loss(variables, layer):
        return (layer.apply(variables, x).astype(jnp.float32) ** 2).mean()

    got, want = (jax.jit(jax.value_and_grad(loss), static_argnums=1)(variables, layer) for layer in layers)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(b)
