"""Programs of their own on two devices: one process for each, the example, and the C++ test of schedules."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from te_jax.testing import processes, runs

ROOT = pathlib.Path(__file__).parents[2]
# Multicast stays off; what lies outside of jax's memory pool needs room.
GPUS = {"NCCL_NVLS_ENABLE": "0", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def test_one_process_for_each_device(platform):
    """Values and gradients, forward and backward; then one process is killed, and the other hears of it."""
    port = str(processes.free_port())
    program = str(pathlib.Path(__file__).with_name("process.py"))
    env = {**os.environ, "XLA_FLAGS": "", **GPUS}
    if platform == "cpu":
        env["JAX_PLATFORMS"] = "cpu"
    done = processes.run_together(
        [[sys.executable, program, platform, port, str(process)] for process in range(2)],
        env=env,
        timeout_s=240,
        failure_ends_all=False,
    )
    outputs = "\n\n".join(process.output for process in done)
    assert [process.returncode for process in done] == [0, -signal.SIGKILL], outputs
    assert done[0].output.rstrip().endswith("done"), outputs
    assert re.search(r"an error after [\d.]+ s: ", done[0].output)


@pytest.mark.multigpu
def test_the_example_trains_to_the_loss_of_one_gpu(tmp_path):
    """tests/examples does so on CPU devices."""
    flags = ["--layers", "2", "--width", "256", "--seq", "256", "--batch", "8", "--steps", "5"]
    flags += ["--overlap", "overlapped", "--data", str(runs.EXAMPLES)]
    command = [sys.executable, str(runs.EXAMPLES / "collective_matmul.py"), "--tensor-parallel", "2", *flags]
    env = runs.environment(tmp_path / "cache", **GPUS) | {"CUDA_VISIBLE_DEVICES": "0,1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (apart,) = re.findall(r"of all steps ([\d.]+)% apart at most", done.stdout)
    assert float(apart) < 0.5  # roundings of bfloat16 sums, and what FP8 makes of them


@pytest.mark.multigpu
def test_schedules_and_ten_thousand_calls_in_cpp():
    program = ROOT / "build" / "native-cuda" / "collective_test"
    if not program.exists():
        pytest.skip(
            f"{program.relative_to(ROOT)} isn't built: cmake --build build/native-cuda --target collective_test"
        )
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
