"""Checkpoints of other recipes and of past format versions: converted when asked to, said aloud, value by value."""

import itertools
import json
import re
import tarfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stored_checkpoints
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import te_jax as te
from te_jax import checkpoint, ops
from te_jax.checkpoint import versions
from te_jax.quant import state
from te_jax.testing.compare import assert_trees_identical

DELAYED = te.DelayedScaling(amax_history_len=4)
RECIPES = {"none": None, "delayed": DELAYED, "current": te.CurrentScaling(), "block": te.BlockScaling()}
PAIRS = list(itertools.permutations(RECIPES, 2))
AMAX = np.array([[3.0, 5.0, 0.75], [2.0, 9.0, 0.5], [7.0, 6.0, 0.0], [1.0, 8.0, 4.0]], np.float32)  # step by step


@jax.jit
def step(leaves, amax):
    """One step of three quantizers, as `te_jax.quant.state` has it."""
    recipe = te.DelayedScaling(amax_history_len=leaves["amax_history"].shape[-1])
    view = state.read(leaves, np.float32(448), recipe)
    return state.write(view, jnp.where(view.scale > 0, view.scale, 448 / amax), amax, leaves)


def trained(length, steps=4):
    leaves = state.init(3, te.DelayedScaling(amax_history_len=length))
    for amax in AMAX[:steps]:
        leaves = step(leaves, amax)
    return leaves


def history_of(leaves):
    """What the leaves of single uses say, in fp64, by the table in docs/numerics.md: newest first, [Q, H]."""
    uses = np.asarray(leaves["uses"], np.float64)
    u = uses[:, :64].sum(-1) + uses[:, 65]
    history = np.asarray(leaves["amax_history"], np.float64) / np.where(u == 0, 1, u)[:, None]
    return np.stack([row if row[0] > 0 else np.append(row[1:], 0) for row in history])


def variables_for(recipe, seed=0, leaves=None):
    rng = np.random.default_rng(seed)
    variables = {"params": {"kernel": jnp.asarray(rng.standard_normal((16, 16)), jnp.bfloat16)}}
    if recipe is not None and recipe.stateful:
        variables[state.COLLECTION] = {"fp8_0": leaves or state.init(3, recipe)}
    return variables


@pytest.mark.parametrize(("old", "new"), PAIRS, ids=lambda name: name)
def test_every_pair_of_recipes(tmp_path, old, new):
    stored, model = RECIPES[old], RECIPES[new]
    saved = variables_for(stored, leaves=trained(4))
    checkpoint.save(tmp_path, 1, saved, recipe=stored)
    target = variables_for(model, seed=1, leaves=trained(4, steps=2))  # whose values must not show through

    with pytest.raises(ValueError) as refused:
        checkpoint.restore(tmp_path, target, recipe=model)
    done = {"delayed": "FP8 state is dropped"}.get(old, "there is no FP8 state to convert")
    done = "FP8 state is created without history" if new == "delayed" else done
    for part in (f"expected {stored!r}", f"got {model!r}", "restore(..., migrate=True)", done):
        assert part in str(refused.value)

    with pytest.warns(UserWarning, match="was trained with") as said:
        out = checkpoint.restore(tmp_path, target, recipe=model, migrate=True).variables
    text = f"{tmp_path / '1'} was trained with {stored!r}, the model has {model!r}: {done}"
    assert [text in str(warning.message) for warning in said] == [True], "one warning, with both recipes"
    assert_trees_identical(out["params"], saved["params"])
    if new == "delayed":
        assert_trees_identical(out[state.COLLECTION], {"fp8_0": state.init(3, DELAYED)})
        assert bool((state.read(out[state.COLLECTION]["fp8_0"], np.float32(448), DELAYED).scale == 0).all())  # unseeded
    else:
        assert set(out) == {"params"}


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations((1, 2, 4), 2)))
def test_history_lengths(tmp_path, before, after):
    stored, model = (te.DelayedScaling(amax_history_len=length) for length in (before, after))
    saved = variables_for(stored, leaves=trained(before))
    leaves = saved[state.COLLECTION]["fp8_0"]
    checkpoint.save(tmp_path, 1, saved, recipe=stored)
    with pytest.warns(UserWarning, match=rf"amax history is (shortened|lengthened) from {before} to {after}"):
        out = checkpoint.restore(tmp_path, variables_for(model), recipe=model, migrate=True).variables
    new = out[state.COLLECTION]["fp8_0"]

    old_history, history = history_of(leaves), history_of(new)
    kept = min(before, after)
    expected = np.zeros((3, after))
    expected[:, :kept] = old_history[:, :kept]
    expected[:, kept - 1] = old_history[:, kept - 1 :].max(-1)  # newest kept, and the maximum of what is not
    np.testing.assert_array_equal(history, expected)
    np.testing.assert_array_equal(history.max(-1), old_history.max(-1))
    after_step = step(new, AMAX[0])
    expected_scale = np.float32(448) / old_history.max(-1).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(after_step["scale"]) / state.W, expected_scale)
    assert_trees_identical(after_step["uses"], step(leaves, AMAX[0])["uses"])  # and the parity is the next one
    assert_trees_identical(new["scale"], leaves["scale"])


