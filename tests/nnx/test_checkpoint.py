"""One checkpoint for linen and nnx: written by either, by te.checkpoint or plain orbax, and read by the other."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import te_jax as te
from te_jax import ops
from te_jax.testing.compare import assert_trees_identical

RECIPE = te.DelayedScaling(amax_history_len=4)
CHAIN = (ops.RMSNorm(), ops.Linear(32), ops.SwiGLU(), ops.Linear(32, name="out"))
X = jax.random.normal(jax.random.key(0), (16, 32))


def nnx_model(seed=0):
    return te.nnx.Sequential(CHAIN, 32, recipe=RECIPE, rngs=nnx.Rngs(seed))


LINEN = te.Sequential(CHAIN, recipe=RECIPE)


def loss_fn(model, x):
    return (model(x) ** 2).mean()


def trained():
    model, step = nnx_model(), nnx.jit(te.nnx.grad(loss_fn))
    for i in range(3):
        grads = step(model, (i + 1) * X)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
    return model


@pytest.fixture(scope="module")
def model():
    return trained()


def linen_step(variables):
    return jax.jit(jax.value_and_grad(lambda v: (LINEN.apply(v, X) ** 2).mean()))(variables)


def assert_goes_on_the_same(model, variables):
    """One more step of both gives the same loss, gradients and state."""
    loss, grads = nnx.jit(te.nnx.value_and_grad(loss_fn))(model, X)
    want, want_grads = linen_step(variables)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(nnx.to_pure_dict(grads)), jax.tree.leaves(want_grads["params"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8)
    got_state = te.nnx.to_variables(model)[te.state.COLLECTION]
    for a, b in zip(jax.tree.leaves(got_state), jax.tree.leaves(want_grads[te.state.COLLECTION]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_te_checkpoint(tmp_path, model):
    """nnx -> linen with te.checkpoint, and linen -> a fresh nnx model from its abstract variables."""
    model = nnx.clone(model)
    saved = te.nnx.to_variables(model)
    te.checkpoint.save(tmp_path, 3, saved, recipe=RECIPE)
    target = jax.eval_shape(LINEN.init, jax.random.key(0), X)
    restored = te.checkpoint.restore(tmp_path, target, recipe=RECIPE).variables
    assert_trees_identical(restored, saved)

    abstract = te.nnx.to_variables(nnx.eval_shape(nnx_model))
    fresh = nnx_model(seed=1)
    te.nnx.update(fresh, te.checkpoint.restore(tmp_path, abstract, recipe=RECIPE).variables)
    assert_trees_identical(te.nnx.to_variables(fresh), saved)
    assert_goes_on_the_same(fresh, restored)


def test_plain_orbax(tmp_path, model):
    variables = LINEN.init(jax.random.key(5), X)
    _, grads = linen_step(variables)
    variables = te.state.merge(te.state.split(variables)[0], te.state.split(grads)[1])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "linen", variables)
        checkpointer.save(tmp_path / "nnx", te.nnx.to_variables(model))
        checkpointer.wait_until_finished()
        from_linen = checkpointer.restore(tmp_path / "linen", te.nnx.to_variables(model))
        from_nnx = checkpointer.restore(tmp_path / "nnx", variables)
    assert_trees_identical(from_linen, variables)
    assert_trees_identical(from_nnx, te.nnx.to_variables(model))
    fresh = nnx_model(seed=1)
    te.nnx.update(fresh, from_linen)
    assert_goes_on_the_same(fresh, variables)


def test_resume_is_bit_identical(tmp_path):
    """Dropout included, whose random stream goes among the extras."""

    def make(seed):
        model = te.nnx.LayerNormMLP(32, 32, dropout_rate=0.1, recipe=RECIPE, rngs=nnx.Rngs(seed))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = te.nnx.value_and_grad(loss_fn)(model, x)
        optimizer.update(model, grads)
        return loss

    model, optimizer = make(0)
    for i in range(2):
        step(model, optimizer, (i + 1) * X)
    extras = {"rngs": nnx.to_pure_dict(nnx.state(model, nnx.RngState))}
    opt_state = nnx.to_pure_dict(nnx.state(optimizer))
    variables = te.nnx.to_variables(model)
    te.checkpoint.save(tmp_path, 2, variables, recipe=RECIPE, opt_state=opt_state, extras=extras)
    want = [step(model, optimizer, (i + 3) * X) for i in range(2)]

    other, other_optimizer = make(1)
    restored = te.checkpoint.restore(tmp_path, variables, recipe=RECIPE, opt_state=opt_state, extras=extras)
    te.nnx.update(other, restored.variables)
    nnx.update(other, restored.extras["rngs"])
    nnx.update(other_optimizer, restored.opt_state)
    assert [step(other, other_optimizer, (i + 3) * X) for i in range(2)] == want
    assert_trees_identical(te.nnx.to_variables(other), te.nnx.to_variables(model))


def test_update_checks_everything_before_it_changes_anything(model):
    model = nnx.clone(model)
    before = te.nnx.to_variables(model)
    other = jax.tree.map(lambda a: a + 1, before)
    missing = {**other, "params": {k: v for k, v in other["params"].items() if k != "out"}}
    with pytest.raises(
        ValueError, match=r"nnx.update: params/out/bias: .*float32\[32\] \(model\), got no such variable"
    ):
        te.nnx.update(model, missing)
    extra = {**other, "params": {**other["params"], "more": jnp.ones(3)}}
    with pytest.raises(ValueError, match=r"params/more: .*no such variable \(model\), got float32\[3\]"):
        te.nnx.update(model, extra)
    state = jax.tree.map(lambda a: a[..., :2], other[te.state.COLLECTION])
    with pytest.raises(
        ValueError, match=r"fp8_0_ops_1_out/amax_history: .*float32\[6, 4\] \(model\), got float32\[6, 2\]"
    ):
        te.nnx.update(model, {**other, te.state.COLLECTION: state})
    halved = {**other, "params": jax.tree.map(lambda a: a.astype(jnp.bfloat16), other["params"])}
    with pytest.raises(ValueError, match=r"float32\[32, 32\] \(model\), got bfloat16\[32, 32\] \(variables\)"):
        te.nnx.update(model, halved)
    with pytest.raises(TypeError, match=r"nnx.update: variables: expected a dict of collections .*, got State"):
        te.nnx.update(model, nnx.state(model))
    assert_trees_identical(te.nnx.to_variables(model), before)
    te.nnx.update(model, other)
    assert_trees_identical(te.nnx.to_variables(model), other)
