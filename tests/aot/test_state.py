"""FP8 state in a program compiled for an H200: a kernel that reads and one that writes, for all quantizers of a run."""

import re

import jax
import numpy as np

from te_jax import primitives
from te_jax.quant import state
from te_jax.recipe import DelayedScaling
from te_jax.testing import aot


def test_read_and_write_of_twelve_quantizers_are_two_kernels():
    formats = " ".join(["e4m3", "e4m3", "e5m2"] * 4)

    def step(leaves, amaxes):
        scales = primitives.scale_read(leaves, primitives.ScaleReadSpec(formats=formats))
        spec = primitives.ScaleWriteSpec(formats=formats, used="1" * 12)
        return scales, primitives.scale_write(leaves, amaxes, spec)

    scalars = (jax.ShapeDtypeStruct((), np.float32),) * 12
    leaves = jax.eval_shape(lambda: state.init(12, DelayedScaling()))
    compiled = aot.compile_for_h200(step, (leaves, scalars), options={"xla_gpu_enable_command_buffer": ""})
    assert aot.custom_calls(compiled) == ["te_jax_scale_read", "te_jax_scale_write"]
    text = compiled.as_text()
    opcodes = re.findall(r" ([a-z][\w-]*)\(", text[text.index("ENTRY") :].partition("\n")[2])
    assert set(opcodes) <= {"parameter", "custom-call", "get-tuple-element", "tuple"}
