"""Several processes save one checkpoint together; any number of processes restores it, on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import two_processes
from jax.sharding import Mesh
from two_processes import RECIPE

from te_jax import checkpoint
from te_jax.testing.compare import assert_trees_identical
from te_jax.testing.processes import run_pair

SECONDS = 120  # for both; they take about ten


def test_two_processes(tmp_path):
    row = Mesh(np.array(jax.devices()[:4]).reshape(4, 1), ("data", "model"))
    variables, opt_state = two_processes.placed(two_processes.content(0), row)
    checkpoint.save(tmp_path, 0, variables, recipe=RECIPE, opt_state=opt_state, extras=two_processes.extras(0))
    run_pair(two_processes.__file__, tmp_path, devices=2, timeout_s=SECONDS)

    assert checkpoint.latest_step(tmp_path) == 3
    assert checkpoint.describe(tmp_path)["written_by"]["processes"] == 2
    square = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    on_one = jax.tree.map(jnp.zeros_like, two_processes.content(0))
    for target in (on_one, two_processes.abstract(two_processes.content(0), square)):
        out = checkpoint.restore(
            tmp_path, target[0], recipe=RECIPE, opt_state=target[1], extras=two_processes.extras(0)
        )
        assert_trees_identical((out.variables, out.opt_state), two_processes.content(3))
        assert out.extras["position"] == 3
    kernel = out.variables["params"]["kernel"]
    assert kernel.sharding.mesh == square
    with pytest.raises(AssertionError):  # the comparison of parts that the processes do can fail
        two_processes.check(kernel, two_processes.content(2)[0]["params"]["kernel"])
