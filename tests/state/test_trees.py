"""te.state on every kind of tree that holds a model's variables: dicts, FrozenDicts, and three layouts of nnx.State."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict, freeze
from regimes import MODULE, RECIPE, RUN, data, loss, variables

import te_jax as te

grad = jax.jit(jax.grad(loss))
accumulate, apply = jax.jit(te.state.accumulate), jax.jit(te.state.apply)


class Fp8(nnx.Variable):
    pass


def a_variable_for_each_leaf(v):
    """As nnx.bridge.ToNNX makes of a linen module."""
    runs = jax.tree.map(Fp8, v[te.state.COLLECTION])
    return nnx.State({"block": {**runs, "kernel": nnx.Param(v["params"]["ops_0"]["kernel"])}})


def a_variable_for_each_run(v):
    runs = {name: Fp8(dict(run)) for name, run in v[te.state.COLLECTION].items()}
    return nnx.State({"block": {**runs, "kernel": nnx.Param(v["params"]["ops_0"]["kernel"])}})


def without_variables(v):
    """As nnx.Optimizer hands to optax."""
    return nnx.as_pure(a_variable_for_each_leaf(v))


TREES = {
    "dict": lambda v: v,
    "FrozenDict": freeze,
    "nnx, a Variable for each leaf": a_variable_for_each_leaf,
    "nnx, a Variable for each run": a_variable_for_each_run,
    "nnx, without Variables": without_variables,
}


@pytest.fixture(params=TREES)
def tree(request):
    """(variables, its gradient in two uses), in one of the layouts; and how it is made of a dict."""
    make = TREES[request.param]
    v = variables()
    x, dy = data()
    return make, make(v), [make(grad(v, x[0, i], dy[0, i])) for i in range(2)]


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_split_and_merge(tree):
    _, v, _ = tree
    rest, fp8 = te.state.split(v)
    assert type(rest) is type(fp8) is type(v)
    kernel, *others = jax.tree.leaves(rest)
    assert kernel.shape == (16, 16)
    assert not others
    assert [leaf.shape for leaf in jax.tree.leaves(fp8)] == [(3, 4), (3,), (3, 66)]
    assert_same(te.state.merge(rest, fp8), v)


def test_accumulate_apply_and_check(tree):
    """Results are those of plain dicts, in the tree's own types."""
    make, v, (a, b) = tree
    _, old = te.state.split(v)
    new = accumulate(te.state.split(a)[1], te.state.split(b)[1])
    after = te.state.merge(te.state.split(v)[0], apply(old, new))
    x, dy = data()
    (plain_a, plain_b) = (te.state.split(grad(variables(), x[0, i], dy[0, i]))[1] for i in range(2))
    assert_same(after, make({**variables(), te.state.COLLECTION: accumulate(plain_a, plain_b)}))
    te.state.check(old, te.state.split(after)[1])
    with pytest.raises(ValueError, match=rf"state.check: .*{RUN}.*expected a parity that flipped"):
        te.state.check(old, old)


def test_accumulate_gradients_keeps_the_type():
    x, dy = (a[0].reshape(16, *a.shape[3:]) for a in data())
    for v in (variables(), freeze(variables())):
        _, grads = te.accumulate_gradients(lambda v, b: loss(v, *b), v, (x, dy), num_microbatches=2)
        assert jax.tree.structure(grads) == jax.tree.structure(v)


def by_its_norm(leaf):
    return leaf / jnp.linalg.norm(leaf)


@pytest.mark.parametrize("treatment", [jnp.sign, by_its_norm])
def test_each_leaf_by_itself(treatment):
    """What is left reads as state: every amax is about 1 then. The dy of a loss that is a mean is far below that."""
    v = variables()
    x, dy = data()
    for i in range(2):
        grads = grad(v, x[i, 0], dy[i, 0] / 4096)
        te.state.check(v[te.state.COLLECTION], grads[te.state.COLLECTION])
        treated = jax.tree.map(treatment, grads)
        with pytest.raises(ValueError, match=rf"state.check: .*{RUN}.*something not linear has stepped"):
            te.state.check(v[te.state.COLLECTION], treated[te.state.COLLECTION])
        v = {**v, te.state.COLLECTION: treated[te.state.COLLECTION]}


def test_a_factor_for_each_leaf():
    """optax.scale_by_trust_ratio around te.state.optimizer, instead of inside."""
    tx = optax.chain(optax.scale_by_trust_ratio(), te.state.optimizer(optax.sgd(0.0)))
    x, dy = data()
    v, before = variables(), None
    opt_state = tx.init(v)
    for i in range(3):
        before = v
        updates, opt_state = tx.update(grad(v, x[i, 0], dy[i, 0]), opt_state, v)
        v = optax.apply_updates(v, updates)
    with pytest.raises(ValueError, match=rf"state.check: .*{RUN}.*something not linear has stepped"):
        te.state.check(before[te.state.COLLECTION], v[te.state.COLLECTION])


def test_a_bridged_module():
    """A linen chain in nnx: the loss is differentiated in its parameters and its FP8 state."""
    x, dy = data()
    model = nnx.bridge.ToNNX(MODULE, rngs=nnx.Rngs(0)).lazy_init(x[0, 0])
    graph, state, others = nnx.split(model, lambda path, value: not isinstance(value, nnx.RngState), ...)

    @jax.jit
    def gradient(state, x, dy):
        return jax.grad(lambda state: jnp.sum(nnx.merge(graph, state, others, copy=True)(x) * dy))(state)

    rest, fp8 = te.state.split(state)
    grads, new = te.state.split(gradient(state, x[0, 0], dy[0, 0]))
    plain = {
        "params": {"ops_0": {"kernel": jax.tree.leaves(rest)[0]}},
        te.state.COLLECTION: variables()["_overwrite_with_gradient"],
    }
    want = grad(plain, x[0, 0], dy[0, 0])
    for a, b in zip(jax.tree.leaves((grads, apply(fp8, new))), jax.tree.leaves(te.state.split(want)), strict=True):
        np.testing.assert_array_equal(a, b)
    te.state.check(fp8, apply(fp8, new))


def test_errors():
    run = te.state.init(3, RECIPE)
    with pytest.raises(TypeError, match=r"state.split: variables: expected a dict"):
        te.state.split([run])
    with pytest.raises(ValueError, match=r"state.merge: rest: expected no '_overwrite_with_gradient'"):
        te.state.merge(FrozenDict({te.state.COLLECTION: {RUN: run}}), {RUN: run})
    state = nnx.State({"block": {RUN: run, "kernel": jnp.ones(2)}})
    with pytest.raises(ValueError, match=rf"state.merge: \['block'\]\['{RUN}'\]: .*something in both"):
        te.state.merge(state, state)
    with pytest.raises(TypeError, match=r"state.accumulate: \['fp8_0'\]: expected one array for each of"):
        te.state.accumulate({RUN: {**run, "scale": {}}}, {RUN: {**run, "scale": {}}})
