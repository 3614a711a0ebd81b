"""Runs of ``examples/train_lm.py`` in processes of their own, and what they leave behind."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def command(out: pathlib.Path, *flags: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / "train_lm.py"), "--out", str(out), *flags]


def environment(cache: pathlib.Path, **variables: str) -> dict[str, str]:
    """This process's environment with the package on its path; equal programs are compiled once in ``cache``."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        **variables,
    }


def train(env: dict[str, str], out: pathlib.Path, *flags: str, returncode: int = 0) -> str:
    """Runs the example to its end; what it printed."""
    done = subprocess.run(command(out, *flags), env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == returncode, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(out: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]


def steps(out: pathlib.Path) -> list[int]:
    """The steps that there are checkpoints of."""
    return sorted(int(folder.name) for folder in (out / "checkpoints").iterdir() if folder.name.isdigit())


def leaves(out: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, by path, through plain orbax."""
    import orbax.checkpoint as ocp

    folder = out / "checkpoints" / str(step)
    found = {}
    for item in sorted(p.name for p in folder.iterdir() if (p / "_METADATA").exists()):
        with ocp.StandardCheckpointer() as checkpointer:
            tree = checkpointer.restore((folder / item).absolute())
        for path, leaf in jax.tree.leaves_with_path(tree):
            found[item + jax.tree_util.keystr(path)] = np.asarray(leaf)
    return found


def assert_same_run(got: pathlib.Path, want: pathlib.Path, step: int) -> None:
    """The same losses and, at ``step``, the same checkpoint, leaf by leaf and bit by bit."""
    assert losses(got) == losses(want)
    got_leaves, want_leaves = leaves(got, step), leaves(want, step)
    assert set(got_leaves) == set(want_leaves)
    for path, leaf in want_leaves.items():
        assert got_leaves[path].dtype == leaf.dtype, path
        np.testing.assert_array_equal(got_leaves[path], leaf, err_msg=path)
