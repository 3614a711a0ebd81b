"""A transformer layer's attention as an H200 gets it: cuDNN forward and backward, and nothing of XLA's in its place."""

import re

import jax
import jax.numpy as jnp
import pytest

import te_jax as te
from te_jax.flax.core_attention import core_attention
from te_jax.testing import aot, hlo

BATCH, SEQ, WIDTH, HEADS, GROUPS = 2, 384, 512, 4, 2
HEAD_DIM = WIDTH // HEADS
CALLS = {"__cudnn$fmhaSoftmax": 1, "__cudnn$fmhaSoftmaxBackward": 1}


def program(**options):
    """The optimized HLO of a layer's forward and backward pass, parameters in bfloat16."""
    layer = te.flax.TransformerLayer(
        HEADS, 2 * WIDTH, num_kv_heads=GROUPS, recipe=te.DelayedScaling(), dtype=jnp.bfloat16,
        param_dtype=jnp.bfloat16, **options,
    )  # fmt: skip
    x = jax.ShapeDtypeStruct((BATCH, SEQ, WIDTH), jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)

    def both(variables, x, dy):
        y, vjp = jax.vjp(layer.apply, variables, x)
        return y, vjp(dy)

    return aot.compile_for_h200(both, (variables, x, x)).as_text()


@pytest.fixture(scope="module")
def text():
    return program()


def instructions(text):
    """(opcode, dimensions, line) of every array result of the entry's instructions."""
    for line in text[text.index("\nENTRY") :].splitlines():
        found = re.match(r"\s+(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][\w-]*)\(", line)
        if found:
            for dims in re.findall(r"\[([\d,]+)\]", found[1]):
                yield found[2], tuple(map(int, dims.split(","))), line.strip()


def test_forward_and_backward_are_cudnns(text):
    assert hlo.count_custom_calls(text, "__cudnn$") == CALLS


def test_there_is_no_attention_matrix_and_no_softmax(text):
    assert [line for _, dims, line in instructions(text) if dims[-2:] == (SEQ, SEQ)] == []
    assert "exponential(" not in text.replace(" ", "")


def test_four_kernels_between_the_projections_and_cudnn(text):
    """Queries, keys and values are rotated or cut out by one kernel each; one joins their gradients. No transposes."""
    between = []
    for opcode, dims, _ in instructions(text):
        if opcode in ("fusion", "copy", "transpose") and len(dims) == 4 and dims[-1] == HEAD_DIM:
            between.append((opcode, dims))
    heads = sorted(dims[2] for _, dims in between)
    assert {opcode for opcode, _ in between} == {"fusion"}
    assert heads == sorted([HEADS, GROUPS, GROUPS, HEADS + 2 * GROUPS])


def test_xla_when_asked():
    assert hlo.count_custom_calls(program(attention_implementation="xla"), "__cudnn$") == {}


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize(("tokens", "seen", "head_dim"), [(1, 1, 64), (1, 64, 12), (5, 1, 64), (64, 64, 1), (7, 7, 8)])
def test_float16_compiles_where_products_are_with_vectors(tokens, seen, head_dim, implementation):
    q, k = (jax.ShapeDtypeStruct((BATCH, length, 2, head_dim), jnp.float16) for length in (tokens, seen))

    def both(q, k, v, dout):
        out, vjp = jax.vjp(lambda *x: core_attention(*x, causal=False, implementation=implementation), q, k, v)
        return out, vjp(dout)

    assert all(x.dtype == jnp.float16 for x in jax.tree.leaves(jax.eval_shape(both, q, k, k, q)))
    aot.compile_for_h200(both, (q, k, k, q))


def test_statistics_are_computed_only_for_a_gradient():
    module = te.flax.MultiHeadAttention(HEADS, GROUPS, dtype=jnp.bfloat16, causal=True)
    x = jax.ShapeDtypeStruct((BATCH, SEQ, WIDTH), jnp.bfloat16)
    variables = jax.eval_shape(module.init, jax.random.key(0), x)
    forward = aot.compile_for_h200(module.apply, (variables, x)).as_text()
    assert hlo.count_custom_calls(forward, "__cudnn$") == {"__cudnn$fmhaSoftmax": 1}
    assert f"f32[{BATCH},{HEADS},{SEQ}]" not in forward
