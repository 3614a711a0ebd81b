"""Training on from a checkpoint is bit-identical to not having stopped."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import te_jax as te
from te_jax import checkpoint, ops
from te_jax.testing.compare import assert_trees_identical

OPTIMIZER = optax.adam(1e-2)


def make(recipe):
    """(start, step): step(variables, opt_state, key) -> the same and the loss."""
    model = te.Sequential(
        [ops.RMSNorm(), ops.Linear(32), ops.GELU(), ops.Linear(16)], recipe=recipe, dtype=jnp.bfloat16
    )

    def start():
        variables = model.init(jax.random.key(0), jnp.zeros((16, 16), jnp.bfloat16))
        return variables, OPTIMIZER.init(te.state.split(variables)[0]), jax.random.key(1)

    @jax.jit
    def step(variables, opt_state, key):
        key, now = jax.random.split(key)
        x = jax.random.normal(now, (16, 16), jnp.bfloat16)

        def loss_fn(variables):
            return jnp.mean((model.apply(variables, x) - jnp.sin(x)).astype(jnp.float32) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(variables)
        params, fp8 = te.state.split(variables)
        grads, new_fp8 = te.state.split(grads)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        variables = te.state.merge(optax.apply_updates(params, updates), te.state.apply(fp8, new_fp8))
        return variables, opt_state, key, loss

    return start, step


def train(step, variables, opt_state, key, steps):
    losses = []
    for _ in range(steps):
        variables, opt_state, key, loss = step(variables, opt_state, key)
        losses.append(np.asarray(loss))
    return variables, opt_state, key, losses


@pytest.mark.parametrize(
    "recipe", [te.DelayedScaling(amax_history_len=4), te.CurrentScaling(), te.BlockScaling(), None], ids=repr
)
def test_resume_is_bit_identical(tmp_path, recipe):
    start, step = make(recipe)
    *whole, whole_losses = train(step, *start(), 6)

    variables, opt_state, key, first_losses = train(step, *start(), 3)
    checkpoint.save(tmp_path, 3, variables, recipe=recipe, opt_state=opt_state, extras={"key": key})
    target, opt_target, key_target = jax.eval_shape(start)
    out = checkpoint.restore(tmp_path, target, recipe=recipe, opt_state=opt_target, extras={"key": key_target})
    *resumed, last_losses = train(step, out.variables, out.opt_state, out.extras["key"], 3)

    np.testing.assert_array_equal(first_losses + last_losses, whole_losses)
    assert_trees_identical(resumed[:2], whole[:2])
    assert_trees_identical(jax.random.key_data(resumed[2]), jax.random.key_data(whole[2]))
    assert whole_losses[-1] < whole_losses[0]
    if recipe is not None and recipe.stateful:
        te.state.check(te.state.split(variables)[1], te.state.split(step(variables, opt_state, key)[0])[1])
