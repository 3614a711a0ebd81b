"""Checkpoints: what comes back is what was saved, bit for bit, or an error that names both sides."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from te_jax import checkpoint
from te_jax.quant import state
from te_jax.quant.tensor import QTensor
from te_jax.recipe import CurrentScaling, DelayedScaling
from te_jax.testing.compare import assert_trees_identical

RECIPE = DelayedScaling(amax_history_len=4)
# Of tests that restore only the variables.
variables_alone = pytest.mark.filterwarnings("ignore:te_jax.checkpoint.restore. .* is not restored")


@functools.partial(jax.jit, static_argnums=2)
def step_state(leaves, amax, recipe):
    return state.write(state.read(leaves, np.float32(448), recipe), jnp.ones(3), amax, leaves)


def training_state(seed=0, recipe=RECIPE):
    """(variables, optimizer state, extras) with leaves of many dtypes, and FP8 state that was in use."""
    rng = np.random.default_rng(seed)
    every_e4m3 = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn)  # NaN codes too
    params = {
        "mlp": {
            "kernel": jnp.asarray(rng.standard_normal((16, 32)), jnp.bfloat16),
            "bias": jnp.asarray(rng.standard_normal(32), jnp.float32),
        },
        "frozen": QTensor(data=jnp.asarray(every_e4m3.reshape(16, 16)), scale_inv=jnp.float32(0.1)),
        "e5m2": jnp.asarray(rng.standard_normal(8), jnp.float8_e5m2),
    }
    variables = {"params": params, "batch_stats": {"mean": jnp.asarray(rng.standard_normal(3), jnp.float32)}}
    if recipe is not None and recipe.stateful:
        leaves = state.init(3, recipe)
        for _ in range(3):
            leaves = step_state(leaves, jnp.asarray(rng.lognormal(size=3), jnp.float32), recipe)
        variables[state.COLLECTION] = {"mlp": leaves}
    opt_state = optax.adam(1e-3).init({"mlp": params["mlp"]})
    opt_state = jax.tree.map(lambda x: x + jnp.asarray(seed + 1, x.dtype), opt_state)
    extras = {
        "position": 17 + seed,
        "loss": 0.1 + seed,
        "done": False,
        "seen": np.arange(3, dtype=np.int16),
        "lr": np.float32(0.3),
        "key": jax.random.key(seed),
        "raw": jax.random.PRNGKey(seed),
    }
    return variables, opt_state, extras


def plain(tree):
    """Typed random keys as bits, so that trees can be compared."""
    is_key = lambda x: hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def save(directory, step=1, seed=0, recipe=RECIPE):
    variables, opt_state, extras = training_state(seed, recipe)
    checkpoint.save(directory, step, variables, recipe=recipe, opt_state=opt_state, extras=extras)
    return variables, opt_state, extras


@pytest.mark.parametrize("abstract", [False, True], ids=["arrays", "abstract"])
def test_round_trip_bit_for_bit(tmp_path, abstract):
    saved = save(tmp_path, 7)
    variables, opt_state, extras = training_state(seed=5)
    if abstract:
        variables, opt_state = jax.eval_shape(lambda: (variables, opt_state))
    out = checkpoint.restore(tmp_path, variables, recipe=RECIPE, opt_state=opt_state, extras=extras)
    assert out.step == 7
    assert_trees_identical(plain((out.variables, out.opt_state, out.extras)), plain(saved))
    assert (out.extras["position"], out.extras["done"]) == (17, False)
    assert [type(out.extras[name]) for name in ("position", "loss", "done")] == [int, float, bool]
    assert isinstance(out.variables["params"]["frozen"], QTensor)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((out.variables, out.opt_state)))
    assert out.extras["key"].dtype == extras["key"].dtype


def test_layout_and_plain_orbax(tmp_path):
    variables, _, _ = save(tmp_path, 12)
    folder = tmp_path / "12"
    items = {"params", "collections", "fp8_state", "opt_state", "extras", "te_jax"}
    assert items <= {path.name for path in folder.iterdir()}
    document = json.loads((folder / "te_jax" / "metadata").read_text())
    assert document["format_version"] == checkpoint.FORMAT_VERSION == 3
    assert document["recipe"] == RECIPE.to_json()
    fp8 = variables[state.COLLECTION]
    with ocp.StandardCheckpointer() as reader:
        assert_trees_identical(reader.restore(folder / "fp8_state", fp8), fp8)


def test_without_optional_items(tmp_path):
    variables = {"params": {"w": jnp.ones(3)}}
    checkpoint.save(tmp_path, 0, variables, recipe=None)
    out = checkpoint.restore(tmp_path, variables, recipe=None)
    assert (out.step, out.opt_state, out.extras) == (0, None, None)
    assert_trees_identical(out.variables, variables)
    # An optimizer without state is not an item, and comes back as given.
    sgd = optax.sgd(1e-3).init(variables["params"])
    checkpoint.save(tmp_path, 1, variables, recipe=None, opt_state=sgd)
    assert checkpoint.restore(tmp_path, variables, recipe=None, opt_state=sgd).opt_state == sgd
    adam = optax.adam(1e-3).init(variables["params"])
    with pytest.raises(ValueError, match=r"checkpoint.restore: opt_state: expected a stored item, got no such item"):
        checkpoint.restore(tmp_path, variables, recipe=None, opt_state=adam)
    checkpoint.save(tmp_path, 2, variables, recipe=None, opt_state=adam)
    with pytest.raises(ValueError, match=r"opt_state/0/mu/w: expected float32\[3\] \(checkpoint\), got no such leaf"):
        checkpoint.restore(tmp_path, variables, recipe=None, opt_state=sgd)


def test_stored_items_that_are_not_asked_for_are_warned_of(tmp_path):
    saved = save(tmp_path, 0)
    variables, opt_state, extras = saved
    with pytest.warns(UserWarning, match="is not restored") as caught:
        out = checkpoint.restore(tmp_path, variables, recipe=RECIPE)
    assert (out.opt_state, out.extras) == (None, None)
    for name, warning in zip(("opt_state", "extras"), caught, strict=True):
        assert str(warning.message) == (
            f"te_jax.checkpoint.restore: {name}: expected a target for what {tmp_path / '0'} stores ({name}=...), "
            f"got None: {name} is not restored"
        )
    with pytest.warns(UserWarning, match="extras is not restored") as caught:
        checkpoint.restore(tmp_path, variables, recipe=RECIPE, opt_state=opt_state)
    assert len(caught) == 1
    checkpoint.restore(tmp_path, variables, recipe=RECIPE, opt_state=opt_state, extras=extras)  # warnings are errors


def test_kernels_of_a_step_are_not_stored(tmp_path):
    variables = {"params": {"w": jnp.ones(3)}}
    checkpoint.save(tmp_path, 0, {**variables, state.KERNELS: {"w": jnp.ones(3)}}, recipe=None)
    assert set(checkpoint.restore(tmp_path, variables, recipe=None).variables) == {"params"}


@variables_alone
def test_onto_another_sharding(tmp_path):
    devices = np.array(jax.devices())
    assert devices.size == 8
    row = Mesh(devices, ("data",))
    square = Mesh(devices.reshape(4, 2), ("data", "model"))
    variables, opt_state, extras = training_state()
    kernel = variables["params"]["mlp"]["kernel"]
    variables["params"]["mlp"]["kernel"] = jax.device_put(kernel, NamedSharding(row, PartitionSpec("data")))
    checkpoint.save(tmp_path, 1, variables, recipe=RECIPE, opt_state=opt_state, extras=extras)

    everywhere = NamedSharding(square, PartitionSpec())
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), variables)
    model = NamedSharding(square, PartitionSpec("model", "data"))
    target["params"]["mlp"]["kernel"] = jax.ShapeDtypeStruct(kernel.shape, kernel.dtype, sharding=model)
    out = checkpoint.restore(tmp_path, target, recipe=RECIPE).variables
    assert_trees_identical(out, variables)
    assert out["params"]["mlp"]["kernel"].sharding == model
    assert all(leaf.sharding == everywhere for leaf in jax.tree.leaves(out[state.COLLECTION]))


def test_keeps_the_newest_and_saves_in_the_background(tmp_path):
    with checkpoint.Manager(tmp_path, recipe=RECIPE, max_to_keep=2, async_save=True) as manager:
        for step in (1, 2, 3):
            variables, _, _ = training_state(step)
            copies = jax.tree.map(jnp.copy, variables)
            manager.save(step, copies)
            jax.tree.map(lambda x: x.delete(), copies)  # as donation does
        out = manager.restore(variables)
        assert_trees_identical(out.variables, training_state(3)[0])
        assert manager.all_steps() == [2, 3]
        with pytest.raises(ValueError, match=r"checkpoint.save: step: expected .*not saved yet, got 3"):
            manager.save(3, variables)
    assert_trees_identical(
        checkpoint.restore(tmp_path, variables, recipe=RECIPE, step=2).variables, training_state(2)[0]
    )


@variables_alone
def test_incomplete_steps_are_ignored_and_set_aside(tmp_path):
    saved = save(tmp_path, 1)
    good = tmp_path / "1"
    (tmp_path / "2").mkdir()  # made, nothing written
    for step, lost in ((3, "_CHECKPOINT_METADATA"), (4, "te_jax/metadata"), (5, "opt_state/_METADATA")):
        shutil.copytree(good, tmp_path / str(step))
        (tmp_path / str(step) / lost).unlink()
    shutil.copytree(good, tmp_path / "6")
    (tmp_path / "6" / "te_jax" / "metadata").write_text("{")  # truncated
    shutil.copytree(good, tmp_path / "7.orbax-checkpoint-tmp")
    assert checkpoint.latest_step(tmp_path) == 1
    out = checkpoint.restore(tmp_path, saved[0], recipe=RECIPE)
    assert out.step == 1
    with pytest.raises(ValueError, match=r"step: expected a complete checkpoint at .*/3, got no _CHECKPOINT_METADATA"):
        checkpoint.restore(tmp_path, saved[0], recipe=RECIPE, step=3)
    # A later run reaches step 3 again.
    save(tmp_path, 3, seed=3)
    assert checkpoint.latest_step(tmp_path) == 3
    assert_trees_identical(checkpoint.restore(tmp_path, saved[0], recipe=RECIPE).variables, training_state(3)[0])
    assert (tmp_path / "3.incomplete").is_dir()


def test_nothing_there(tmp_path):
    assert checkpoint.latest_step(tmp_path / "none") is None
    with pytest.raises(
        FileNotFoundError, match=r"checkpoint.restore: directory: expected a complete step, got none in"
    ):
        checkpoint.restore(tmp_path, {"params": {"w": jnp.ones(1)}}, recipe=None)
    save(tmp_path, 1)
    with pytest.raises(ValueError, match=r"step: expected a complete checkpoint at .*/9, got no such folder"):
        checkpoint.restore(tmp_path, training_state()[0], recipe=RECIPE, step=9)


@pytest.mark.parametrize(
    ("stored", "model"),
    [
        (None, RECIPE),
        (RECIPE, None),
        (RECIPE, CurrentScaling()),
        (CurrentScaling(), RECIPE),
        (RECIPE, DelayedScaling(amax_history_len=8)),
        (CurrentScaling(), CurrentScaling(power_of_two=True)),
    ],
)
def test_recipe_mismatch_names_both(tmp_path, stored, model):
    save(tmp_path, 1, recipe=stored)
    with pytest.raises(ValueError) as caught:
        checkpoint.restore(tmp_path, training_state(recipe=model)[0], recipe=model)
    assert f"checkpoint.restore: recipe: expected {stored!r}" in str(caught.value)
    assert f"got {model!r}" in str(caught.value)


@variables_alone
def test_strictness_and_axes_may_differ(tmp_path):
    saved = save(tmp_path, 1)
    other = DelayedScaling(amax_history_len=4, strict=True, amax_axes=("data",))
    assert_trees_identical(checkpoint.restore(tmp_path, saved[0], recipe=other).variables, saved[0])


def _kernel(value):
    def change(variables):
        variables["params"]["mlp"]["kernel"] = value

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            _kernel(jnp.zeros((16, 64), jnp.bfloat16)),
            r"params/mlp/kernel: expected bfloat16\[16, 32\] \(checkpoint\), got bfloat16\[16, 64\] \(target\)",
        ),
        (
            _kernel(jnp.zeros((16, 32), jnp.float32)),
            r"params/mlp/kernel: expected bfloat16\[16, 32\] \(checkpoint\), got float32\[16, 32\] \(target\)",
        ),
        (
            _kernel(jnp.zeros((16, 32), jnp.float8_e4m3fn)),
            r"params/mlp/kernel: expected bfloat16\[16, 32\] \(checkpoint\), got float8_e4m3fn\[16, 32\] \(target\)",
        ),
        (
            lambda v: v["params"]["mlp"].pop("bias"),
            r"params/mlp/bias: expected float32\[32\] \(checkpoint\), got no such leaf \(target\)",
        ),
        (
            lambda v: v["params"].update(extra=jnp.zeros(3)),
            r"params/extra: expected no such leaf \(checkpoint\), got float32\[3\] \(target\)",
        ),
        (
            lambda v: v["params"].update(frozen=jnp.zeros((16, 16), jnp.bfloat16)),
            r"params/frozen: expected no such leaf \(checkpoint\), got bfloat16\[16, 16\] \(target\)",
        ),
        (lambda v: v.pop("batch_stats"), r"collections: expected some in .*, got none in the target"),
        (
            lambda v: v.pop(state.COLLECTION),
            r"fp8_state: expected some in .*, got none in the target \(for a model of another recipe .*migrate=True\);"
            r" for parameters alone: te\.checkpoint\.restore_params\(",
        ),
        (
            lambda v: v[state.COLLECTION].update(mlp=state.init(3, DelayedScaling(amax_history_len=8))),
            r"fp8_state/mlp/amax_history: expected float32\[3, 4\] \(checkpoint\), got float32\[3, 8\] \(target\)\n"
            r"for a model of another recipe than the checkpoint's: restore\(.*migrate=True\)",
        ),
    ],
)
def test_mismatches_name_the_leaf(tmp_path, change, match):
    save(tmp_path, 1)
    variables = training_state()[0]
    change(variables)
    with pytest.raises(ValueError, match=r"te_jax\.checkpoint\.restore: " + match):
        checkpoint.restore(tmp_path, variables, recipe=RECIPE)


@pytest.mark.parametrize(
    ("recipe", "match"),
    [
        (None, r"recipe: expected the recipe of the variables, DelayedScaling\(\.\.\.\), got None with FP8 state"),
        (CurrentScaling(), r"recipe: expected the recipe of .*, got CurrentScaling\(.*\) with FP8 state"),
        (
            DelayedScaling(amax_history_len=8),
            r"recipe: expected .* amax_history_len 4 \(as mlp has\), got DelayedScaling\(.*amax_history_len=8",
        ),
    ],
)
def test_a_recipe_that_is_not_that_of_the_variables_is_not_saved(tmp_path, recipe, match):
    variables = training_state()[0]
    with pytest.raises(ValueError, match=r"te_jax\.checkpoint\.save: " + match):
        checkpoint.save(tmp_path, 1, variables, recipe=recipe)
    assert not list(tmp_path.iterdir())


def test_parameters_alone_are_saved_and_restored_as_such(tmp_path, monkeypatch):
    variables = training_state()[0]
    alone = {name: tree for name, tree in variables.items() if name != state.COLLECTION}
    with pytest.raises(ValueError, match=r"save: variables: expected the FP8 state of .*recipe=None\)"):
        checkpoint.save(tmp_path, 1, alone, recipe=RECIPE)
    monkeypatch.setattr(checkpoint.recipes, "check_state", lambda *args: None)  # as te_jax wrote it before
    checkpoint.save(tmp_path, 1, alone, recipe=RECIPE)
    advice = r"fp8_state: expected none in .*, got some in the target \(its parameters alone .*restore_params\("
    with pytest.raises(ValueError, match=advice):
        checkpoint.restore(tmp_path, variables, recipe=RECIPE)
    assert_trees_identical(checkpoint.restore_params(tmp_path, variables["params"]), variables["params"])


def test_warnings_point_at_the_line_of_the_user(tmp_path):
    variables = save(tmp_path)[0]
    manager = checkpoint.Manager(tmp_path, recipe=RECIPE)
    for call in (lambda: manager.restore(variables), lambda: checkpoint.restore(tmp_path, variables, recipe=RECIPE)):
        with pytest.warns(UserWarning, match="is not restored") as warned:
            call()
        assert [each.filename for each in warned] == 2 * [__file__]


def test_number_of_another_kind(tmp_path):
    variables, _, _ = save(tmp_path, 1)
    extras = training_state()[2]
    with pytest.raises(ValueError, match=r"extras/position: expected int \(checkpoint\), got float \(target\)"):
        checkpoint.restore(tmp_path, variables, recipe=RECIPE, extras={**extras, "position": 1.0})


@pytest.mark.parametrize(
    ("error", "leaf", "match"),
    [
        (TypeError, "x", r"expected an array or a number \(bool, int, float\), got str"),
        (TypeError, 1j, r"expected an array or a number \(bool, int, float\), got complex"),
        (TypeError, np.array(["x"]), r"expected an array of a dtype that orbax stores, got <U1"),
        (TypeError, np.array([{}], object), r"expected an array of a dtype that orbax stores, got object"),
        (TypeError, jnp.ones(2, jnp.float8_e4m3), r"expected an array of a dtype that orbax stores, got float8_e4m3"),
        (TypeError, jnp.ones(2, jnp.uint4), r"expected an array of a dtype that orbax stores, got uint4"),
        (ValueError, jnp.ones((0, 3)), r"expected an array with elements, got shape \[0, 3\]"),
        (ValueError, 2**63, r"expected an int of 64 bits, got 9223372036854775808"),
    ],
)
def test_leaves_that_cannot_be_saved(tmp_path, error, leaf, match):
    with pytest.raises(error, match=r"te_jax.checkpoint.save: extras/name: " + match):
        checkpoint.save(tmp_path, 1, {"params": {"a": jnp.ones(1)}}, recipe=None, extras={"name": leaf})
    assert not list(tmp_path.iterdir())


def test_numbers_and_dtypes_that_can(tmp_path):
    extras = {
        "least": -(2**63),
        "most": 2**63 - 1,
        "nan": float("nan"),
        "swapped": np.arange(3, dtype=">f4"),
        "double": np.arange(3, dtype=np.complex128),
        "scalar": np.float64(0.1),
        "int4": jnp.arange(4).astype(jnp.int4),
        "float4": jnp.arange(4).astype(jnp.float4_e2m1fn),
    }
    checkpoint.save(tmp_path, 1, {"params": {"a": jnp.ones(1)}}, recipe=None, extras=extras)
    out = checkpoint.restore(tmp_path, {"params": {"a": jnp.ones(1)}}, recipe=None, extras=extras).extras
    expected = {**extras, "swapped": extras["swapped"].astype("=f4")}
    assert_trees_identical({**out, "swapped": out["swapped"].astype("=f4")}, expected)
    assert (out["least"], out["most"]) == (extras["least"], extras["most"])


def test_variables_that_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint.save: variables: expected a 'params' collection, got \['w'\]"):
        checkpoint.save(tmp_path, 1, {"w": jnp.ones(1)}, recipe=None)
    with pytest.raises(ValueError, match=r"checkpoint.save: params/a\.b: expected names without '\.'"):
        checkpoint.save(tmp_path, 1, {"params": {"a.b": jnp.ones(1)}}, recipe=None)
    with pytest.raises(ValueError, match=r"checkpoint.Manager: max_to_keep: expected None or an int >= 1, got 0"):
        checkpoint.Manager(tmp_path, recipe=None, max_to_keep=0)
    assert checkpoint.latest_step(tmp_path) is None


@pytest.mark.parametrize("step", [-1, 1.5, True, "5", None])
def test_step_that_no_restore_would_find(tmp_path, step):
    with pytest.raises(ValueError, match=r"checkpoint.save: step: expected an int >= 0, got"):
        checkpoint.save(tmp_path, step, {"params": {"w": jnp.ones(2)}}, recipe=None)
    assert not list(tmp_path.iterdir())


def test_step_may_be_a_numpy_or_jax_integer(tmp_path):
    for step in (np.int64(3), jnp.int32(4)):
        checkpoint.save(tmp_path, step, {"params": {"w": jnp.ones(2)}}, recipe=None)
    with checkpoint.Manager(tmp_path, recipe=None) as manager:
        assert manager.all_steps() == [3, 4]


def test_arguments_of_the_wrong_type(tmp_path):
    with pytest.raises(TypeError, match=r"checkpoint.Manager: recipe: expected None or a recipe object, got 'delayed'"):
        checkpoint.Manager(tmp_path, recipe="delayed")
    with pytest.raises(TypeError, match=r"checkpoint.save: variables: expected a dict of collections, got NoneType"):
        checkpoint.save(tmp_path, 1, None, recipe=None)
