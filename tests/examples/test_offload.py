"""The offload example: a row for each policy, the same losses, and a plot."""

import json
import os
import pathlib
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def test_the_table(tmp_path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(EXAMPLES.parent)}
    flags = ["--layers=2", "--width=64", "--seq=32", "--batch=1", "--steps=3", f"--out={tmp_path}"]
    command = [sys.executable, str(EXAMPLES / "offload.py"), "--policy", "save", "offload", *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    header, *lines = done.stdout.splitlines()
    assert header.split() == ["policy", "step", "(ms)", "device", "(MB)", "host", "(MB)", "last", "loss"]
    assert [line.split()[0] for line in lines[:2]] == ["save", "offload"]
    save, offload = json.loads((tmp_path / "policies.json").read_text())
    assert save["losses"] == offload["losses"]
    assert save["losses"][-1] < save["losses"][0]
    assert (tmp_path / "policies.png").stat().st_size > 5000
