"""The example on a GPU: custom calls in use, FP8 close to bf16, and a resumed run bit for bit the whole one."""

import json
import re

import pytest

from te_jax.testing import runs

SIZE = ["--width", "512", "--heads", "4", "--seq", "256", "--batch", "8", "--schedule-steps", "40"]
N = 20
# One choice of algorithm in every process, no atomics in XLA's own kernels.
DETERMINISTIC = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    own = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TE_JAX_GEMM_ALGORITHMS": "first"}
    return runs.environment(cache, XLA_FLAGS=DETERMINISTIC, **own)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_train_stop_resume(recipe, env, tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    flags = (*SIZE, "--recipe", recipe)
    printed = runs.train(env, whole, *flags, "--steps", str(2 * N), "--save-every", str(N), "--compare")
    assert re.search(r"40 steps on NVIDIA", printed)
    # Three GEMMs for each of a layer's four linears, whose loop counts once, and for the head.
    assert "te_jax_gemm x15" in printed
    assert re.search(r"on cuda: custom calls from .*_te_jax_cuda", printed)
    summary = json.loads((whole / "summary.json").read_text())["runs"]
    assert abs(summary[recipe]["held_out_loss"] / summary["bf16"]["held_out_loss"] - 1) < 0.02

    runs.train(env, halves, *flags, "--steps", str(N))
    assert f"resumed at step {N}" in runs.train(env, halves, *flags, "--steps", str(2 * N), "--resume")
    runs.assert_same_run(halves, whole, 2 * N)
