"""The short examples run and do what their text says."""

import os
import pathlib
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def run(name):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_quickstart():
    printed = run("quickstart.py")
    assert "SwiGLU(ops_2): quantizes for the next linear, writes FP8" in printed
    losses = [float(line.split("loss ")[1]) for line in printed.splitlines() if line.startswith("step")]
    assert losses[-1] < 0.5 * losses[0]


def test_resume():
    assert "bit-identical" in run("resume.py")
