"""A grouped MLP's training step compiled for an H200: its custom calls, and what XLA has left to do."""

import jax
import jax.numpy as jnp
import pytest

import te_jax as te
from te_jax import ops
from te_jax.testing import aot, hlo

G, TOKENS, K, N = 8, 1000, 256, 512
CALLS = {"te_jax_quantize": 4, "te_jax_activation": 1, "te_jax_activation_grad": 1}
CALLS |= {"te_jax_grouped_gemm": 4, "te_jax_grouped_wgrad": 2}
RECIPES = {"delayed": te.DelayedScaling(amax_history_len=16), "current": te.CurrentScaling(), "none": None}


def compile_step(recipe):
    chain = [ops.GroupedLinear(G, 2 * N, use_bias=False), ops.SwiGLU(), ops.GroupedLinear(G, K, use_bias=False)]
    module = te.Sequential(chain, recipe=recipe, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    x, sizes = jax.ShapeDtypeStruct((TOKENS, K), jnp.bfloat16), jax.ShapeDtypeStruct((G,), jnp.int32)
    variables = jax.eval_shape(module.init, jax.random.key(0), x, sizes, sizes)

    def step(variables, x, sizes, dy):
        y, vjp = jax.vjp(lambda v, x: module.apply(v, x, sizes, sizes), variables, x)
        return y, vjp(dy)

    return aot.compile_for_h200(step, (variables, x, sizes, x))


@pytest.mark.parametrize("name", RECIPES)
def test_grouped_mlp(name):
    compiled = compile_step(RECIPES[name])
    state = {"te_jax_scale_read": 2, "te_jax_scale_write": 2} if name == "delayed" else {}
    expected = CALLS | state if name != "none" else {"te_jax_grouped_gemm": 4, "te_jax_grouped_wgrad": 2}
    text = compiled.as_text()
    assert hlo.count_custom_calls(text) == expected
    # No product, no transpose and no cast of a tensor; nothing is fetched by the host.
    for opcode in (" dot(", " transpose(", " while(", " conditional(", " send(", " outfeed("):
        assert opcode not in text, opcode
    big = [line for line in text.splitlines() if " fusion(" in line and f"[{TOKENS}," in line.split(" fusion(")[0]]
    assert not big if name != "none" else len(big) <= 2  # SwiGLU and its gradient in high precision


def test_sizes_are_checked_once():
    """What the kernels are given where sizes can't be is some arithmetic over [G], shared by all calls."""
    text = compile_step(RECIPES["current"]).as_text()
    small = [line for line in text.splitlines() if " fusion(" in line and f"[{G}]" in line.split(" fusion(")[0]]
    assert len(small) <= 8, "\n".join(small)
