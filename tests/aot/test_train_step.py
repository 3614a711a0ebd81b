"""The example's train step as an H200 gets it: the optimized program, without a GPU."""

import collections
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import pytest

import te_jax as te
from te_jax.testing import aot, hlo

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

WIDTH, HEADS, SEQ, BATCH = 256, 4, 128, 8
HEAD_DIM = WIDTH // HEADS


@pytest.fixture(scope="module", params=["delayed", "current", "block"])
def program(request):
    """(optimized HLO, plans of all chains in the program)."""
    import lm_model
    import train_lm

    flags = {"--width": WIDTH, "--heads": HEADS, "--seq": SEQ, "--batch": BATCH}
    args = train_lm.parse_args([str(word) for flag in flags.items() for word in flag])
    recipe = train_lm.RECIPES[request.param]
    model, optimizer = train_lm.make_model(args, recipe), train_lm.make_optimizer(args)
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ + 1), jnp.int32)
    state = jax.eval_shape(lambda tokens: train_lm.init_state(model, optimizer, 0, tokens), tokens)

    def step(state, tokens):
        return train_lm.train_step(model, optimizer, state, tokens)

    compiled = aot.compile_for_h200(step, (state, tokens), jit={"donate_argnums": 0})
    x = jax.ShapeDtypeStruct((BATCH, SEQ, WIDTH), jnp.bfloat16)
    plans = list(te.flax.TransformerLayer(**lm_model.layer_config(model)).plan(x, platform="cuda").values())
    head = te.flax.LayerNormDense(256, use_bias=False, recipe=recipe, dtype=jnp.bfloat16)
    return compiled.as_text(), [*plans, head.plan(x, platform="cuda")]


def instructions(text):
    """(result type, opcode, whole line) of every instruction."""
    for line in text.splitlines():
        found = re.match(r"\s+(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][\w-]*)\(", line)
        if found:
            yield found[1], found[2], line.strip()


def test_the_custom_calls_are_those_of_the_plans(program):
    """The layers are a loop: its body counts once. No GEMM runs twice, none is missing."""
    text, plans = program
    expected = sum((collections.Counter(plan.custom_calls) for plan in plans), collections.Counter())
    assert hlo.count_custom_calls(text) == expected
    assert expected["te_jax_gemm"] == 15  # three for each of five linears


def test_no_product_is_left_to_xla(program):
    """Linears are te_jax's custom calls, attention is cuDNN's."""
    text, _ = program
    assert [line for _, opcode, line in instructions(text) if "__cublas" in line or opcode == "dot"] == []
    # One layer's, in the bodies of the loops over layers.
    assert hlo.count_custom_calls(text, "__cudnn$") == {"__cudnn$fmhaSoftmax": 1, "__cudnn$fmhaSoftmaxBackward": 1}


def test_nothing_converts_copies_or_transposes_fp8(program):
    text, _ = program
    moving = ("convert", "copy", "transpose", "reshape", "concatenate", "pad")
    found = [line for _, opcode, line in instructions(text) if opcode in moving and "f8e" in line]
    # What the loop's stacked residuals start as is a constant, not a tensor that moves.
    assert [line for line in found if "broadcast" not in line] == []


def test_no_stray_copies_or_transposes_between_linears(program):
    """Attention reorders heads; nothing else moves a tensor of a layer's size."""
    text, _ = program
    stray = []
    for result, opcode, line in instructions(text):
        dims = [int(d) for d in re.findall(r"\d+", result.partition("[")[2].partition("]")[0])]
        size = 1
        for d in dims:
            size *= d
        attention = {HEAD_DIM, HEAD_DIM // 2} & set(dims)
        if opcode in ("copy", "transpose") and size >= WIDTH * WIDTH and not attention and "broadcast" not in line:
            stray.append(line)
    assert stray == []
