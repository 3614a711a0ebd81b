"""A save that is interrupted leaves the last good step, bit for bit, and the next run goes on."""

import json
import os
import pathlib
import resource
import secrets
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from killed_saver import KEEP, RECIPE, content

from te_jax import checkpoint
from te_jax.testing.compare import assert_trees_identical
from te_jax.testing.compiling import xla_flags

ROUNDS = 50


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_killed_at_random_moments(tmp_path):
    """-9, in sync and async saves, in the deletion of old steps, and in what a new run does first."""
    seed = secrets.randbelow(2**32)
    print(f"seed {seed}")
    program = pathlib.Path(__file__).with_name("killed_saver.py")
    environment = {**os.environ, "XLA_FLAGS": xla_flags(1), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, str(program), str(tmp_path), str(ROUNDS), str(seed)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    rounds = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(rounds) == ROUNDS
    last = begun = -1
    for number, one in enumerate(rounds):
        # A saver that finds a step it can't restore, or one with other bits, ends by itself.
        assert one["killed"], f"round {number}: {run.stderr}"
        assert last <= one["restored"] <= begun, (number, rounds)
        last, begun = max(one["saved"], one["restored"]), max(one["begun"], one["restored"])
    # It was about something: steps were saved, and kills came while they were.
    assert last >= 5, rounds
    assert sum(one["half_written"] for one in rounds) >= 10, rounds

    steps = checkpoint.Manager(tmp_path, recipe=RECIPE).all_steps()
    assert 1 <= len(steps) <= KEEP + 1
    assert steps[-1] >= last
    (variables, opt_state), extras = content(0)
    for step in steps:
        out = checkpoint.restore(tmp_path, variables, recipe=RECIPE, opt_state=opt_state, extras=extras, step=step)
        assert_trees_identical(((out.variables, out.opt_state), out.extras), content(step))
    # The next run removes what the last one left half done.
    checkpoint.save(tmp_path, steps[-1] + 1, variables, recipe=RECIPE)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(str(step) for step in [*steps, steps[-1] + 1])


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_disk_is_full(tmp_path, async_save):
    rng = np.random.default_rng(0)
    variables = {"params": {"w": jnp.asarray(rng.standard_normal((256, 256)), jnp.float32)}}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with checkpoint.Manager(tmp_path, recipe=None, async_save=async_save) as manager:
        manager.save(1, variables)
        manager.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # writes beyond it fail, as on a full disk
        try:
            with pytest.raises(Exception, match=r"[Ff]ile too large"):
                save_and_wait(manager, 2, variables)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert manager.latest_step() == 1
        assert_trees_identical(manager.restore(variables).variables, variables)
        manager.save(2, variables)  # there is room again
        manager.wait()
        assert manager.all_steps() == [1, 2]
    assert_trees_identical(checkpoint.restore(tmp_path, variables, recipe=None, step=2).variables, variables)


def save_and_wait(manager, step, variables):
    manager.save(step, variables)
    manager.wait()


def test_half_of_a_step_that_was_being_deleted(tmp_path):
    variables = {"params": {"w": jnp.arange(8.0)}}
    for step in (1, 2):
        checkpoint.save(tmp_path, step, variables, recipe=None)
    folder = tmp_path / "1"
    (folder / "te_jax" / "metadata").rename(folder / "te_jax" / "deleted")
    (tmp_path / "0" / "te_jax").mkdir(parents=True)  # and only folders of another
    with checkpoint.Manager(tmp_path, recipe=None) as manager:
        assert manager.all_steps() == [2]
        with pytest.raises(ValueError, match=r"step: expected a complete checkpoint at .*/1, got it was being deleted"):
            manager.restore(variables, step=1)
        manager.save(3, variables)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
