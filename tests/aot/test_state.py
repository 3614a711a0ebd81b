"""FP8 state in a program compiled for an H200: a few kernels for all quantizers of a run."""

import re

import jax
import numpy as np

from te_jax.quant import state
from te_jax.recipe import DelayedScaling
from te_jax.testing import aot

KERNEL = re.compile(r"= (?:\([^()]*\)|\S+) (?:fusion|reduce|copy|transpose|concatenate|sort|while|custom-call)\(")


def test_read_and_write_of_twelve_quantizers_are_seven_kernels():
    recipe = DelayedScaling()
    fp8_max = np.float32([448, 448, 57344] * 4)

    def step(leaves, amax, scale):
        view = state.read(leaves, fp8_max, recipe)
        return view.scale, state.write(view, scale, amax, like=leaves)

    vector = jax.ShapeDtypeStruct((12,), np.float32)
    text = aot.compile_for_h200(step, (jax.eval_shape(lambda: state.init(12, recipe)), vector, vector)).as_text()
    assert len(KERNEL.findall(text[text.index("ENTRY") :])) <= 7
