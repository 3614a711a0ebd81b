"""The FP8 state of one linear never becomes that of another: chains whose ops are reordered, inserted, exchanged."""

import tarfile
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import stored_checkpoints
from flax import nnx

import te_jax as te
from te_jax import checkpoint, ops
from te_jax.quant import state
from te_jax.testing.compare import assert_trees_identical

RECIPE = te.DelayedScaling(amax_history_len=4)
X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 16)), jnp.float32)


def linear(name=None):
    return ops.Linear(16, use_bias=False, name=name)


def experts(name):
    return ops.GroupedLinear(2, 16, use_bias=False, name=name)


def identity(x):
    return x


# Pairs of chains with the same parameters, paths and shapes: what stands where isn't in them.
SAME_PARAMETERS = {
    "reordered": ([linear("a"), ops.GELU(), linear("b")], [linear("b"), ops.GELU(), linear("a")]),
    "in runs of their own": ([linear("a"), identity, linear("b")], [linear("b"), identity, linear("a")]),
    "one with a name": ([ops.GELU(), linear(), linear("a")], [linear("a"), linear(), ops.GELU()]),
    "a boundary moved": ([ops.Quantize(), linear(), ops.GELU()], [ops.GELU(), linear(), ops.Quantize()]),
    "of another role": (
        [ops.Quantize(True, False, name="q"), linear("a")],
        [ops.Quantize(False, True, name="q"), linear("a")],
    ),
    "of groups": ([experts("a"), ops.GELU(), experts("b")], [experts("b"), ops.GELU(), experts("a")]),
    "in a list": ([[linear("a")], linear("b")], [[linear("b")], linear("a")]),
}


def extras_of(chain):
    return [jnp.asarray([8, 8], jnp.int32)] * sum(isinstance(op, ops.GroupedLinear) for op in chain)


def made(chain):
    """(module, variables) after a step that each quantizer saw something else in."""
    module = te.Sequential(chain, recipe=RECIPE)
    variables = module.init(jax.random.key(0), X)
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * (3.0 if any(key.key == "a" for key in path) else 1.0), variables["params"]
    )
    variables = {**variables, "params": params}
    grads = jax.jit(jax.grad(lambda v: (module.apply(v, X) ** 2).sum()))(variables)
    return module, {**variables, state.COLLECTION: grads[state.COLLECTION]}


