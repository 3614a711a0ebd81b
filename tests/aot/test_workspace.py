"""The memory that CUDA handlers work in, and command buffers, in programs compiled for an H200."""

import dataclasses
import importlib
import itertools
import math
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from te_jax import primitives as P
from te_jax.primitives.definition import DEFINITIONS
from te_jax.primitives.spec import QuantizingSpec
from te_jax.testing import aot

SCALE = jax.ShapeDtypeStruct((), jnp.float32)
SHAPES = [(16, 16), (2, 128, 64), (129, 272), (3, 5, 4096), (1, 16), (64, 16384)]
FLAGS = [
    dict(zip(("data_t", "dbias", "amax", "hp"), flags, strict=True))
    for flags in itertools.product((False, True), repeat=4)
]
MIB = 1 << 20


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def doubled(shape):
    return (*shape[:-1], 2 * shape[-1])


def passes(shape, flags):
    """(spec, operands, shape of what is written) of each pass over, or to, ``shape``."""
    common = {"format": "e4m3", **flags}
    yield P.QuantizeSpec(**common | {"hp": False}), (array(*shape), SCALE), shape
    for kind in ("rmsnorm", "layernorm"):
        params = (array(shape[-1]),) * (2 if kind == "layernorm" else 1)
        for stats in (False, True):
            yield P.NormSpec(kind=kind, stats=stats, **common), (array(*shape), *params, SCALE), shape
    for kind, gated in (("gelu", False), ("swiglu", True)):
        x = array(*(doubled(shape) if gated else shape))
        yield P.ActivationSpec(kind=kind, **common), (x, SCALE), shape
        yield P.ActivationGradSpec(kind=kind, **common), (array(*shape), x, SCALE), x.shape
    for kind in ("rmsnorm", "layernorm"):
        yield P.NormGradSpec(kind=kind), (array(*shape), array(*shape)), shape


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_python_and_cpp_agree_on_the_size(shape):
    module = importlib.import_module("te_jax._native._te_jax_cuda")
    for flags in FLAGS:
        for spec, operands, written in passes(shape, flags):
            definition = DEFINITIONS[type(spec)]
            rows, cols = math.prod(written[:-1]), written[-1]
            two_sums = spec.kind == "layernorm" if definition.name == "norm_grad" else spec.dbias
            expected = module.workspace_bytes(definition.name, rows, cols, two_sums)
            assert definition.workspace(spec, *operands) == expected, spec
            if not isinstance(spec, QuantizingSpec):
                continue
            if len(written) > 1 and not spec.amax and (spec.data_t or spec.data):
                blocks = dataclasses.replace(spec, scaling="block_1x128")
                expected = module.workspace_bytes(definition.name, rows, cols, spec.dbias, group_rows=written[-2])
                assert definition.workspace(blocks, *operands[:-1]) == expected, blocks
            if len(written) == 2 and definition.name != "norm" and not spec.dbias and not spec.hp:
                by_group = dataclasses.replace(spec, scaling="group", groups=5)
                expected = module.workspace_bytes(definition.name, rows, cols, False, groups=5)
                assert definition.workspace(by_group, *operands) == expected, by_group
    gemm = DEFINITIONS[P.GemmSpec]
    assert gemm.workspace(P.GemmSpec()) == module.workspace_bytes("gemm", 16, 16, False)


def test_every_cuda_handler_has_its_workspace_checked():
    """A new operation with a workspace has to be in ``passes`` above."""
    checked = {type(spec) for spec, _, _ in passes((16, 16), FLAGS[0])} | {P.GemmSpec}
    assert checked == {spec_type for spec_type, d in DEFINITIONS.items() if d.workspace is not None}


def chain(x, w, scale):
    for _ in range(3):
        q = P.quantize(x, scale, P.QuantizeSpec(format="e4m3", dbias=True))
        x, _ = P.gemm(q.data, w, P.GemmSpec(), lhs_scale_inv=q.scale_inv, rhs_scale_inv=scale)
    return x


CHAIN = (array(256, 512), array(512, 512, dtype=jnp.float8_e4m3fn), SCALE)


def test_calls_that_follow_each_other_share_their_workspace():
    """Three GEMMs of 32 MiB of workspace each: 32 MiB, and what the small tensors take."""
    used = aot.compile_for_h200(chain, CHAIN).memory_analysis().temp_size_in_bytes
    assert 32 * MIB <= used < 34 * MIB


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from test_workspace import CHAIN, chain
from te_jax.testing import aot
aot.compile_for_h200(chain, CHAIN)
"""


def test_custom_calls_are_captured_in_command_buffers_unless_told_otherwise(tmp_path):
    """XLA's thunks: what the program runs, indented what is captured."""

    def thunks(folder, **environment):
        environment |= {"XLA_FLAGS": f"--xla_dump_to={folder} " + os.environ.get("XLA_FLAGS", "")}
        program = PROGRAM.format(tests=str(pathlib.Path(__file__).parent))
        subprocess.run([sys.executable, "-c", program], env=os.environ | environment, capture_output=True, check=True)
        # "thunk_sequence_after_thunk_passes" comes first; it is not there if they changed nothing.
        path = min(folder.glob("*jit_chain.thunk_sequence*.txt"), key=lambda path: "after" not in path.name)
        lines = [line for line in path.read_text().splitlines() if "kC" in line]
        outside = [line.split()[1] for line in lines if not line.startswith(" ")]
        return outside, [line.split()[1] for line in lines if line.startswith(" ")]

    assert thunks(tmp_path / "on") == (["kCommandBuffer"], ["kCustomCall"] * 6)
    assert thunks(tmp_path / "off", TE_JAX_COMMAND_BUFFERS="0") == (["kCustomCall"] * 6, [])
