"""te.state.optimizer and te.TrainState: equal to loops that keep parameters and FP8 state apart by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from regimes import MODULE, RECIPE, RUN, H, data, loss, read, variables

import te_jax as te

COLLECTION = te.state.COLLECTION
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
LAYER = te.flax.LayerNormMLP(features=16, hidden_features=32, recipe=RECIPE)
grad = jax.jit(jax.grad(loss))


def layer_loss(v, batch):
    return jnp.mean((LAYER.apply(v, batch["x"]) - batch["y"]) ** 2)


@functools.cache
def layer():
    """(variables, four batches)."""
    x, y = jax.random.normal(jax.random.key(0), (2, 4, 32, 16))
    batches = [{"x": x[i] * 2.0**i, "y": y[i]} for i in range(4)]
    return LAYER.init(jax.random.key(1), x[0]), batches


def of_larger_amax(a, b):
    """For each quantizer, the state of the microbatch that had the larger amax."""

    def of_run(a, b):
        larger = a["amax_history"][:, 0] >= b["amax_history"][:, 0]
        return jax.tree.map(lambda x, y: jnp.where(larger.reshape(-1, *(1,) * (x.ndim - 1)), x, y), a, b)

    return {run: of_run(a[run], b[run]) for run in a}


def by_hand(microbatches):
    """Trains as MaxText does: FP8 state is popped from the gradients, and put back where it overwrites the old one."""

    @jax.jit
    def step(v, opt_state, batch):
        params = {"params": v["params"]}
        total, states = None, []
        for i in range(microbatches):
            part = jax.tree.map(lambda a, i=i: a[i::microbatches], batch)
            grads = dict(jax.grad(layer_loss)(v, part))
            states.append(grads.pop(COLLECTION))
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        grads = jax.tree.map(lambda g: g / microbatches, total)
        updates, opt_state = TX.update(grads, opt_state, params)
        fp8 = functools.reduce(of_larger_amax, states)
        return {**optax.apply_updates(params, updates), COLLECTION: fp8}, opt_state

    v, batches = layer()
    opt_state = TX.init({"params": v["params"]})
    for batch in batches:
        v, opt_state = step(v, opt_state, batch)
    return v, opt_state


def with_optimizer(microbatches):
    tx = te.state.optimizer(TX)

    @jax.jit
    def step(v, opt_state, batch):
        _, grads = te.accumulate_gradients(layer_loss, v, batch, num_microbatches=microbatches)
        updates, opt_state = tx.update(grads, opt_state, v)
        return optax.apply_updates(v, updates), opt_state

    v, batches = layer()
    opt_state = tx.init(v)
    for batch in batches:
        v, opt_state = step(v, opt_state, batch)
    return v, opt_state


def with_train_state(microbatches):
    @jax.jit
    def step(ts, batch):
        _, grads = ts.accumulate_gradients(layer_loss, batch, num_microbatches=microbatches)
        return ts.apply_gradients(grads=grads)

    v, batches = layer()
    ts = te.TrainState.create(apply_fn=LAYER.apply, params=v, tx=TX)
    for batch in batches:
        before, ts = ts, step(ts, batch)
        ts.check(before)
    return ts.params, ts.opt_state


@pytest.mark.parametrize(("train", "microbatches"), [(with_optimizer, 1), (with_train_state, 2)])
def test_equal_to_a_loop_by_hand(train, microbatches):
    want, want_opt_state = by_hand(microbatches)
    got, opt_state = train(microbatches)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert len(jax.tree.leaves(opt_state)) == len(jax.tree.leaves(want_opt_state))
    jax.tree.map(np.testing.assert_array_equal, got[COLLECTION], want[COLLECTION])
    for a, b in zip(jax.tree.leaves((got, opt_state)), jax.tree.leaves((want, want_opt_state)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------------------------------------- te.state.optimizer


def gradients(v, step, uses=1):
    x, dy = data()
    found = [grad(v, x[step, i], dy[step, i]) for i in range(uses)]
    return found if uses > 1 else found[0]


def test_state_is_replaced_not_added_to():
    """Adding the difference would be off in the last bit of 46% of random numbers."""
    a, b = np.random.default_rng(0).standard_normal((2, 3, H)).astype(np.float32)
    v = variables()
    before, after = (jax.tree.map(np.asarray, v) for _ in range(2))
    before[COLLECTION][RUN]["amax_history"], after[COLLECTION][RUN]["amax_history"] = a, b
    after[COLLECTION][RUN]["uses"] = np.ones((3, 66), np.float32)  # used
    assert (a + (b - a) != b).any()
    tx = te.state.optimizer(optax.sgd(1.0))
    updates, _ = tx.update(after, tx.init(before), before)
    for change in (lambda u: u, lambda u: jax.tree.map(lambda leaf: leaf * 0.25, u)):  # as an outer optax.scale does
        got = optax.apply_updates(before, change(updates))
        np.testing.assert_array_equal(got[COLLECTION][RUN]["amax_history"], b)
    jax.tree.map(
        np.testing.assert_array_equal,
        optax.apply_updates(v, jax.tree.map(jnp.zeros_like, updates)),
        v,
    )


def test_it_is_the_optimizer_of_the_parameters():
    """Its state is that of tx for the parameters, and a mask of tx sees these alone."""
    seen = []

    def mask(params):
        seen.append(sorted(params))
        return jax.tree.map(lambda p: p.ndim > 1, params)

    v = variables()
    tx = te.state.optimizer(optax.adamw(1e-3, mask=mask))
    opt_state = tx.init(v)
    assert jax.tree.structure(opt_state) == jax.tree.structure(
        optax.adamw(1e-3, mask=mask).init({"params": v["params"]})
    )
    tx.update(gradients(v, 0), opt_state, v)
    assert all(names == ["params"] for names in seen)


def test_multi_steps_outside():
    """State changes only with the parameters, to the microbatches' mean state: the amax within half an octave."""
    v, tx, plain = (
        variables(),
        optax.MultiSteps(te.state.optimizer(optax.adam(1e-2)), 2),
        optax.MultiSteps(optax.adam(1e-2), 2),
    )
    opt_state, params, plain_state = tx.init(v), v["params"], plain.init(v["params"])
    update, plain_update = jax.jit(tx.update), jax.jit(plain.update)
    x, dy = data()
    for step in range(2):
        before = v
        kernel = np.abs(v["params"]["ops_0"]["kernel"]).max()
        for grads in gradients(v, step, uses=2):
            jax.tree.map(np.testing.assert_array_equal, v, before)
            updates, opt_state = update(grads, opt_state, v)
            v = optax.apply_updates(v, updates)
            updates, plain_state = plain_update(grads["params"], plain_state, params)
            params = optax.apply_updates(params, updates)
        true = np.array([np.abs(x[step]).max(), kernel, np.abs(dy[step]).max()])
        got = read(v[COLLECTION][RUN])
        assert (got.history[:, 0] >= true * 2**-0.5 * (1 - 2**-22)).all()
        assert (got.history[:, 0] <= true * 2**0.5 * (1 + 2**-22)).all()
        te.state.check(before[COLLECTION], v[COLLECTION])
        np.testing.assert_array_equal(v["params"]["ops_0"]["kernel"], params["ops_0"]["kernel"])


