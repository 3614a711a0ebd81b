"""An FP8 MLP as a chain of ops: its plan, and a few training steps. Seconds, on CPU or GPU."""

import jax
import jax.numpy as jnp
import optax

import te_jax as te
from te_jax import ops

WIDTH, HIDDEN, TOKENS = 256, 512, 64

mlp = te.Sequential(
    [ops.RMSNorm(), ops.Linear(2 * HIDDEN, use_bias=False), ops.SwiGLU(), ops.Linear(WIDTH)],
    recipe=te.DelayedScaling(amax_history_len=16),
    dtype=jnp.bfloat16,
)  # a flax.linen Module
x = jax.random.normal(jax.random.key(0), (TOKENS, WIDTH), jnp.bfloat16)
target = jnp.roll(x, 1, axis=-1)

variables = mlp.init(jax.random.key(1), x)  # {'params': ..., '_overwrite_with_gradient': ...}
print(mlp.plan(x))  # the fusions chosen, forward and backward

rest, fp8 = te.state.split(variables)  # FP8 state never goes through the optimizer
params = rest["params"]
optimizer = optax.adam(3e-3)
opt_state = optimizer.init(params)


@jax.jit
def step(params, fp8, opt_state):
    def loss_fn(params, fp8):
        y = mlp.apply(te.state.merge({"params": params}, fp8), x)
        return jnp.mean((y - target).astype(jnp.float32) ** 2)

    loss, (grads, new_fp8) = jax.value_and_grad(loss_fn, argnums=(0, 1))(params, fp8)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), te.state.apply(fp8, new_fp8), opt_state, loss


for i in range(1, 31):
    before = fp8
    params, fp8, opt_state, loss = step(params, fp8, opt_state)
    if i % 10 == 0:
        print(f"step {i}: loss {loss:.4f}")
te.state.check(before, fp8)  # raises if a step failed to update the FP8 state
