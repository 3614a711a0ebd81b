"""examples/collective_matmul.py as a user runs it, on 8 CPU devices."""

import re
import subprocess
import sys

import pytest

from te_jax.testing.compiling import xla_flags
from te_jax.testing.runs import EXAMPLES, environment

TINY = ["--layers", "2", "--width", "64", "--seq", "64", "--batch", "4", "--steps", "3", "--data", str(EXAMPLES)]


def run(tmp_path, *flags):
    command = [sys.executable, str(EXAMPLES / "collective_matmul.py"), *TINY, *flags]
    env = environment(tmp_path / "cache", JAX_PLATFORMS="cpu", XLA_FLAGS=xla_flags(8))
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)


def test_the_loss_is_that_of_one_device(tmp_path):
    done = run(tmp_path, "--tensor-parallel", "4", "--overlap", "overlapped", "--recipe", "delayed")
    assert done.returncode == 0, done.stdout + done.stderr
    (apart,) = re.findall(r"of all steps ([\d.]+)% apart at most", done.stdout)
    assert float(apart) < 0.5  # roundings of bfloat16 sums, and what FP8 makes of them
    assert re.search(r"train step; .*te_jax_collective_gemm x8", done.stdout)
    assert done.stdout.count(", wgrad of what was gathered") == 2
    assert "loss after 3 steps on 8 cpu devices" in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tensor-parallel", "3"], "devices: expected a multiple of --tensor-parallel 3, got 8"),
        (["--heads", "4"], "--heads: expected a multiple of --tensor-parallel 8, got 4"),
        (["--tensor-parallel", "1"], "--batch: expected a multiple of 8, got 4"),
    ],
)
def test_sizes_that_do_not_fit(tmp_path, flags, message):
    done = run(tmp_path, *flags)
    assert done.returncode == 1
    assert done.stderr.strip() == f"collective_matmul: {message}"