TREATMENTS = {
    "summed": lambda a, b: jax.tree.map(lambda x, y: x + y, a, b),
    "averaged": lambda a, b: jax.tree.map(lambda x, y: (x + y) / 2, a, b),
    "negated": lambda a, b: jax.tree.map(lambda x: -3 * x, a),
    "unused": lambda a, b: jax.tree.map(jnp.zeros_like, a),
}


@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize("treatment", TREATMENTS)
def test_history_of_state_that_was_treated(treatment, after):
    """What was done to the state as to a gradient is read after the migration as before it."""
    before = trained(4, steps=3)
    leaves = TREATMENTS[treatment](step(before, AMAX[3]), step(before, AMAX[3] * 1.1))
    model = te.DelayedScaling(amax_history_len=after)
    (new,) = checkpoint.migrate_state({"m": leaves}, DELAYED, model, {"m": state.init(3, model)}).values()
    old_view, view = (state.read(x, np.float32(448), recipe) for x, recipe in ((leaves, DELAYED), (new, model)))
    np.testing.assert_array_equal(view.history.max(-1), old_view.history.max(-1))
    np.testing.assert_array_equal(view.scale, old_view.scale)
    np.testing.assert_array_equal(view.parity, old_view.parity)
    assert not view.bad.any()
    if after > 1:
        np.testing.assert_array_equal(view.history[:, 0], old_view.history[:, 0])


def test_state_that_an_optimizer_stepped_stays_bad():
    leaves = {
        name: leaf - 0.1 * new for (name, leaf), new in zip(trained(4).items(), trained(4, 3).values(), strict=True)
    }
    for length in (1, 2):
        model = te.DelayedScaling(amax_history_len=length)
        (new,) = checkpoint.migrate_state({"m": leaves}, DELAYED, model, {"m": state.init(3, model)}).values()
        assert np.isnan(state.read(new, np.float32(448), model).scale).all()


def test_the_newest_is_kept_where_only_it_counts():
    model = te.DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent")
    (new,) = checkpoint.migrate_state({"m": trained(4)}, DELAYED, model, {"m": state.init(3, model)}).values()
    np.testing.assert_array_equal(history_of(new)[:, 0], AMAX[3])


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_after_a_step_without_amax(algorithm):
    """The newest entry is then the second slot."""
    leaves = step(trained(4), np.zeros(3, np.float32))
    for length in (1, 2):
        model = te.DelayedScaling(amax_history_len=length, amax_compute_algo=algorithm)
        (new,) = checkpoint.migrate_state({"m": leaves}, DELAYED, model, {"m": state.init(3, model)}).values()
        expected = AMAX.max(0) if algorithm == "max" else AMAX[-1]
        if algorithm == "most_recent" and length == 1:  # nothing is left of the history: the last scale is kept
            assert_trees_identical(new, {**leaves, "amax_history": np.zeros((3, 1), np.float32)})
            continue
        np.testing.assert_array_equal(history_of(new)[:, 0], expected)
        np.testing.assert_array_equal(state.read(new, np.float32(448), model).scale, np.float32(448) / expected)