def test_apply_if_finite_outside_is_an_error():
    v, tx = variables(), optax.apply_if_finite(te.state.optimizer(optax.sgd(1e-3)), 3)
    with pytest.raises(TypeError, match=r"te_jax\.state\.Replacement"):
        tx.update(gradients(v, 0), tx.init(v), v)


def test_errors_of_the_optimizer():
    v, tx = variables(), te.state.optimizer(optax.sgd(1e-3))
    grads = gradients(v, 0)
    with pytest.raises(ValueError, match=r"state.optimizer: params: expected update\(grads, opt_state, variables\)"):
        tx.update(grads, tx.init(v))
    with pytest.raises(ValueError, match=r"state.optimizer: updates: .*differentiate the loss with respect to it too"):
        tx.update({"params": grads["params"]}, tx.init(v), v)


def test_without_state():
    """A recipe without state: it is tx."""
    params, tx = {"params": {"kernel": jnp.ones(3)}}, optax.adam(1e-3)
    wrapped = te.state.optimizer(tx)
    for tree in (params, [jnp.ones(2)], jnp.ones(2)):
        got, want = (t.update(tree, t.init(tree), tree)[0] for t in (wrapped, tx))
        assert jax.tree.structure(got) == jax.tree.structure(want)
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_further_arguments_reach_the_optimizer():
    def update(grads, state, params=None, *, value):
        return jax.tree.map(lambda g: value * g, grads), state

    v, grads = variables(), gradients(variables(), 0)
    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    for tx in (te.state.optimizer(inner), te.state.optimizer(optax.MultiSteps(inner, 1))):
        updates, _ = tx.update(grads, tx.init(v), v, value=3.0)
        want = 3 * grads["params"]["ops_0"]["kernel"]
        np.testing.assert_allclose(updates["params"]["ops_0"]["kernel"], want, rtol=1e-6)


def test_nnx_optimizer():
    """nnx.Optimizer over parameters and FP8 state, with a linen chain in nnx."""
    names = ("amax_history", "scale", "uses")

    class Run(nnx.Module):
        def __init__(self, leaves):
            self.amax_history, self.scale, self.uses = (nnx.Variable(leaves[name]) for name in names)

        def leaves(self):
            return {name: getattr(self, name)[...] for name in names}

    class Model(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(variables()["params"]["ops_0"]["kernel"])
            self.fp8 = Run(variables()[COLLECTION][RUN])

        def __call__(self, x):
            params = {"ops_0": {"kernel": self.kernel[...]}}
            return MODULE.apply({"params": params, COLLECTION: {RUN: self.fp8.leaves()}}, x)

    x, dy = data()
    model, trained = Model(), nnx.Any(nnx.Param, nnx.Variable)
    optimizer = nnx.Optimizer(model, te.state.optimizer(optax.sgd(1e-3)), wrt=trained)
    grads = nnx.grad(lambda m: jnp.sum(m(x[0, 0]) * dy[0, 0]), argnums=nnx.DiffState(0, trained))(model)
    optimizer.update(model, grads)
    want = gradients(variables(), 0)
    jax.tree.map(np.testing.assert_array_equal, model.fp8.leaves(), want[COLLECTION][RUN])
    kernel, step = (v["params"]["ops_0"]["kernel"] for v in (variables(), want))
    np.testing.assert_allclose(model.kernel[...], kernel - 1e-3 * step, rtol=1e-6)
