"""The program readers, on programs whose answer is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax import primitives
from te_jax.primitives import QuantizeSpec
from te_jax.testing import hlo

X = jax.ShapeDtypeStruct((16, 32), jnp.bfloat16)


def amax(x):
    return primitives.quantize(x, np.float32(0), QuantizeSpec(format="e4m3", data=False, amax=True)).amax


@jax.jit
def twice(x):
    return amax(x) + amax(2 * x)


def test_calls_of_private_functions_are_followed():
    def function(x):
        return twice(x) + twice(x + 1) + amax(x)

    text = jax.jit(function).trace(X).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@te_jax_quantize(") == 3  # once in the program, twice in a function that is called twice
    assert hlo.count_custom_calls(text) == {"te_jax_quantize": 5}
    assert hlo.count_custom_calls(text, prefix="other") == {}


def test_compiled_programs_with_loops_and_branches():
    def function(x):
        looped = jax.lax.fori_loop(0, 5, lambda i, s: s + amax(x * s.astype(x.dtype)), jnp.float32(1))
        return jax.lax.cond(looped > 3, amax, lambda x: amax(x + 1), x)

    compiled = jax.jit(function).lower(X).compile().as_text()
    assert hlo.count_custom_calls(compiled) == {"te_jax_quantize": 3}


def test_shapes_of_custom_calls():
    compiled = jax.jit(lambda x: primitives.quantize(x, np.float32(1), QuantizeSpec(format="e5m2"))).lower(X).compile()
    (call,) = hlo.custom_calls(compiled.as_text())
    assert call.target == "te_jax_quantize"
    assert call.operands == (("bf16", (16, 32)), ("f32", ()))
    assert call.results == (("f8e5m2", (16, 32)), ("f32", ()), ("f32", ()))


def test_collectives():
    text = """
ENTRY %main (p: f32[8]) -> f32[8] {
  %a = f32[8] all-gather-start(%p)
  %b = f32[8] all-gather-done(%a)
  %c = f32[8] all-reduce(%b), to_apply=%add
}
"""
    assert hlo.count_collectives(text) == {"all-gather": 1, "all-reduce": 1}


def test_what_is_no_program_is_an_error():
    with pytest.raises(ValueError, match="expected StableHLO or HLO with an entry function"):
        hlo.count_custom_calls("nothing")
