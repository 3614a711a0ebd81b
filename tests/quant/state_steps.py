"""Steps of training reduced to their FP8 state, for the tests of it.

A run of two quantizers (x in E4M3, dy in E5M2) is reduced to its state: `use` is the identity in x, whose custom
gradient writes the state as a quantizing linear does, by custom calls or their references (conftest.py).
"""

import jax
import jax.numpy as jnp
import numpy as np

from te_jax import primitives
from te_jax.quant import state
from te_jax.recipe import DelayedScaling

H = 4
RECIPE = DelayedScaling(amax_history_len=H)
FP8_MAX = np.array([448.0, 57344.0], np.float32)
HALF_OCTAVE = 2.0**0.5


def seeded(scale, amax):
    """What a quantizing pass does with scale 0: derive it from the current tensor."""
    fresh = jnp.where((amax > 0) & jnp.isfinite(amax), FP8_MAX / jnp.where(amax > 0, amax, 1), 1.0)
    return jnp.where(scale == 0, fresh, scale)


READ = primitives.ScaleReadSpec(formats="e4m3 e5m2")
WRITE = primitives.ScaleWriteSpec(formats="e4m3 e5m2", used="11")


@jax.custom_vjp
def use(x, leaves):
    return x * jnp.where(jnp.isnan(primitives.scale_read(leaves, READ)[0]), jnp.nan, 1.0)


def use_fwd(x, leaves):
    return use(x, leaves), (jnp.max(jnp.abs(x)), leaves)


def use_bwd(saved, dy):
    amax_x, leaves = saved
    amax = jnp.stack([amax_x, jnp.max(jnp.abs(dy))])
    return dy, primitives.scale_write(leaves, list(amax), WRITE)


use.defvjp(use_fwd, use_bwd)


def variables():
    return {"params": {"w": jnp.float32(1.0)}, state.COLLECTION: {"mlp": state.init(2, RECIPE)}}


def loss(v, x, dy):
    """Its x has amax |w| * |x|, its cotangent amax |dy|."""
    return use(v["params"]["w"] * x, v[state.COLLECTION]["mlp"]) * dy


grad = jax.jit(jax.grad(loss))
jit_loss = jax.jit(loss)
read = jax.jit(state.read, static_argnums=2)  # jitted only to be quick
write = jax.jit(state.write)


def overwrite(v, grads):
    return {**v, state.COLLECTION: grads[state.COLLECTION]}


def step(v, x, dy):
    return overwrite(v, grad(v, jnp.float32(x), jnp.float32(dy)))


def view(v, recipe=RECIPE):
    return read(v[state.COLLECTION]["mlp"], FP8_MAX, recipe)


def after(*amaxes):
    """The variables after one step with each (x, dy)."""
    v = variables()
    for x, dy in amaxes:
        v = step(v, x, dy)
    return v


def gradients(v, *amaxes):
    return [grad(v, jnp.float32(x), jnp.float32(dy)) for x, dy in amaxes]


def scale(amax, margin=0):
    return (FP8_MAX.astype(np.float64) / np.asarray(amax, np.float64) * 2.0**-margin).astype(np.float32)
