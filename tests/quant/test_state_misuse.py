"""FP8 state that something not linear has stepped, or nothing: a NaN loss, and `state.check` says why."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from state_steps import after, gradients, jit_loss, loss, step, variables, view

import te_jax.state
from te_jax.quant import state


@pytest.mark.parametrize("trained", [False, True], ids=["from the start", "from a trained state"])
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(1e-3),
        optax.sgd(1e-5),
        optax.sgd(1e-3, momentum=0.9),
        optax.adam(1e-3),
        optax.adamw(3e-4),
        optax.lion(1e-4),
        optax.adafactor(1e-3),
        optax.MultiSteps(optax.adam(1e-3), 2),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    ],
    ids=["sgd", "slow sgd", "momentum", "adam", "adamw", "lion", "adafactor", "multisteps", "clip+adam"],
)
def test_optimizer_over_the_whole_tree_is_loud(optimizer, trained):
    """After two updates of the optimizer the next step's loss is NaN, and `check` says why."""
    v = after((7.0, 0.4), (2.0, 0.6)) if trained else variables()
    before, opt_state = v, optimizer.init(v)

    @jax.jit
    def update(grads, opt_state, v):
        updates, opt_state = optimizer.update(grads, opt_state, v)
        return optax.apply_updates(v, updates), opt_state

    for _ in range(4 if isinstance(optimizer, optax.MultiSteps) else 2):
        v, opt_state = update(gradients(v, (3.0, 0.7))[0], opt_state, v)
    assert np.isnan(jit_loss(v, jnp.float32(3.0), jnp.float32(0.7)))
    with pytest.raises(ValueError, match=r"state.check: \['mlp'\]: .*not linear"):
        te_jax.state.check(before[state.COLLECTION], v[state.COLLECTION])
    # and stays loud
    assert np.isnan(jit_loss(step(v, 3.0, 0.7), jnp.float32(3.0), jnp.float32(0.7)))


def test_split_keeps_the_state_from_the_optimizer():
    v = after((7.0, 0.4))
    params, fp8 = state.split(v)
    assert (set(params), set(fp8)) == ({"params"}, {"mlp"})
    optimizer = optax.adam(1e-3)
    opt_state = optimizer.init(params)
    grads, new_fp8 = state.split(gradients(v, (3.0, 0.7))[0])
    updates, _ = optimizer.update(grads, opt_state, params)
    v = state.merge(optax.apply_updates(params, updates), state.apply(fp8, new_fp8))
    np.testing.assert_array_equal(view(v).history[:, :2], np.float32([[3.0, 7.0], [0.7, 0.4]]))
    te_jax.state.check(fp8, v[state.COLLECTION])


def test_split_without_state_and_errors():
    assert state.split({"params": 1}) == ({"params": 1}, {})
    assert state.merge({"params": 1}, {}) == {"params": 1}
    with pytest.raises(TypeError, match=r"state.split: variables: expected a dict"):
        state.split([1])
    with pytest.raises(ValueError, match=r"state.merge: rest: expected no '_overwrite_with_gradient'"):
        state.merge({state.COLLECTION: {}}, {"mlp": {}})
    with pytest.raises(TypeError, match=r"state.apply: \['mlp'\]\['scale'\]: expected leaves"):
        state.apply({"mlp": {"scale": jnp.ones(2)}}, {"mlp": {"scale": jnp.ones(2)}})


def test_check_finds_state_that_was_not_differentiated():
    v = after((7.0, 0.4))
    fp8 = v[state.COLLECTION]
    jax.jit(jax.grad(lambda params: loss({**v, "params": params}, 3.0, 0.7)))(v["params"])  # state closed over
    with pytest.raises(ValueError, match=r"state.check: \['mlp'\]: expected a parity that flipped"):
        te_jax.state.check(fp8, fp8)
    fresh = variables()[state.COLLECTION]
    with pytest.raises(ValueError, match="expected a parity that flipped"):
        te_jax.state.check(fresh, fresh)
    te_jax.state.check(fp8, step(v, 3.0, 0.7)[state.COLLECTION])


def test_check_allows_unused_runs_if_asked():
    v = after((7.0, 0.4))
    before = {"used": v[state.COLLECTION]["mlp"], "unused": v[state.COLLECTION]["mlp"]}
    new = {**before, "used": step(v, 3.0, 0.7)[state.COLLECTION]["mlp"]}
    with pytest.raises(ValueError, match=r"state.check: \['unused'\]:"):
        te_jax.state.check(before, new)
    te_jax.state.check(before, new, allow_unused=True)
    with pytest.raises(ValueError, match="expected a parity that flipped"):
        te_jax.state.check(before, before, allow_unused=True)


def test_check_refuses_tracers():
    fp8 = variables()[state.COLLECTION]
    with pytest.raises(TypeError, match="concrete arrays"):
        jax.jit(lambda s: te_jax.state.check(s, s))(fp8)
