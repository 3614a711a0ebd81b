"""examples/train_lm.py as a user runs it: train, stop, restore, go on."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
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


def command(data, out, *flags):
    return [sys.executable, str(EXAMPLES / "train_lm.py"), *TINY, "--data", str(data), "--out", str(out), *flags]


def environment(data):
    root = str(EXAMPLES.parent)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",  # one device
        # The same programs are compiled in every process of this module.
        "JAX_COMPILATION_CACHE_DIR": str(data / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }


def train(data, out, *flags, returncode=0):
    done = subprocess.run(
        command(data, out, *flags), env=environment(data), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == returncode, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(out):
    return [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]


def steps(out):
    return sorted(int(folder.name) for folder in (out / "checkpoints").iterdir() if folder.name.isdigit())


def leaves(out, step):
    """Every array of a checkpoint, by path, through plain orbax."""
    folder = out / "checkpoints" / str(step)
    found = {}
    for item in sorted(p.name for p in folder.iterdir() if (p / "_METADATA").exists()):
        with ocp.StandardCheckpointer() as checkpointer:
            tree = checkpointer.restore((folder / item).absolute())
        for path, leaf in jax.tree.leaves_with_path(tree):
            found[item + jax.tree_util.keystr(path)] = np.asarray(leaf)
    return found


@pytest.fixture(scope="module")
def whole_run(data, tmp_path_factory):
    """2N steps in one go, delayed scaling, with bf16 beside it: (folder, output)."""
    out = tmp_path_factory.mktemp("whole")
    return out, train(data, out, "--recipe", "delayed", "--steps", str(2 * N), "--save-every", str(N), "--compare")


def test_what_a_run_leaves_behind(whole_run):
    out, printed = whole_run
    assert steps(out) == [N, 2 * N]
    assert [entry["step"] for entry in losses(out)] == list(range(2 * N))
    assert (out / "loss.png").stat().st_size > 5000
    summary = json.loads((out / "summary.json").read_text())
    runs = summary["runs"]
    assert set(runs) == {"delayed", "bf16"}
    for run in runs.values():
        assert np.isfinite(run["held_out_loss"])
        np.testing.assert_allclose(run["bits_per_byte"], run["held_out_loss"] / np.log(2))
        assert pathlib.Path(run["checkpoint"]).is_dir()
    assert losses(out)[-1]["loss"] < losses(out)[0]["loss"]
    assert losses(out) != losses(out / "bf16")
    for text in ("plan of mlp", "SwiGLU", "held-out loss", "bits per byte", "custom calls", str(out / "loss.png")):
        assert text in printed


def test_resume_is_bit_identical(whole_run, data, tmp_path):
    whole, _ = whole_run
    train(data, tmp_path, "--recipe", "delayed", "--steps", str(N))
    assert steps(tmp_path) == [N]
    printed = train(data, tmp_path, "--recipe", "delayed", "--steps", str(2 * N), "--resume")
    assert f"resumed at step {N}" in printed
    assert losses(tmp_path) == losses(whole)
    got, want = leaves(tmp_path, 2 * N), leaves(whole, 2 * N)
    assert set(got) == set(want)
    assert any("amax_history" in path for path in want)
    assert any("kernel" in path for path in want)
    assert sum("mu" in path for path in want) > 3
    for path, leaf in want.items():
        assert got[path].dtype == leaf.dtype
        np.testing.assert_array_equal(got[path], leaf, err_msg=path)


def test_interrupt_and_resume(data, tmp_path):
    out, log = tmp_path / "run", tmp_path / "log"
    flags = ("--recipe", "none", "--steps", "100000", "--save-every", "100000")
    with log.open("w") as stream:
        process = subprocess.Popen(command(data, out, *flags), env=environment(data), stdout=stream, stderr=stream)
        try:
            wait_for_losses(out, process, log)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=120) == 128 + signal.SIGINT, log.read_text()
        finally:
            process.kill()
    (stopped_at,) = steps(out)
    assert [entry["step"] for entry in losses(out)] == list(range(stopped_at))
    assert "--resume" in log.read_text()

    train(data, out, "--recipe", "none", "--steps", str(stopped_at + 2), "--resume")
    assert steps(out) == [stopped_at, stopped_at + 2]
    assert [entry["step"] for entry in losses(out)] == list(range(stopped_at + 2))


def wait_for_losses(out, process, log):
    deadline = time.monotonic() + 200
    while not ((out / "losses.jsonl").exists() and (out / "losses.jsonl").stat().st_size):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def test_a_run_is_not_overwritten_nor_changed(whole_run, data):
    out, _ = whole_run
    before = losses(out)
    assert "--resume goes on" in train(data, out, "--steps", "4", returncode=1)
    assert "--batch: expected 4" in train(data, out, "--resume", "--batch", "2", returncode=1)
    assert losses(out) == before
