"""Where the steps of a training loop run, for the table of tests/state/test_table.py, and what they trained on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import te_jax as te
from te_jax import ops
from te_jax.quant import state as leaves_of_a_run

P = PartitionSpec
STEPS, USES, BATCH, TOKENS, FEATURES = 3, 2, 8, 16, 16
H = 4
RECIPE = te.DelayedScaling(amax_history_len=H)
FP8_MAX = np.float32([448, 448, 57344])  # of x, kernel, dy: the quantizers of a linear
RUN = "fp8_0"
MODULE = te.Sequential([ops.Linear(FEATURES, use_bias=False)], recipe=RECIPE)

REGIMES = ("scan+remat", "auto", "explicit", "manual")


def loss(variables, x, dy):
    """Its linear sees tensors of amax max |x|, max |kernel| and max |dy|."""
    return jnp.sum(MODULE.apply(variables, x) * dy)


@functools.cache
def variables():
    return MODULE.init(jax.random.key(0), jnp.zeros((BATCH, TOKENS, FEATURES)))


@functools.cache
def data(inf_in_step=None):
    """(x, dy) f32[STEPS, USES, BATCH, TOKENS, FEATURES]: every step, use and row has an amax of its own size."""
    rng = np.random.default_rng(0)
    lead = (STEPS, USES, BATCH)
    x, dy = (
        (rng.standard_normal((*lead, TOKENS, FEATURES)) * rng.lognormal(0, 1.5, lead)[..., None, None]).astype("f4")
        for _ in range(2)
    )
    if inf_in_step is not None:
        dy[inf_in_step, 0, 3, 5, 7] = np.inf
    return x, dy


def total(regime, loss_fn):
    """The loss over the whole batch, of a loss of the part that a device has; recomputed in the backward pass."""
    if regime == "manual":
        return lambda *arguments: jax.lax.psum(loss_fn(*arguments), "data")
    return jax.checkpoint(loss_fn) if regime == "scan+remat" else loss_fn


def replicas(regime, grad_fn):
    """grad_fn(variables, x, dy) on replicas that have different data, with `jax.lax.pmean` of all gradients.

    The devices of a Manual mesh, which have both uses; otherwise a `vmap` over the uses.
    """

    def mean(grads, axis):
        return jax.tree.map(lambda g: jax.lax.pmean(g, axis), grads)

    def device(v, x, dy):
        v = jax.lax.pcast(v, "data", to="varying")
        return mean(jax.tree.map(jnp.add, *(grad_fn(v, x[i], dy[i]) for i in range(USES))), "data")

    def replica(v, x, dy):
        return mean(grad_fn(v, x, dy), "replica")

    if regime == "manual":
        return device
    if regime == "explicit":  # where jax (0.11.2) has no pmean of a vmap
        each = jax.vmap(grad_fn, in_axes=(None, 0, 0))
        return lambda *arguments: jax.tree.map(lambda g: jnp.mean(g, 0), each(*arguments))
    return jax.vmap(replica, in_axes=(None, 0, 0), out_axes=None, axis_name="replica")


@functools.cache
def compiled(regime, step, mesh=None, specs=(), structure=None):
    """The jitted program of a step, one for each function: data that differ are no reason to compile again."""
    if regime == "scan+remat":
        return jax.jit(lambda carry, batches: jax.lax.scan(step, carry, batches))
    if regime == "manual":
        in_specs = (P(), structure.unflatten(specs))
        step = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=P())  # state: one and the same
    return jax.jit(step)


def train(regime, step, carry, batches):
    """(carry, results of all steps) of ``carry, result = step(carry, batch)``; everything is jitted."""
    if regime == "scan+remat":
        return compiled(regime, step)(carry, batches)
    types = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "manual": AxisType.Explicit}[regime]
    mesh = jax.make_mesh((BATCH,), ("data",), axis_types=(types,))

    def spec(leaf, lead):
        return P(*(None,) * lead, "data") if np.ndim(leaf) > lead else P()

    leaves, structure = jax.tree.flatten(batches)
    jitted = compiled(regime, step, mesh, tuple(spec(leaf[0], 1) for leaf in leaves), structure)
    with jax.set_mesh(mesh):
        carry = jax.device_put(jax.tree.map(jnp.asarray, carry), NamedSharding(mesh, P()))
        placed = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, spec(leaf, 2))), batches)
        results = []
        for i in range(STEPS):
            carry, result = jitted(carry, jax.tree.map(lambda leaf, i=i: leaf[i], placed))
            results.append(result)
        for leaf in jax.tree.leaves(carry):
            for shard in leaf.addressable_shards:  # on every device
                np.testing.assert_array_equal(shard.data, leaf)
    return carry, jax.tree.map(lambda *leaves: np.stack(leaves), *map(jax.device_get, results))


@functools.partial(jax.jit, static_argnums=1)
def read(leaves, fp8_max=tuple(FP8_MAX)):
    """What the next step reads: a view for each leading index."""
    view = functools.partial(leaves_of_a_run.read, fp8_max=jnp.float32(fp8_max), recipe=RECIPE)
    for _ in range(leaves["scale"].ndim - 1):
        view = jax.vmap(view)
    return view(leaves)
