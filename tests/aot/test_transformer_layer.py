"""A TransformerLayer's gradient as an H200 gets it: custom calls, attention, FP8 state, and nothing else."""

import collections
import math
import re

import jax
import jax.numpy as jnp
import pytest

import te_jax as te
from te_jax.testing import aot, hlo

BATCH, SEQ, HEADS, HEAD_DIM, HIDDEN = 8, 128, 4, 64, 512
WIDTH = HEADS * HEAD_DIM
NO_WORK = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")


def instructions(text):
    """(opcode, dims of every result, whole line) of what the entry computation runs."""
    for line in text[text.index("\nENTRY") :].splitlines():
        found = re.match(r"\s+(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][\w-]*)\(", line)
        if found and found[2] not in NO_WORK:
            dims = [tuple(int(d) for d in dims.split(",") if d) for dims in re.findall(r"\[([\d,]*)\]", found[1])]
            yield found[2], dims, line.strip()


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("recipe", [te.DelayedScaling(amax_history_len=16), te.CurrentScaling()], ids=lambda r: r.name)
def test_norms_and_residuals_leave_nothing_to_xla(recipe, norm):
    layer = te.flax.TransformerLayer(
        HEADS, HIDDEN, recipe=recipe, dtype=jnp.bfloat16, norm=norm, attention_implementation="xla"
    )
    x = jax.ShapeDtypeStruct((BATCH, SEQ, WIDTH), jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)

    def step(variables, x, dy):
        y, pullback = jax.vjp(layer.apply, variables, x)
        return y, pullback(dy)

    text = aot.compile_for_h200(step, (variables, x, x)).as_text()
    plans = layer.plan(x, platform="cuda").values()
    expected = sum((collections.Counter(plan.custom_calls) for plan in plans), collections.Counter())
    assert hlo.count_custom_calls(text) == expected
    assert expected["te_jax_norm_grad"] == expected["te_jax_norm"] == 2

    state_size = max((math.prod(leaf.shape) for leaf in jax.tree.leaves(te.state.split(variables)[1])), default=0)
    left = []
    for _, results, line in instructions(text):
        attention = all({HEAD_DIM, HEAD_DIM // 2} & set(dims) or dims.count(SEQ) == 2 for dims in results[:1])
        state = all(math.prod(dims) <= state_size and dims != (WIDTH,) for dims in results)
        if "te_jax_" not in line and not attention and not state:
            left.append(line)
    assert left == []