def shapes(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


@pytest.mark.parametrize("pair", SAME_PARAMETERS)
def test_another_order_is_an_error_that_names_both(tmp_path, pair):
    first, second = SAME_PARAMETERS[pair]
    variables = te.Sequential(first, recipe=RECIPE).init(jax.random.key(0), X, *extras_of(first))
    other = te.Sequential(second, recipe=RECIPE)
    target = jax.eval_shape(other.init, jax.random.key(1), X, *extras_of(second))
    assert shapes(variables["params"]) == shapes(target["params"])
    checkpoint.save(tmp_path, 1, variables, recipe=RECIPE)
    stored, wanted = (min(set(a) - set(b)) for a, b in _both(variables, target))
    with pytest.raises(ValueError, match=rf"{stored}/scale: expected .*got no such leaf") as error:
        checkpoint.restore(tmp_path, target, recipe=RECIPE)
    assert f"fp8_state/{wanted}/scale: expected no such leaf (checkpoint)" in str(error.value) or pair == "of groups"
    assert "migrate=True" in str(error.value)
    with ocp.StandardCheckpointer() as plain, pytest.raises(ValueError, match=r"[Dd]o not match|[Mm]ismatch"):
        plain.restore((tmp_path / "1" / "fp8_state").absolute(), target[state.COLLECTION])


def _both(variables, target):
    a, b = (tree[state.COLLECTION] for tree in (variables, target))
    return (a, b), (b, a)


def test_the_same_order_needs_no_names():
    """Chains without names, modules whose order is their own, and single linears have their state under the place."""
    layer_norm_mlp = te.flax.LayerNormMLP(16, 32, recipe=RECIPE)
    for module in (
        te.Sequential([linear(), ops.GELU(), linear()], recipe=RECIPE),
        te.Sequential([ops.RMSNorm(name="norm"), linear("a")], recipe=RECIPE),
        layer_norm_mlp,
    ):
        variables = jax.eval_shape(module.init, jax.random.key(0), X)
        assert list(variables[state.COLLECTION]) == ["fp8_0"]
    shared = linear("a")
    twice = te.Sequential([shared, shared, linear("b")], recipe=RECIPE)
    assert list(jax.eval_shape(twice.init, jax.random.key(0), X)[state.COLLECTION]) == ["fp8_0_a_a_b"]


def test_the_same_linears_keep_their_state_and_others_start_anew(tmp_path):
    """migrate=True, with an op inserted: said aloud, and the same as a new model with that state put in."""
    _, variables = made([linear("a"), identity, linear("b")])
    checkpoint.save(tmp_path, 1, variables, recipe=RECIPE)
    fp8 = variables[state.COLLECTION]
    new = state.init(3, RECIPE)
    target = {**variables, state.COLLECTION: {"fp8_0_a": new, "fp8_2_b": new, "fp8_4_c": new}}
    with pytest.raises(ValueError, match=r"fp8_4_c/scale: expected no such leaf \(checkpoint\).*"):
        checkpoint.restore(tmp_path, target, recipe=RECIPE)
    with pytest.warns(
        UserWarning, match=r"\['fp8_4_c'\] of the model is not in .*/1: created without history$"
    ) as said:
        out = checkpoint.restore(tmp_path, target, recipe=RECIPE, migrate=True).variables
    assert [each.filename for each in said] == [__file__]
    assert_trees_identical(out[state.COLLECTION], {**fp8, "fp8_4_c": new})

    swapped = {**variables, state.COLLECTION: {"fp8_0_b": new, "fp8_2_a": new}}
    text = (
        r"\['fp8_0_b', 'fp8_2_a'\] of the model is not in .*; \['fp8_0_a', 'fp8_2_b'\] of .* is not in the model: drop"
    )
    with pytest.warns(UserWarning, match=text):
        out = checkpoint.restore(tmp_path, swapped, recipe=RECIPE, migrate=True).variables
    assert_trees_identical(out[state.COLLECTION], swapped[state.COLLECTION])
    loss, grads = jax.value_and_grad(lambda v: (made_module("ba").apply(v, X) ** 2).sum())(out)
    assert np.isfinite(loss)
    assert_trees_identical(out["params"], variables["params"])
    assert (np.asarray(grads[state.COLLECTION]["fp8_0_b"]["scale"]) > 0).all()

    longer = te.DelayedScaling(amax_history_len=8)  # and with another history at the same time
    target = {**variables, state.COLLECTION: {"fp8_0_a": state.init(3, longer), "fp8_4_c": state.init(3, longer)}}
    with pytest.warns(UserWarning, match=r"fp8_4_c.*created|lengthened from 4 to 8"):
        out = checkpoint.restore(tmp_path, target, recipe=longer, migrate=True).variables[state.COLLECTION]
    np.testing.assert_array_equal(out["fp8_0_a"]["amax_history"][:, :4], fp8["fp8_0_a"]["amax_history"])
    assert_trees_identical(out["fp8_4_c"], state.init(3, longer))


def made_module(names):
    return te.Sequential([linear(names[0]), identity, linear(names[1])], recipe=RECIPE)


def test_nothing_is_said_where_nothing_has_changed(tmp_path):
    _, variables = made([linear("a"), identity, linear("b")])
    checkpoint.save(tmp_path, 1, variables, recipe=RECIPE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = checkpoint.restore(tmp_path, variables, recipe=RECIPE, migrate=True).variables
    assert_trees_identical(out, variables)


def test_nnx_has_the_names_of_linen(tmp_path):
    chain = [linear("a"), ops.GELU(), linear("b")]
    _, variables = made(chain)
    checkpoint.save(tmp_path, 1, variables, recipe=RECIPE)
    model = te.nnx.Sequential(chain, 16, recipe=RECIPE, rngs=nnx.Rngs(0))
    te.nnx.update(model, checkpoint.restore(tmp_path, te.nnx.to_variables(model), recipe=RECIPE).variables)
    assert_trees_identical(te.nnx.to_variables(model), variables)
    nnx.grad(lambda m: m(X).sum())(model)  # and updates it under them
    assert not np.array_equal(
        te.nnx.to_variables(model)[state.COLLECTION]["fp8_0_a_b"]["uses"],
        variables[state.COLLECTION]["fp8_0_a_b"]["uses"],
    )


def unpack_version_2(folder):
    """A chain of ``up`` and ``down`` as format version 2 stored it: [Linear(32), ReLU, Linear(16)], no biases."""
    with tarfile.open(stored_checkpoints.DATA / "named_ops_v2.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    up, down = ops.Linear(32, use_bias=False, name="up"), ops.Linear(16, use_bias=False, name="down")
    return te.Sequential([up, ops.ReLU(), down], recipe=RECIPE)


def test_format_version_2_had_no_names(tmp_path):
    module = unpack_version_2(tmp_path)
    target = jax.eval_shape(module.init, jax.random.key(0), X)
    with pytest.warns(
        UserWarning, match=r"fp8_0_up_down: .*/1 is of an older format, which has this as fp8_0, without"
    ):
        variables = checkpoint.restore(tmp_path, target, recipe=RECIPE).variables
    report = te.state.report(variables)
    amaxes = {name: np.float32(row.amax) for name, row in report.items()}
    assert amaxes["fp8_0_up_down/1"] == np.abs(variables["params"]["up"]["kernel"]).max() == 1
    assert amaxes["fp8_0_up_down/4"] == np.abs(variables["params"]["down"]["kernel"]).max() == 8
    checkpoint.save(tmp_path, 2, variables, recipe=RECIPE)
    assert_trees_identical(checkpoint.restore(tmp_path, target, recipe=RECIPE).variables, variables)
    longer = te.DelayedScaling(amax_history_len=8)
    of_longer = jax.eval_shape(module.clone(recipe=longer).init, jax.random.key(0), X)
    with pytest.warns(UserWarning, match=r"fp8_0_up_down: .* older format|lengthened from 4 to 8"):
        out = checkpoint.restore(tmp_path, of_longer, recipe=longer, migrate=True, step=1).variables
    np.testing.assert_array_equal(
        out[state.COLLECTION]["fp8_0_up_down"]["amax_history"][:, :4],
        variables[state.COLLECTION]["fp8_0_up_down"]["amax_history"],
    )


def test_places_of_older_formats():
    """The longest place that a name begins with, and of groups those of groups."""
    from te_jax.checkpoint.runs import _by_place

    stored = [("m", name) for name in ("fp8_0", "fp8_0_1", "fp8_3_grouped", "fp8_0_up_down")] + [("fp8_7",)]
    for name, want in {
        "fp8_0_up_down": "fp8_0",
        "fp8_0_1_up_down": "fp8_0_1",
        "fp8_3_up_grouped": "fp8_3_grouped",
        "fp8_3_up_down": None,
        "fp8_7_up_down": None,
    }.items():
        assert _by_place(("m", name), stored) == (None if want is None else ("m", want))
