"""Forward and backward of linears as an H200 gets them: custom calls, and no kernel of XLA's between them."""

import collections
import re

import jax
import jax.numpy as jnp
import pytest

import te_jax as te
from te_jax import ops
from te_jax.testing import aot, hlo

# What is no kernel. Everything else in the entry computation is one, or a call of a library.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "custom-call"}
TARGETS = {"te_jax_scale_read", "te_jax_scale_write", "te_jax_quantize", "te_jax_gemm"}


def test_a_loop_over_microbatches_quantizes_no_kernel():
    """In its body there is what a microbatch needs: its rows, its custom calls, and sums of gradients and loss."""
    module = te.Sequential([ops.Linear(512)], recipe=te.DelayedScaling(), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16)
    variables = jax.eval_shape(module.init, jax.random.key(0), x)

    def step(variables, x):
        variables = te.quantize_kernels(module, variables, x[:256])
        loss = lambda v, x: jnp.mean(module.apply(v, x).astype(jnp.float32) ** 2)  # noqa: E731
        return te.accumulate_gradients(loss, variables, x, num_microbatches=4)

    text = aot.compile_for_h200(step, (variables, x), options={"xla_gpu_enable_command_buffer": ""}).as_text()
    (body,) = re.findall(r" while\(.*body=%?([\w.-]+)", text)
    body_text = text[text.index(f"%{body} (") :]
    body_text = body_text[: body_text.index("\n}")]
    quantizes = re.findall(r"custom-call\((.*)\), custom_call_target=\"te_jax_quantize\"", body_text)
    assert len(quantizes) == 2  # x and dy
    assert hlo.count_custom_calls(text) == {
        "te_jax_scale_read": 2,
        "te_jax_quantize": 3,
        "te_jax_gemm": 2,  # no one asks for dx
        "te_jax_scale_write": 1,
    }
    assert not re.search(r" (?:copy|transpose)\(", body_text)


def entry(module, tokens, features):
    """(opcode, custom call target) of every instruction of y, vjp = jax.vjp(module); vjp(dy)."""
    x = jax.ShapeDtypeStruct((tokens, features), jnp.bfloat16)
    variables = jax.eval_shape(module.init, jax.random.key(0), x)
    dy = jax.eval_shape(module.apply, variables, x)

    def step(variables, x, dy):
        y, vjp = jax.vjp(module.apply, variables, x)
        return y, vjp(dy)

    text = aot.compile_for_h200(step, (variables, x, dy), options={"xla_gpu_enable_command_buffer": ""}).as_text()
    lines = text[text.index("ENTRY") :].splitlines()
    found = [re.match(r"\s+(?:ROOT )?%?[\w.-]+ = (?:\(.*?\)|\S+) ([a-z][\w-]*)\(.*", line) for line in lines]
    assert sum(found_here is not None for found_here in found) > 10
    return [(m[1], (re.findall(r'custom_call_target="([^"]+)"', m[0]) or [None])[0]) for m in found if m]


@pytest.mark.parametrize("recipe", [te.DelayedScaling(), te.CurrentScaling(), te.BlockScaling()], ids=lambda r: r.name)
def test_scale_bias_and_residual_are_in_the_gemms(recipe):
    """Nothing of XLA's passes over a tensor; with state it scales a scale, and the amax that goes into its books."""
    chain = [ops.StartResidual(), ops.BasicLinear(512), ops.ConstantScale(0.5), ops.Bias(), ops.AddResidual()]
    module = te.Sequential(chain, recipe=recipe, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    found = entry(module, 256, 512)
    state = {"te_jax_scale_read": 1, "te_jax_scale_write": 1} if recipe.stateful else {}
    assert collections.Counter(target for _, target in found if target) == {
        "te_jax_quantize": 3,
        "te_jax_gemm": 3,
        **state,
    }
    kernels = [opcode for opcode, _ in found if opcode not in FREE]
    assert len(kernels) <= (2 if recipe.stateful else 0), kernels


@pytest.mark.parametrize("recipe", [te.DelayedScaling(), te.CurrentScaling(), te.BlockScaling()], ids=lambda r: r.name)
@pytest.mark.parametrize("linears", [1, 3])
def test_a_chain_of_linears_with_biases_is_custom_calls_alone(recipe, linears):
    chain = [ops.Linear(512) for _ in range(linears)]
    module = te.Sequential(chain, recipe=recipe, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    found = entry(module, 256, 512)
    state = {"te_jax_scale_read": 1, "te_jax_scale_write": 1} if recipe.stateful else {}
    want = {"te_jax_quantize": 3 * linears, "te_jax_gemm": 3 * linears, **state}
    assert collections.Counter(target for _, target in found if target) == want
    assert [opcode for opcode, _ in found if opcode not in FREE] == []
