"""What benchmarks/collective.py times, compiled for two H200: each contestant is what its name says, call by call."""

import pathlib
import re
import sys

import jax
import numpy as np
import pytest

from te_jax.testing import aot, hlo

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import collective_contestants as contestants
import collective_problem

CALLS = 2
M, K, N = 8192, 8192, 4096
X_BYTES = M * K  # of the half that a device has, in bfloat16; all of it in FP8

# By call: custom calls, and collectives of XLA's. An amax of both operands is reduced where they are quantized.
PARTS = {
    "te_jax overlapped": ({"te_jax_collective_gemm": 1}, {}),
    "te_jax plain": ({"te_jax_gemm": 1}, {"rs": "reduce-scatter", "ag": "all-gather"}),
    "te_jax ring": ({"te_jax_gemm": 2}, {"rs": "collective-permute", "ag": "collective-permute"}),
    "custom call": ({"te_jax_collective_gemm": 1}, {}),
    "GEMM and collective": ({"te_jax_gemm": 1}, {"rs": "reduce-scatter", "ag": "all-gather"}),
    "GEMM": ({"te_jax_gemm": 1}, {}),
    "collective": ({}, {"rs": "reduce-scatter", "ag": "all-gather"}),
    "XLA": ({"__cublas$lt$matmul$f8": 1}, {"rs": "reduce-scatter", "ag": "all-gather"}),
    "XLA windowed einsum": ({"__cublas$lt$matmul$f8": 2}, {"rs": "collective-permute", "ag": "collective-permute"}),
}


@pytest.mark.parametrize("op", ["rs", "ag"])
def test_every_call_is_there_and_nothing_else(op):
    mesh = jax.sharding.Mesh(np.array(aot.h200(2)).reshape(1, 2), ("data", "tp"))
    problem = collective_problem.Problem(op, M, K, N, mesh)
    shapes = collective_problem.shapes_of(problem)
    entrants = contestants.contestants(problem)
    assert {c.name for c in entrants} == set(PARTS)
    for c in entrants:
        lowered = contestants.lower(c, problem, shapes, CALLS)
        compiled = lowered.compile(compiler_options=aot.COMPILER_OPTIONS | contestants.options_of(c))
        text, (calls, collectives) = compiled.as_text(), PARTS[c.name]
        found = hlo.count_custom_calls(text, "te_jax_") + hlo.count_custom_calls(text, "__cublas")
        found = {name: n for name, n in found.items() if "gemm" in name or "matmul" in name}
        assert found == {name: n * CALLS for name, n in calls.items()}, c.name
        moved = hlo.count_collectives(text)
        if c.operands == "bf16" and c.name.startswith("te_jax"):
            del moved["all-reduce"]
        if not collectives:
            assert moved.total() == 0, (c.name, moved)
            continue
        assert set(moved) == {collectives[op]}, c.name
        # A gather takes two permutes in XLA's loop and one in te_jax's ring; each loop is there once a call.
        assert moved[collectives[op]] >= CALLS, (c.name, moved)
        if "windowed" in c.name:
            assert len(re.findall(r" custom-call-start\(", text)) == 2 * CALLS, "products on streams of their own"
    del shapes


def test_nothing_is_copied_between_calls():
    """The element that makes a call wait for the one before is written in place."""
    mesh = jax.sharding.Mesh(np.array(aot.h200(2)).reshape(1, 2), ("data", "tp"))
    for op in ("rs", "ag"):
        problem = collective_problem.Problem(op, M, K, N, mesh)
        c = contestants.overlapped_operands(problem)
        lowered = contestants.lower(c, problem, collective_problem.shapes_of(problem), CALLS)
        compiled = lowered.compile(compiler_options=aot.COMPILER_OPTIONS)
        assert compiled.memory_analysis().temp_size_in_bytes < X_BYTES // 4, op
