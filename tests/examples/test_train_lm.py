"""examples/train_lm.py as a user runs it: train, stop, restore, go on."""

import json
import pathlib
import signal
import subprocess
import time

import numpy as np
import pytest

from te_jax.testing import runs
from te_jax.testing.compiling import xla_flags
from te_jax.testing.runs import EXAMPLES, environment, leaves, losses, steps

TINY = ["--layers", "2", "--width", "32", "--heads", "2", "--seq", "32", "--batch", "4", "--schedule-steps", "20"]
N = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A small corpus: this project's own examples, several times, under names that fall on both sides of the split."""
    folder = tmp_path_factory.mktemp("data")
    for copy in range(12):
        for path in EXAMPLES.glob("*.py"):
            (folder / f"{path.stem}_{copy}.py").write_bytes(path.read_bytes())
    return folder


@pytest.fixture(scope="module")
def env(data):
    return environment(data / "cache", JAX_PLATFORMS="cpu", XLA_FLAGS=xla_flags(1))


def command(data, out, *flags):
    return runs.command(out, *TINY, "--data", str(data), *flags)


def train(data, env, out, *flags, **options):
    return runs.train(env, out, *TINY, "--data", str(data), *flags, **options)


@pytest.fixture(scope="module")
def whole_run(data, env, tmp_path_factory):
    """2N steps in one go, delayed scaling, watched, with bf16 beside it: (folder, output)."""
    out = tmp_path_factory.mktemp("whole")
    flags = ("--steps", str(2 * N), "--save-every", str(N), "--compare", "--health-every", "3")
    return out, train(data, env, out, "--recipe", "delayed", *flags)


def test_the_health_that_a_run_writes(whole_run):
    out, printed = whole_run
    entries = [json.loads(line) for line in (out / "health.jsonl").read_text().splitlines()]
    assert [entry.pop("step") for entry in entries] == [0, 3, 6]
    tags = ("amax", "scale", "saturated", "flushed", "nonfinite")
    linears = ["head/dense", *("layers/" + name for name in ("attn/qkv/qkv_linear", "attn/proj/attn_proj"))]
    linears += [f"layers/mlp/{fc}" for fc in ("fc1", "fc2")]
    names = {
        f"fp8/{linear}/{role}{layer}/{tag}"
        for linear in linears
        for role in ("x", "kernel", "dy")
        for layer in (("/0", "/1") if linear.startswith("layers") else ("",))
        for tag in tags
    }
    assert all(set(entry) == names for entry in entries)
    assert (out / "health.png").stat().st_size > 5000
    assert not (out / "bf16" / "health.jsonl").exists()
    assert "not healthy" not in printed


def test_what_a_run_leaves_behind(whole_run):
    out, printed = whole_run
    assert steps(out) == [N, 2 * N]
    assert [entry["step"] for entry in losses(out)] == list(range(2 * N))
    assert (out / "loss.png").stat().st_size > 5000
    summary = json.loads((out / "summary.json").read_text())
    by_name = summary["runs"]
    assert set(by_name) == {"delayed", "bf16"}
    for run in by_name.values():
        assert np.isfinite(run["held_out_loss"])
        np.testing.assert_allclose(run["bits_per_byte"], run["held_out_loss"] / np.log(2))
        assert pathlib.Path(run["checkpoint"]).is_dir()
    assert losses(out)[-1]["loss"] < losses(out)[0]["loss"]
    assert losses(out) != losses(out / "bf16")
    for text in ("plan of mlp", "SwiGLU", "held-out loss", "bits per byte", "custom calls", str(out / "loss.png")):
        assert text in printed


def test_resume_is_bit_identical(whole_run, data, env, tmp_path):
    whole, _ = whole_run
    train(data, env, tmp_path, "--recipe", "delayed", "--steps", str(N))
    assert steps(tmp_path) == [N]
    printed = train(data, env, tmp_path, "--recipe", "delayed", "--steps", str(2 * N), "--resume")
    assert f"resumed at step {N}" in printed
    runs.assert_same_run(tmp_path, whole, 2 * N)
    saved = leaves(whole, 2 * N)
    assert any("amax_history" in path for path in saved)
    assert any("kernel" in path for path in saved)
    assert sum("mu" in path for path in saved) > 3


def test_interrupt_and_resume(data, env, tmp_path):
    out, log = tmp_path / "run", tmp_path / "log"
    flags = ("--recipe", "none", "--steps", "100000", "--save-every", "100000")
    with log.open("w") as stream:
        process = subprocess.Popen(command(data, out, *flags), env=env, stdout=stream, stderr=stream)
        try:
            wait_for_losses(out, process, log)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=120) == 128 + signal.SIGINT, log.read_text()
        finally:
            process.kill()
    (stopped_at,) = steps(out)
    assert [entry["step"] for entry in losses(out)] == list(range(stopped_at))
    assert "--resume" in log.read_text()

    train(data, env, out, "--recipe", "none", "--steps", str(stopped_at + 2), "--resume")
    assert steps(out) == [stopped_at, stopped_at + 2]
    assert [entry["step"] for entry in losses(out)] == list(range(stopped_at + 2))


def wait_for_losses(out, process, log):
    deadline = time.monotonic() + 200
    while not ((out / "losses.jsonl").exists() and (out / "losses.jsonl").stat().st_size):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def test_a_run_is_not_overwritten_nor_changed(whole_run, data, env):
    out, _ = whole_run
    before = losses(out)
    assert "--resume goes on" in train(data, env, out, "--steps", "4", returncode=1)
    assert "--batch: expected 4" in train(data, env, out, "--resume", "--batch", "2", returncode=1)
    assert losses(out) == before
