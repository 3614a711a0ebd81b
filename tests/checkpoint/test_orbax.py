"""Variables with FP8 leaves and FP8 state through orbax alone, by every way it has of saving and restoring."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import te_jax as te
from te_jax import checkpoint, ops
from te_jax.quant import state
from te_jax.recipe import recipe_from_json
from te_jax.testing.compare import assert_trees_identical

try:
    from orbax.checkpoint import v1
except ImportError:
    from orbax.checkpoint.experimental import v1

RECIPE = te.DelayedScaling(amax_history_len=4)


def training_state():
    """NumPy values: parameters, quantized ones in every FP8 type and every code, and FP8 state."""
    rng = np.random.default_rng(0)
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    kernel = rng.standard_normal((16, 32)).astype(np.float32)
    params = {
        "kernel": kernel.astype(jnp.bfloat16),
        "tensor": te.QTensor(data=codes.view(jnp.float8_e4m3fn), scale_inv=np.float32(0.5)),
        "block": te.QTensor(
            data=kernel.astype(jnp.float8_e4m3fn),
            data_t=np.pad(kernel.T, ((0, 0), (0, 112))).astype(jnp.float8_e4m3fn),
            scale_inv=np.ones((1, 16), np.float32),
            scale_inv_t=np.ones((1, 32), np.float32),
            scaling="block_1x128",
        ),
        "fp8": {str(dtype): codes.view(dtype) for dtype in ("float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu")},
    }
    leaves = {name: rng.random(leaf.shape).astype(np.float32) for name, leaf in state.init(4, RECIPE).items()}
    return {"params": params, state.COLLECTION: {"fp8_0": leaves}, "count": np.asarray(3, np.int32)}


def sharded(mesh):
    """Where each leaf goes on a mesh: rows over "data", columns over "model", as far as the mesh divides them."""
    if mesh is None:
        return lambda leaf: SingleDeviceSharding(jax.devices()[0])

    def of(leaf):
        sizes = [mesh.shape["data"], mesh.shape["model"]]
        names = [
            name if dim % size == 0 else None
            for name, dim, size in zip(("data", "model"), leaf.shape, sizes, strict=False)
        ]
        return NamedSharding(mesh, PartitionSpec(*names))

    return of


def on(mesh, tree):
    return jax.tree.map(lambda leaf: jax.device_put(leaf, sharded(mesh)(leaf)), tree)


def abstract(mesh, tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharded(mesh)(leaf)), tree)


# Each way: save(folder, tree, then) calls then() as soon as the save has returned; restore(folder, target).


def manager(background, composite):
    def args(kind, value):
        return ocp.args.Composite(state=kind(value)) if composite else kind(value)

    def options():
        return ocp.CheckpointManagerOptions(enable_async_checkpointing=background)

    def save(folder, tree, then):
        with ocp.CheckpointManager(folder, options=options()) as writer:
            writer.save(0, args=args(ocp.args.StandardSave, tree))
            then()

    def restore(folder, target):
        with ocp.CheckpointManager(folder, options=options()) as reader:
            found = reader.restore(0, args=args(ocp.args.StandardRestore, target))
        return found["state"] if composite else found

    return save, restore


def standard_checkpointer():
    def save(folder, tree, then):
        with ocp.StandardCheckpointer() as writer:
            writer.save(folder / "0", tree)
            then()

    def restore(folder, target):
        with ocp.StandardCheckpointer() as reader:
            return reader.restore(folder / "0", target)

    return save, restore


def async_checkpointer():
    def save(folder, tree, then):
        with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as writer:
            writer.save(folder / "0", args=ocp.args.StandardSave(tree))
            then()

    def restore(folder, target):
        with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as reader:
            return reader.restore(folder / "0", args=ocp.args.StandardRestore(target))

    return save, restore


def v1_functions(background):
    def save(folder, tree, then):
        pending = v1.save_async(folder / "0", tree) if background else v1.save(folder / "0", tree)
        then()
        if background:
            pending.result()

    return save, lambda folder, target: v1.load(folder / "0", target)


def v1_items():
    def save(folder, tree, then):
        v1.save_checkpointables(folder / "0", {"state": tree, "recipe": RECIPE.to_json()})
        then()

    def restore(folder, target):
        found = v1.load_checkpointables(folder / "0", {"state": target, "recipe": None})
        assert recipe_from_json(found["recipe"]) == RECIPE
        return found["state"]

    return save, restore


def v1_checkpointer(background):
    def save(folder, tree, then):
        with v1.training.Checkpointer(folder) as writer:
            pending = writer.save_async(0, tree) if background else writer.save(0, tree)
            then()
            if background:
                pending.result()

    def restore(folder, target):
        with v1.training.Checkpointer(folder) as reader:
            return reader.load(0, target)

    return save, restore


WAYS = {
    "CheckpointManager": manager(False, composite=False),
    "CheckpointManager, async": manager(True, composite=False),
    "Composite": manager(False, composite=True),
    "Composite, async": manager(True, composite=True),
    "StandardCheckpointer": standard_checkpointer(),
    "AsyncCheckpointer": async_checkpointer(),
    "v1.save": v1_functions(False),
    "v1.save_async": v1_functions(True),
    "v1.save_checkpointables": v1_items(),
    "v1.Checkpointer": v1_checkpointer(False),
    "v1.Checkpointer, async": v1_checkpointer(True),
}

_write_over = jax.jit(lambda tree: jax.tree.map(lambda x: x * jnp.zeros((), x.dtype), tree), donate_argnums=0)


@pytest.fixture
def no_pickles(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pickle is used")

    for name in ("dump", "dumps", "load", "loads"):
        monkeypatch.setattr(f"pickle.{name}", refuse)


@pytest.mark.parametrize("way", WAYS)
def test_round_trip(tmp_path, way, no_pickles):
    """Saved from four devices and donated at once; restored on 2x2, and on one: the same bits."""
    save, restore = WAYS[way]
    devices = np.array(jax.devices()[:4])
    expected = training_state()
    tree = on(Mesh(devices.reshape(4, 1), ("data", "model")), expected)
    jax.block_until_ready(tree)
    written_over = []
    save(tmp_path, tree, lambda: written_over.append(jax.block_until_ready(_write_over(tree))))
    assert not any(
        np.asarray(leaf).astype(np.float32).any() for leaf in jax.tree.leaves(written_over[0]["params"]["block"])
    )

    square = Mesh(devices.reshape(2, 2), ("data", "model"))
    for mesh in (square, None):
        target = abstract(mesh, expected)
        out = restore(tmp_path, target)
        assert_trees_identical(out, expected)
        assert jax.tree.map(lambda leaf: leaf.sharding, out) == jax.tree.map(lambda leaf: leaf.sharding, target)
    assert len(out["params"]["kernel"].sharding.device_set) == 1
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or path.read_bytes()[:1] != b"\x80", path  # how pickles of protocol 2 and newer begin


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_te_checkpoint(tmp_path, async_save, no_pickles):
    """The same through te.checkpoint, whose items orbax reads by itself, in both of its APIs."""
    devices = np.array(jax.devices()[:4])
    expected = training_state()
    opt_state = {"mu": {"kernel": expected["params"]["kernel"]}, "count": expected.pop("count")}
    tree = on(Mesh(devices.reshape(4, 1), ("data", "model")), (expected, opt_state))
    with checkpoint.Manager(tmp_path, recipe=RECIPE, async_save=async_save) as writer:
        writer.save(0, tree[0], opt_state=tree[1])
        jax.block_until_ready(_write_over(tree))
    for mesh in (Mesh(devices.reshape(2, 2), ("data", "model")), None):
        target = abstract(mesh, (expected, opt_state))
        out = checkpoint.restore(tmp_path, target[0], recipe=RECIPE, opt_state=target[1])
        assert_trees_identical((out.variables, out.opt_state), (expected, opt_state))
    folder, params = tmp_path / "0", abstract(None, expected["params"])
    with ocp.StandardCheckpointer() as reader:
        assert_trees_identical(reader.restore(folder / "params", params), expected["params"])
    assert_trees_identical(v1.load_checkpointables(folder, {"params": params})["params"], expected["params"])
    assert recipe_from_json(v1.load_checkpointables(folder, {"te_jax": None})["te_jax"]["recipe"]) == RECIPE


def test_a_chain_stores_each_parameter_once(tmp_path):
    """Fused or not, and where an op is in the chain twice."""
    shared = ops.Linear(16)
    chain = te.Sequential(
        [ops.RMSNorm(), ops.Linear(32), ops.SwiGLU(), shared, ops.RMSNorm(), shared], recipe=RECIPE, dtype=jnp.bfloat16
    )
    variables = jax.tree.map(
        lambda leaf: jnp.ones(leaf.shape, leaf.dtype),
        jax.eval_shape(chain.init, jax.random.key(0), jnp.zeros((16, 16), jnp.bfloat16)),
    )
    checkpoint.save(tmp_path, 1, variables, recipe=RECIPE)
    stored = {item: set(sums) for item, sums in checkpoint.describe(tmp_path)["checksums"].items()}
    assert stored["params"] == {
        "ops_0/scale",
        "ops_1/kernel",
        "ops_1/bias",
        "ops_3/kernel",
        "ops_3/bias",
        "ops_4/scale",
    }
    metadata = json.loads((tmp_path / "1" / "params" / "_METADATA").read_text())["tree_metadata"]
    assert len(metadata) == 6
    assert len(stored["fp8_state"]) == 3 * len(variables[state.COLLECTION])