def test_a_scale_of_another_format_is_forgotten_where_there_is_no_history():
    leaves = trained(4)
    leaves = {**leaves, "amax_history": leaves["amax_history"].at[1].set(0)}
    leaves["uses"] = leaves["uses"].at[1, :64].set(0).at[1, 65].set(state.W)
    model = te.DelayedScaling(amax_history_len=4, x_format="e5m2", dy_format="e4m3")
    for recipe, kept in ((model, 0), (te.DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent"), 1)):
        (new,) = checkpoint.migrate_state({"m": leaves}, DELAYED, recipe, {"m": leaves}).values()
        assert_trees_identical(new, {**leaves, "scale": leaves["scale"].at[1].multiply(kept)})
        assert (state.read(new, np.float32(448), DELAYED).scale[1] == 0) == (not kept)  # unseeded, or kept


def test_other_fields_of_a_stateless_recipe(tmp_path):
    saved = variables_for(None)
    checkpoint.save(tmp_path, 1, saved, recipe=te.CurrentScaling())
    with pytest.warns(UserWarning, match=r"power_of_two=True.*: there is no FP8 state to convert"):
        out = checkpoint.restore(tmp_path, saved, recipe=te.CurrentScaling(power_of_two=True), migrate=True)
    assert_trees_identical(out.variables, saved)
    checkpoint.restore(tmp_path, saved, recipe=te.CurrentScaling(strict=True), migrate=True)  # nothing to say


def test_state_goes_onto_the_sharding_of_the_model(tmp_path):
    """Stacked over layers and split over a mesh, which doesn't divide the length that is stored."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("stage", "x"))
    sharding = NamedSharding(mesh, PartitionSpec("stage", None, "x"))
    layers = [trained(1, steps=1 + i % 4) for i in range(8)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    stored, model = te.DelayedScaling(amax_history_len=1), te.DelayedScaling(amax_history_len=2)
    saved = {**variables_for(None), state.COLLECTION: {"scan": stacked}}
    checkpoint.save(tmp_path, 1, saved, recipe=stored)
    shapes = {"amax_history": (8, 3, 2), "scale": (8, 3), "uses": (8, 3, 66)}
    place = {
        name: sharding if len(shape) == 3 else NamedSharding(mesh, PartitionSpec("stage"))
        for name, shape in shapes.items()
    }
    like = {name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place[name]) for name, shape in shapes.items()}
    with pytest.warns(UserWarning, match="lengthened from 1 to 2"):
        out = checkpoint.restore(
            tmp_path, {**variables_for(None), state.COLLECTION: {"scan": like}}, recipe=model, migrate=True
        ).variables[state.COLLECTION]["scan"]
    for name, leaf in out.items():
        assert leaf.sharding == place[name]
    for i, leaves in enumerate(layers):
        (alone,) = checkpoint.migrate_state({"m": leaves}, stored, model, {"m": state.init(3, model)}).values()
        assert_trees_identical({name: leaf[i] for name, leaf in out.items()}, alone)
    # Created where there is none.
    checkpoint.save(tmp_path, 2, variables_for(None), recipe=None)
    with pytest.warns(UserWarning, match="created"):
        out = checkpoint.restore(
            tmp_path, {**variables_for(None), state.COLLECTION: {"scan": like}}, recipe=model, migrate=True
        ).variables[state.COLLECTION]["scan"]
    assert all(leaf.sharding == place[name] and not leaf.any() for name, leaf in out.items())


def test_what_cannot_be_restored_with_another_recipe(tmp_path):
    checkpoint.save(tmp_path, 1, variables_for(DELAYED, leaves=trained(4)), recipe=DELAYED)
    longer = te.DelayedScaling(amax_history_len=8)

    def refuses(variables, recipe, match):
        with pytest.raises(ValueError, match=r"te_jax.checkpoint.restore: " + match):
            checkpoint.restore(tmp_path, variables, recipe=recipe, migrate=True)

    plain = variables_for(None)
    more = {**plain, state.COLLECTION: {"fp8_0": state.init(4, longer)}}
    refuses(more, longer, r"fp8_state/fp8_0/amax_history: expected float32\[3, 4\] .*, got float32\[4, 4\]")
    refuses(plain, longer, r"fp8_state: expected some in .*/1, got none in the target")
    of_current = r"fp8_state: expected none in the target with recipe CurrentScaling\(.*\), got some"
    refuses(variables_for(DELAYED), te.CurrentScaling(), of_current)
    checkpoint.save(tmp_path, 2, variables_for(None), recipe=None)
    refuses(variables_for(None), longer, r"variables: expected the FP8 state of the model, whose .*, got none")
    quantized = {"params": {"kernel": jnp.zeros((16, 16), jnp.float8_e4m3fn)}}
    refuses(
        quantized,
        te.CurrentScaling(),
        r"params/kernel: expected bfloat16\[16, 16\] \(checkpoint\), got float8_e4m3fn\[16, 16\]",
    )


@pytest.mark.parametrize(
    ("fp8", "stored", "like", "match"),
    [
        ({"m": 4}, DELAYED, {"m": 4}, r"like/m/amax_history: expected 8 entries \(DelayedScaling.*\), got 4"),
        ({"m": 8}, DELAYED, {"m": 8}, r"fp8/m/amax_history: expected 4 entries \(DelayedScaling.*\), got 8"),
        ({"m": 4}, DELAYED, {"n": 8}, r"like: expected the quantizers of the checkpoint, \['m'\], got .* \['n'\]"),
        ({"m": 4}, None, {"m": 8}, r"fp8: expected no FP8 state with None, got state of \['m'\]"),
        (
            {},
            DELAYED,
            {"m": 8},
            r"like: expected the quantizers of the checkpoint, \[\], got those of the model, \['m'\]",
        ),
    ],
)
def test_states_that_are_not_of_their_recipes(fp8, stored, like, match):
    model = te.DelayedScaling(amax_history_len=8)
    fp8, like = (
        {name: state.init(3, te.DelayedScaling(amax_history_len=h)) for name, h in x.items()} for x in (fp8, like)
    )
    with pytest.raises(ValueError, match=r"te_jax.checkpoint.migrate_state: " + match):
        checkpoint.migrate_state(fp8, stored, model, like)


def test_a_state_of_other_quantizers():
    model = te.DelayedScaling(amax_history_len=8)
    with pytest.raises(
        ValueError, match=r"m/amax_history: expected float32\[3\] \(checkpoint\), got float32\[2\] \(model\)"
    ):
        checkpoint.migrate_state({"m": state.init(3, DELAYED)}, DELAYED, model, {"m": state.init(2, model)})
    with pytest.raises(TypeError, match=r"migrate_state: like: expected a dict of FP8 state, got NoneType"):
        checkpoint.migrate_state({}, None, model, None)


def test_a_model_trains_on_in_fp8_from_bf16_and_back(tmp_path):
    """The whole way with a real chain: the migrated model computes what a new one with the same parameters does."""
    x = jax.random.normal(jax.random.key(1), (16, 16), jnp.bfloat16)

    def model(recipe):
        return te.Sequential([ops.RMSNorm(), ops.Linear(16)], recipe=recipe)

    plain = model(None).init(jax.random.key(0), x)
    checkpoint.save(tmp_path, 1, plain, recipe=None)
    target = jax.eval_shape(model(DELAYED).init, jax.random.key(3), x)
    with pytest.warns(UserWarning, match="created without history"):
        fp8 = checkpoint.restore(tmp_path, target, recipe=DELAYED, migrate=True).variables
    new = model(DELAYED).init(jax.random.key(0), x)
    loss = lambda variables: (model(DELAYED).apply(variables, x) ** 2).sum()  # noqa: E731
    assert_trees_identical(jax.grad(loss)(fp8), jax.grad(loss)(new))
    checkpoint.save(tmp_path, 2, fp8, recipe=DELAYED)
    with pytest.warns(UserWarning, match="FP8 state is dropped"):
        back = checkpoint.restore(tmp_path, plain, recipe=None, migrate=True).variables
    assert_trees_identical(back, plain)


# ------------------------------------------------------------------------------------------------ format versions


def unpack(version, folder):
    with tarfile.open(stored_checkpoints.DATA / f"checkpoint_v{version}.tar.gz") as archive:
        archive.extractall(folder, filter="data")


def plain_keys(tree):
    """Typed random keys as bits, so that trees can be compared."""
    is_key = lambda x: hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


@pytest.mark.parametrize("version", range(1, versions.FORMAT_VERSION + 1))
def test_a_checkpoint_of_every_format_version(tmp_path, version):
    unpack(version, tmp_path)
    assert checkpoint.latest_step(tmp_path) == stored_checkpoints.STEP
    variables, opt_state, extras = stored_checkpoints.training_state()
    target = jax.tree.map(jnp.zeros_like, (variables, opt_state))
    out = checkpoint.restore(
        tmp_path, target[0], recipe=stored_checkpoints.RECIPE, opt_state=target[1], extras={**extras, "position": 0}
    )
    assert out.step == stored_checkpoints.STEP
    assert_trees_identical(plain_keys(out[1:]), plain_keys((variables, opt_state, extras)))
    document = checkpoint.describe(tmp_path)
    assert document["format_version"] == versions.FORMAT_VERSION
    assert (document["determinism"] is None) == (version == 1)
    raw = json.loads((tmp_path / str(out.step) / "te_jax" / "metadata").read_text())
    assert raw["format_version"] == version  # what is stored stays as it was

    model = te.DelayedScaling(amax_history_len=2, margin=1)  # and migrates as one of today does
    variables[state.COLLECTION] = {"fp8_0": state.init(2, model)}
    with pytest.warns(UserWarning, match="shortened from 4 to 2"):
        fp8 = checkpoint.restore(
            tmp_path, variables, recipe=model, migrate=True, opt_state=opt_state, extras=extras
        ).variables[state.COLLECTION]["fp8_0"]
    np.testing.assert_array_equal(history_of(fp8), [[3, 7], [0.5, 0.25]])


def test_every_past_version_has_a_migration_and_a_stored_checkpoint():
    assert sorted(versions.MIGRATIONS) == list(range(1, versions.FORMAT_VERSION))
    stored = [int(re.search(r"_v(\d+)\.", path.name)[1]) for path in stored_checkpoints.DATA.glob("checkpoint_v*")]
    assert sorted(stored) == list(range(1, versions.FORMAT_VERSION + 1))


@pytest.mark.parametrize(
    ("version", "match"),
    [
        (99, r"format version of .*/20: expected 1 to \d, got 99: written by a newer te_jax, which can read it"),
        (0, r"format version of .*/20: expected 1 to \d, got 0$"),
        ("2", r"format version of .*/20: expected 1 to \d, got '2'$"),
        (None, r"format version of .*/20: expected 1 to \d, got None$"),
    ],
)
def test_versions_that_are_not_known(tmp_path, version, match):
    """An error, and not an older step instead."""
    unpack(1, tmp_path)
    variables, _, _ = stored_checkpoints.training_state()
    path = tmp_path / "20" / "te_jax" / "metadata"
    document = {**json.loads(path.read_text()), "format_version": version}
    if version == 99:
        document = {"format_version": 99}  # of which nothing else is known
    path.write_text(json.dumps(document))
    (tmp_path / "20").rename(tmp_path / "19")
    unpack(1, tmp_path)
    (tmp_path / "20").rename(tmp_path / "18")
    (tmp_path / "19").rename(tmp_path / "20")
    with pytest.raises(ValueError, match=match):
        checkpoint.restore(tmp_path, variables, recipe=stored_checkpoints.RECIPE)
