"""Algorithms chosen by timing: reported, the same in a process that takes the choices, and not of use("first")."""

import json
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from te_jax import primitives as P
from te_jax.primitives import gemm_algorithms

ROOT = pathlib.Path(P.__file__).parents[2]


def operands(m, n, k):
    rng = np.random.default_rng(0)
    lhs, rhs = (rng.standard_normal((rows, k)).astype(ml_dtypes.float8_e4m3fn) for rows in (m, n))
    return lhs, rhs, np.float32(0.25)


def run(lhs, rhs, scale):
    return P.gemm(lhs, rhs, P.GemmSpec(out_dtype="float32"), lhs_scale_inv=scale, rhs_scale_inv=scale)[0]


def choices(*shape):
    text = "m={} n={} k={} ".format(*shape)
    return [choice for choice in gemm_algorithms.report() if choice.gemm.startswith(text)]


PROGRAM = """
import json, sys
sys.path.insert(0, {here!r})
import jax, numpy as np
from test_gemm_algorithms import choices, operands, run
shape = {shape!r}
out = np.asarray(jax.jit(run)(*operands(*shape)))
found = [(choice.source, choice.algorithm) for choice in choices(*shape)]
print(json.dumps({{"found": found, "bytes": out.tobytes().hex()}}))
"""


def test_another_process_runs_the_same_algorithm(on, tmp_path):
    shape = (176, 208, 4096)
    out = on("cuda", run, *operands(*shape))
    (choice,) = choices(*shape)
    assert choice.source == "timed"
    assert choice.candidates > 1
    assert 0 < choice.time_us <= choice.first_us
    path = tmp_path / "algorithms.json"
    gemm_algorithms.save(path)

    environment = os.environ | {"TE_JAX_GEMM_ALGORITHMS_FILE": str(path), "PYTHONPATH": str(ROOT)}
    environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    program = PROGRAM.format(here=str(pathlib.Path(__file__).parent), shape=shape)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    other = json.loads(done.stdout.splitlines()[-1])
    assert other["found"] == [["loaded", choice.algorithm]]
    assert other["bytes"] == out.tobytes().hex()


def test_the_heuristics_first_is_not_timed(on):
    shape = (192, 224, 512)
    gemm_algorithms.use("first")
    try:
        on("cuda", run, *operands(*shape))
    finally:
        gemm_algorithms.use("timed")
    assert choices(*shape) == []


def test_accumulating_in_place_is_timed_elsewhere(on):
    """The candidates run many times; the caller's tensor is added to once."""
    shape = (240, 272, 512)
    lhs, rhs, scale = operands(*shape)
    c = np.full(shape[:2], 3, np.float32)
    spec = P.GemmSpec(out_dtype="float32", beta=1.0, in_place=True)

    def accumulate(lhs, rhs, scale, c):
        return P.gemm(lhs, rhs, spec, lhs_scale_inv=scale, rhs_scale_inv=scale, c=c + jnp.float32(1))[0]

    out = on("cuda", accumulate, lhs, rhs, scale, c)
    assert len(choices(*shape)) == 1
    expected = lhs.astype(np.float64) @ rhs.astype(np.float64).T / 16 + 4
    np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-3)
