"""Stops a run, restores it in a fresh state and goes on: bit-identical to a run that never stopped."""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

import te_jax as te
from te_jax import ops

recipe = te.DelayedScaling(amax_history_len=16)
model = te.Sequential(
    [ops.LayerNorm(), ops.Linear(256), ops.GELU(), ops.Linear(128)], recipe=recipe, dtype=jnp.bfloat16
)
optimizer = optax.adamw(1e-3)


def init(seed):
    variables = model.init(jax.random.key(seed), jnp.zeros((64, 128), jnp.bfloat16))
    return variables, optimizer.init(variables["params"])


@jax.jit
def train_step(variables, opt_state, step):
    x = jax.random.normal(jax.random.key(step), (64, 128), jnp.bfloat16)  # the batch is a function of the step
    rest, fp8 = te.state.split(variables)

    def loss_fn(params, fp8):
        return jnp.mean((model.apply(te.state.merge({"params": params}, fp8), x) - x).astype(jnp.float32) ** 2)

    loss, (grads, new_fp8) = jax.value_and_grad(loss_fn, argnums=(0, 1))(rest["params"], fp8)
    updates, opt_state = optimizer.update(grads, opt_state, rest["params"])
    params = optax.apply_updates(rest["params"], updates)
    return te.state.merge({"params": params}, te.state.apply(fp8, new_fp8)), opt_state, loss


def train(variables, opt_state, steps):
    for step in steps:
        variables, opt_state, loss = train_step(variables, opt_state, step)
    print(f"step {step + 1}: loss {loss:.6f}")
    return variables, opt_state


whole = train(*init(seed=0), range(20))

with tempfile.TemporaryDirectory() as directory:
    variables, opt_state = train(*init(seed=0), range(10))
    te.checkpoint.save(directory, 10, variables, opt_state=opt_state, recipe=recipe)

    variables, opt_state = init(seed=1)  # any state of the right shapes: everything is overwritten
    restored = te.checkpoint.restore(directory, variables, opt_state=opt_state, recipe=recipe)
    resumed = train(restored.variables, restored.opt_state, range(restored.step, 20))

jax.tree.map(np.testing.assert_array_equal, resumed, whole)
print("bit-identical: parameters, FP8 state and optimizer state")
