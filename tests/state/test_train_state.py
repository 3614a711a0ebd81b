"""te.TrainState: what it has beside flax's. That it trains as flax's does is in the table."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import freeze
from flax.training import train_state
from regimes import MODULE, RUN, data, loss, read, variables

import te_jax as te

COLLECTION = te.state.COLLECTION
SGD = optax.sgd(1e-3)
grad = jax.jit(jax.grad(loss))
apply_gradients = jax.jit(lambda ts, grads: ts.apply_gradients(grads=grads))


def create(tx=SGD, params=None):
    return te.TrainState.create(apply_fn=MODULE.apply, params=variables() if params is None else params, tx=tx)


def stepped(ts, i, scale=1.0, use=0):
    x, dy = data()
    return apply_gradients(ts, grad(ts.params, x[i, use], dy[i, use] * jnp.float32(scale)))


def history(ts):
    return np.asarray(read(ts.params[COLLECTION][RUN]).history)


def amax(*steps_and_uses):
    """[3, n]: those of x and dy; that of the kernel stays about what it was."""
    return np.array([[np.abs(a[at]).max() for at in steps_and_uses] for a in data()])


def test_optimizer_state_is_that_of_flax_and_of_parameters_alone():
    v = variables()
    flax = train_state.TrainState.create(apply_fn=MODULE.apply, params=v, tx=optax.adam(1e-3))
    for params in (v, {"params": v["params"]}, v["params"], freeze(v)):
        opt_state = create(optax.adam(1e-3), params).opt_state
        assert jax.tree.leaves(jax.tree.map(jnp.shape, opt_state)) == jax.tree.leaves(
            jax.tree.map(jnp.shape, flax.opt_state)
        )
    assert jax.tree.structure(create(optax.adam(1e-3)).opt_state) == jax.tree.structure(flax.opt_state)


def test_no_other_class_has_its_structure():
    """jit would take the one for the other, and run what it compiled for that (jax alone compares fields only)."""

    class OfUser(te.TrainState):
        pass

    states = [cls.create(apply_fn=None, params=variables(), tx=SGD) for cls in (te.TrainState, OfUser)]
    structures = [jax.tree.structure(ts) for ts in states]
    structures.append(jax.tree.structure(train_state.TrainState.create(apply_fn=None, params=variables(), tx=SGD)))
    for i, structure in enumerate(structures):
        assert [structure == other for other in structures] == [i == j for j in range(3)]
    for ts, structure in zip(states, structures, strict=False):
        for same in (jax.tree.map(lambda leaf: leaf, ts), ts.replace(step=1), copy.deepcopy(ts)):
            assert type(same) is type(ts)
            assert jax.tree.structure(same) == structure


@pytest.mark.parametrize(
    "make",
    [lambda v: {"params": v["params"]}, lambda v: v["params"], freeze],
    ids=["collections", "parameters", "FrozenDict"],
)
def test_other_trees(make):
    ts = create(params=make(variables()))
    grads = make(grad(variables(), *(a[0, 0] for a in data())))
    after = apply_gradients(ts, grads)
    assert jax.tree.structure(after.params) == jax.tree.structure(ts.params)
    want = stepped(create(), 0)
    for a, b in zip(jax.tree.leaves(after.params), jax.tree.leaves(make(want.params)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_quantizers_that_were_not_used_keep_their_state():
    ts = stepped(create(), 0)
    x, dy = data()
    unused = {**grad(ts.params, x[1, 0], dy[1, 0]), COLLECTION: jax.tree.map(jnp.zeros_like, ts.params[COLLECTION])}
    after = apply_gradients(ts, unused)
    jax.tree.map(np.testing.assert_array_equal, after.params[COLLECTION], ts.params[COLLECTION])
    with pytest.raises(ValueError, match="expected a parity that flipped"):
        after.check(ts)


def test_multi_steps():
    """The parameters are stepped every other microbatch, FP8 state with every one."""
    ts = create(optax.MultiSteps(SGD, 2))
    kernel = ts.params["params"]["ops_0"]["kernel"]
    for n, at in enumerate(((0, 0), (0, 1), (1, 0), (1, 1)), start=1):
        before, ts = ts, stepped(ts, at[0], use=at[1])
        ts.check(before)
        changed = (ts.params["params"]["ops_0"]["kernel"] != before.params["params"]["ops_0"]["kernel"]).any()
        assert changed == (n % 2 == 0)
    assert (ts.params["params"]["ops_0"]["kernel"] != kernel).any()
    np.testing.assert_array_equal(history(ts)[[0, 2]], amax((1, 1), (1, 0), (0, 1), (0, 0)))


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_skipped_steps(bad):
    ts = stepped(create(optax.apply_if_finite(SGD, 5)), 0)
    after = stepped(ts, 1, scale=bad)
    jax.tree.map(np.testing.assert_array_equal, after.params, ts.params)
    after.check(ts)  # nothing to complain about
    resumed = stepped(after, 2)
    resumed.check(after)
    np.testing.assert_array_equal(history(resumed)[[0, 2], :2], amax((2, 0), (0, 0)))
    tampered = after.replace(params={**after.params, COLLECTION: resumed.params[COLLECTION]})
    with pytest.raises(ValueError, match=r"TrainState.check: .*since the optimizer skipped the step"):
        tampered.check(ts)


def test_a_skipped_update_of_multi_steps_holds_nothing_up():
    """apply_if_finite inside of MultiSteps says until the next update that the last one was skipped."""
    ts = create(optax.MultiSteps(optax.apply_if_finite(SGD, 5), 2))
    ts = stepped(ts, 0)
    skipped = stepped(ts, 1, scale=np.inf)
    jax.tree.map(np.testing.assert_array_equal, skipped.params, ts.params)
    after = stepped(skipped, 2)
    after.check(skipped)
    np.testing.assert_array_equal(history(after)[[0, 2], :2], amax((2, 0), (0, 0)))


def test_gives_up_after_too_many_skips():
    """Then the parameters are NaN, and so is the loss."""
    ts = create(optax.apply_if_finite(SGD, 1))
    for i in range(2):
        ts = stepped(ts, i, scale=np.nan)
    assert np.isnan(ts.params["params"]["ops_0"]["kernel"]).all()


def test_check():
    ts = create()
    one = stepped(ts, 0)
    one.check(ts)
    with pytest.raises(ValueError, match=r"TrainState.check: before: expected step 1, got 0"):
        stepped(one, 1).check(ts)
    with pytest.raises(TypeError, match=r"TrainState.check: before: expected concrete arrays"):
        jax.jit(lambda a, b: a.check(b))(one, ts)
    frozen = one.replace(params={**one.params, COLLECTION: ts.params[COLLECTION]})
    with pytest.raises(ValueError, match=r"state.check: .*differentiate the loss with respect to it"):
        frozen.check(ts)


def test_errors():
    with pytest.raises(ValueError, match=r"TrainState: params: expected the collections .*'batch_stats'"):
        create(params={**variables(), "batch_stats": {}})
    ts, v = create(), variables()
    with pytest.raises(ValueError, match=r"TrainState: params: expected the collections .*'batch_stats'"):
        create(params={"params": v["params"], "batch_stats": {"mean": jnp.ones(3)}})  # of a recipe without state
    with pytest.raises(ValueError, match=r"TrainState: params: .* several models.* some below \['a', 'b'\]"):
        create(params={"a": v, "b": v})
    with pytest.raises(ValueError, match=r"TrainState: params: .*some below \['b'\]"):
        create(params={**v, "params": {"a": v["params"], "b": v}})
    with pytest.raises(
        ValueError, match=r"TrainState.apply_gradients: grads: .*differentiate .* all of params, got \['params'\]"
    ):
        ts.apply_gradients(grads={"params": v["params"]})


def test_resumes_from_a_checkpoint(tmp_path):
    """Parameters, FP8 state and optimizer state are all that the next step depends on, bit for bit."""
    tx = optax.apply_if_finite(optax.adam(1e-2), 5)
    ts = stepped(stepped(create(tx), 0), 1)
    recipe = MODULE.recipe
    te.checkpoint.save(tmp_path, int(ts.step), ts.params, opt_state=ts.opt_state, recipe=recipe)
    new = create(tx)
    restored = te.checkpoint.restore(tmp_path, new.params, opt_state=new.opt_state, recipe=recipe)
    new = new.replace(step=restored.step, params=restored.variables, opt_state=restored.opt_state)
    want, got = stepped(ts, 2), stepped(new, 2)
    got.check(new)
    jax.tree.map(np.testing.assert_array_equal, (got.params, got.opt_state), (want.params, want.opt_state))
