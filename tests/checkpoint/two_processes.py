"""One of two processes, of two CPU devices each, that save and restore together.

python two_processes.py DIRECTORY PORT PROCESS
"""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from te_jax import checkpoint
from te_jax.quant import state
from te_jax.recipe import CurrentScaling, DelayedScaling

RECIPE = DelayedScaling(amax_history_len=4)
SHORTER = DelayedScaling(amax_history_len=2)
SPECS = {
    "kernel": PartitionSpec("data", "model"),
    "frozen": PartitionSpec("model"),
    "amax_history": PartitionSpec("data"),
}


def content(step):
    """NumPy arrays of a step, FP8 weights and state among them, and what else there is."""
    rng = np.random.default_rng(step)
    kernel = rng.standard_normal((16, 32)).astype(np.float32)
    leaves = {"amax_history": rng.random((4, 4)), "scale": rng.random(4), "uses": np.zeros((4, 66))}
    leaves["uses"][:, [5, state.PARITY]] = 1
    leaves = {name: (leaf * state.W).astype(np.float32) for name, leaf in leaves.items()}
    variables = {
        "params": {"kernel": kernel.astype(jnp.bfloat16), "frozen": kernel.astype(jnp.float8_e4m3fn)},
        state.COLLECTION: {"fp8_0": leaves},
    }
    return variables, {"mu": {"kernel": kernel}, "count": np.asarray(step, np.int32)}


def extras(step):
    return {"position": step, "seen": np.arange(step, step + 3)}


def placed(tree, mesh):
    """The tree on the mesh, every process giving its part."""

    def place(path, leaf):
        sharding = NamedSharding(mesh, SPECS.get(path[-1].key, PartitionSpec()))
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree_util.tree_map_with_path(place, tree)


def abstract(tree, mesh):
    """Where the tree is wanted: shapes, dtypes and shardings of another mesh."""

    def describe(path, leaf):
        sharding = NamedSharding(mesh, SPECS.get(path[-1].key, PartitionSpec()))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(describe, tree)


def check(tree, expected):
    """Every part of every array that this process has is that of the expected array, bit for bit."""
    jax.tree.map(_check_leaf, tree, expected)


def _check_leaf(array, expected):
    assert array.dtype == expected.dtype
    for shard in array.addressable_shards:
        assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(expected[shard.index]).tobytes()


def main():
    directory, port, process = sys.argv[1], sys.argv[2], int(sys.argv[3])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process, initialization_timeout=60)
    devices = np.array(jax.devices())
    assert devices.size == 4
    assert jax.local_device_count() == 2
    row, square = Mesh(devices.reshape(4, 1), ("data", "model")), Mesh(devices.reshape(2, 2), ("data", "model"))

    # What one process saved.
    variables, opt_state = abstract(content(0), square)
    out = checkpoint.restore(directory, variables, recipe=RECIPE, opt_state=opt_state, extras=extras(9), step=0)
    check((out.variables, out.opt_state), content(0))

    step_on = jax.jit(lambda tree: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), tree), donate_argnums=0)
    with checkpoint.Manager(directory, recipe=RECIPE, max_to_keep=2, async_save=True) as manager:
        for step in (1, 2, 3):
            variables, opt_state = placed(content(step), row)
            manager.save(step, variables, opt_state=opt_state, extras=extras(step))
            jax.block_until_ready(step_on((variables, opt_state)))  # writes over the arrays while they are saved
        manager.wait()
        assert manager.all_steps() == [2, 3] or process == 1  # the first deletes, the second may look while it does
        for step in (2, 3):
            variables, opt_state = abstract(content(0), square)
            out = manager.restore(variables, opt_state=opt_state, extras=extras(0), step=step)
            check((out.variables, out.opt_state), content(step))
            assert out.extras["position"] == step
            assert out.variables["params"]["kernel"].sharding.mesh == square

        # Errors are the same in both, and nothing waits for the other.
        wrong = jax.ShapeDtypeStruct((16, 64), jnp.bfloat16, sharding=NamedSharding(square, PartitionSpec()))
        for change, text in (
            (
                {**variables, "params": {**variables["params"], "kernel": wrong}},
                "params/kernel: expected bfloat16[16, 32]",
            ),
            ({"params": variables["params"]}, "fp8_state: expected some in"),
        ):
            with pytest.raises(ValueError, match=re.escape(text)):
                manager.restore(change, opt_state=opt_state, extras=extras(0))

    # Another recipe, on the other mesh: shortened, and dropped.
    like = {"fp8_0": abstract(state.init(4, SHORTER), square)}
    shorter = checkpoint.restore(
        directory,
        {**variables, state.COLLECTION: like},
        recipe=SHORTER,
        opt_state=opt_state,
        extras=extras(0),
        migrate=True,
    ).variables[state.COLLECTION]["fp8_0"]
    expected = dict(content(3)[0][state.COLLECTION]["fp8_0"])
    history = expected["amax_history"]
    expected["amax_history"] = np.stack([history[:, 0], history[:, 1:].max(-1)], -1)
    check(shorter, expected)
    assert shorter["amax_history"].sharding == like["fp8_0"]["amax_history"].sharding
    dropped = checkpoint.restore(
        directory,
        {"params": variables["params"]},
        recipe=CurrentScaling(),
        opt_state=opt_state,
        extras=extras(0),
        migrate=True,
    )
    check(dropped.variables, {"params": content(3)[0]["params"]})
    print("done")


if __name__ == "__main__":
    main()
