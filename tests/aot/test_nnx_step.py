"""What an H200 runs for a step of an nnx model, however its FP8 state is updated: linen's program, pass for pass."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import te_jax as te
from te_jax.testing import aot, hlo

OPTIONS = {"residual": True, "recipe": te.DelayedScaling(amax_history_len=16), "dtype": jnp.bfloat16}


def passes(function, *args):
    """What the program makes: custom calls by target, XLA's fusions and copies."""
    text = aot.compile_for_h200(function, args).as_text()
    return hlo.count_custom_calls(text), text.count(" fusion("), text.count(" copy(")


@pytest.mark.parametrize("grad", [nnx.grad, te.nnx.grad], ids=["nnx.grad", "te.nnx.grad"])
def test_step_is_linens(grad):
    model = te.nnx.LayerNormMLP(256, 512, rngs=nnx.Rngs(0), **OPTIONS)
    module = te.flax.LayerNormMLP(256, 512, **OPTIONS)
    x = jax.ShapeDtypeStruct((128, 256), jnp.bfloat16)
    graphdef, params, fp8 = nnx.split(model, nnx.Param, te.nnx.FP8State)

    def loss(y):
        return (y.astype(jnp.float32) ** 2).mean()

    def step(params, fp8, x):
        model = nnx.merge(graphdef, params, fp8)
        grads = grad(lambda model, x: loss(model(x)))(model, x)
        return nnx.to_pure_dict(grads), nnx.to_pure_dict(nnx.state(model, te.nnx.FP8State))

    def linen_step(variables, x):
        return jax.grad(lambda v: loss(module.apply(v, x)))(variables)

    got = passes(step, params, fp8, x)
    want = passes(linen_step, te.nnx.to_variables(model), x)
    assert want[0]["te_jax_scale_write"] == 1
    if grad is te.nnx.grad:  # keeps the state of what a step didn't use, which te.state.apply does in linen
        assert got[0] == want[0]
    else:
        assert got == want
