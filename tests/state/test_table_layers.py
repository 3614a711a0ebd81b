"""The rows of docs/numerics.md's table that are about several layers: unused ones, `nn.scan`, pipeline stages.

The layers of the last two are permutations times 1/2 of small integers, which FP8 represents exactly, so that what
every layer sees is known: amax 2**-l times that of the input at layer l, and likewise backwards.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from regimes import BATCH, FEATURES, RECIPE, REGIMES, STEPS, TOKENS, data, read, total, train

import te_jax as te
from te_jax.testing import tolerance

COLLECTION = te.state.COLLECTION
P = PartitionSpec
LAYERS = 3
SGD = optax.sgd(1e-3)


class Dense(nn.Module):
    """The layer in the form of nn.scan."""

    @nn.compact
    def __call__(self, x, _=None):
        return te.flax.Dense(FEATURES, use_bias=False, recipe=RECIPE, name="dense")(x), None


# ------------------------------------------------------------------------------- a branch not taken, a layer unused

A, B = te.flax.Dense(FEATURES, use_bias=False, recipe=RECIPE), te.flax.Dense(FEATURES, use_bias=False, recipe=RECIPE)


def of(v, name):
    return {collection: v[collection][name] for collection in v}


def loss_of_branches(v, x, dy, taken):
    always = jnp.sum(A.apply(of(v, "a"), x[0]) * dy[0])
    return always + jax.lax.cond(taken, lambda: jnp.sum(B.apply(of(v, "b"), x[0]) * dy[0]), lambda: 0 * always)


@functools.cache
def variables_of_branches():
    x = jnp.zeros((BATCH, TOKENS, FEATURES))
    a, b = A.init(jax.random.key(0), x), B.init(jax.random.key(1), x)
    return {collection: {"a": a[collection], "b": b[collection]} for collection in a}


@functools.cache
def step_of_branches(regime):
    def step(ts, batch):
        grads = jax.grad(total(regime, loss_of_branches))(ts.params, *batch)
        ts = ts.apply_gradients(grads=grads)
        return ts, ts.params[COLLECTION]

    return step


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(
    "taken", [(True, False, True), (False, False, True)], ids=["not taken once", "unused at first"]
)
@pytest.mark.parametrize("cls", [train_state.TrainState, te.TrainState], ids=["starts anew", "keeps its state"])
def test_branch(cls, taken, regime):
    ts = cls.create(apply_fn=None, params=variables_of_branches(), tx=SGD)
    x, dy = data()
    ts, states = train(regime, step_of_branches(regime), ts, (x, dy, np.array(taken)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(ts.params))
    always, sometimes = (read(next(iter(states[name].values()))) for name in "ab")
    amax = np.abs(np.stack([x[:, 0], dy[:, 0]])).max((2, 3, 4))[:, ::-1]  # of x and dy, newest first
    np.testing.assert_array_equal(always.history[-1, [0, 2], :STEPS], amax)
    seen = [i for i in range(STEPS) if taken[::-1][i] and (cls is te.TrainState or i == 0)]
    want = np.zeros((2, STEPS))
    want[:, : len(seen)] = amax[:, seen]
    np.testing.assert_array_equal(sometimes.history[-1, [0, 2], :STEPS], want)
    kept = taken[0] and cls is te.TrainState
    assert (sometimes.scale[1] > 0).all() == kept  # 0: the amax of the current tensor
    assert (sometimes.scale[-1] > 0).all()
    assert not sometimes.bad.any()


def test_a_layer_that_starts_anew_takes_the_current_amax():
    """Its output is as near to the exact one as FP8 is, whatever the tensor's size."""
    x = jnp.asarray(data()[0][0, 0])
    v = of(variables_of_branches(), "b")
    used = jax.grad(lambda v: A.apply(v, x).sum())(v)
    unused = {**v, COLLECTION: jax.tree.map(jnp.zeros_like, used[COLLECTION])}
    for scale in (1e-6, 1.0, 1e6):
        got = np.asarray(A.apply(unused, x * jnp.float32(scale)), np.float64)
        want = np.asarray(x, np.float64) * scale @ np.asarray(v["params"]["kernel"], np.float64)
        assert np.linalg.norm(got - want) <= 1.5 * tolerance.relative_rms_error("e4m3", "e4m3") * np.linalg.norm(want)


# ------------------------------------------------------------------------------------------- layers on exact numbers


def exact_kernel(seed):
    """A permutation of 15 features by 1/2; the last feature, always 0, has the amax 7/8, whose scale is 512."""
    kernel = np.zeros((FEATURES, FEATURES), np.float32)
    kernel[np.arange(FEATURES - 1), np.random.default_rng(seed).permutation(FEATURES - 1)] = 0.5
    kernel[-1, -1] = 0.875
    return kernel


def integers(seed, *lead):
    """Up to 7, with a 7 in each [TOKENS, FEATURES]; the last feature is 0."""
    x = np.random.default_rng(seed).integers(-7, 8, (*lead, TOKENS, FEATURES)).astype(np.float32)
    x[..., 0, 0], x[..., -1] = 7, 0
    return x


@functools.cache
def variables_of_layers(layers):
    """The layers' variables, stacked."""
    v = Dense().init(jax.random.key(0), jnp.zeros((BATCH, TOKENS, FEATURES)))
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * layers), v)
    return {**stacked, "params": {"dense": {"kernel": np.stack([exact_kernel(seed) for seed in range(layers)])}}}


def leaves_of(state):
    """The one run of a layer."""
    (run,) = state["dense"].values()
    return run


@pytest.mark.parametrize("regime", REGIMES)
def test_scan_over_layers_with_remat(regime):
    """Each layer has its own state, exact, and updated once a step although the forward pass runs twice."""
    axes = {"params": 0, COLLECTION: 0}
    stack = nn.scan(nn.remat(Dense), length=LAYERS, variable_axes=axes, split_rngs={"params": True})()

    def step(v, batch):
        grads = jax.grad(total(regime, lambda v, x, dy: jnp.sum(stack.apply(v, x)[0] * dy)))(v, *batch)
        return {**v, COLLECTION: grads[COLLECTION]}, None

    sizes = np.float32([[8, 1, 0.25], [4, 2, 0.5]])  # of x and dy in the steps: they don't grow, which would saturate
    x, dy = (integers(i, STEPS, 1, BATCH) * sizes[i].reshape(-1, 1, 1, 1, 1) for i in range(2))

    def of_one_use(v, batch):
        return step(v, jax.tree.map(lambda leaf: leaf[0], batch))

    v, _ = train(regime, of_one_use, variables_of_layers(LAYERS), (x, dy))
    got = read(jax.device_get(leaves_of(v[COLLECTION])))
    depth = np.arange(LAYERS)[:, None]
    np.testing.assert_array_equal(got.history[:, 0, :STEPS], 7 * sizes[0, ::-1] * 0.5**depth)
    np.testing.assert_array_equal(got.history[:, 1, :STEPS], np.full((LAYERS, STEPS), 0.875))
    np.testing.assert_array_equal(got.history[:, 2, :STEPS], 7 * sizes[1, ::-1] * 0.5 ** (LAYERS - 1 - depth))
    np.testing.assert_array_equal(got.parity, np.full((LAYERS, 3), (-1.0) ** STEPS))
    assert not got.bad.any()


STAGES, MICROBATCHES = 4, 3


def pipeline_loss(v, x, dy):
    """The loss of a stage in a loop over ticks; x, dy: [MICROBATCHES, ...]. Stages that idle get zeros."""
    stage = jax.lax.axis_index("stage")
    layer = jax.checkpoint(lambda v, x: Dense().apply(v, x)[0])

    def tick(carry, t):
        received, loss = carry
        own = jnp.where(t < MICROBATCHES, x[jnp.minimum(t, MICROBATCHES - 1)], 0)
        y = layer(v, jnp.where(stage == 0, own, received))
        done = t - (STAGES - 1)
        is_last = (stage == STAGES - 1) & (done >= 0)
        loss += jnp.where(is_last, jnp.sum(y * dy[jnp.maximum(done, 0)]), 0)
        return (jax.lax.ppermute(y, "stage", [(i, i + 1) for i in range(STAGES - 1)]), loss), None

    start = jax.lax.pcast((jnp.zeros_like(x[0]), jnp.float32(0)), ("stage",), to="varying")
    start = (start[0], jax.lax.pcast(start[1], ("data",), to="varying"))
    (_, loss), _ = jax.lax.scan(tick, start, jnp.arange(MICROBATCHES + STAGES - 1))
    return jax.lax.psum(loss, ("stage", "data"))


def test_pipeline_stages():
    """State varies over the stages: each has the maximum of its own microbatches, to half an octave, on all devices."""
    mesh = jax.make_mesh((STAGES, 2), ("stage", "data"), axis_types=(AxisType.Explicit,) * 2)
    sizes = np.array([1, 4, 2], np.float32).reshape(-1, 1, 1, 1)  # of the microbatches
    x, dy = integers(0, MICROBATCHES, 4) * sizes, integers(1, MICROBATCHES, 4) * sizes[::-1]

    def of_a_stage(v, x, dy):
        v = jax.tree.map(lambda leaf: leaf[0], v)
        state = jax.grad(pipeline_loss)(v, x, dy)[COLLECTION]
        return jax.tree.map(lambda leaf: leaf[None], state)

    specs = (P("stage"), P(None, "data"), P(None, "data"))
    step = jax.jit(jax.shard_map(of_a_stage, mesh=mesh, in_specs=specs, out_specs=P("stage")))
    v = variables_of_layers(STAGES)
    depth = np.arange(STAGES)
    seen = None  # the newest amaxes of the first step
    true = np.stack([28 * 0.5**depth, np.full(STAGES, 0.875), 28 * 0.5 ** (STAGES - 1 - depth)], 1)
    with jax.set_mesh(mesh):
        x, dy = (jax.device_put(a, NamedSharding(mesh, P(None, "data"))) for a in (x, dy))
        for n in (1, 2):
            placed = jax.device_put(v, NamedSharding(mesh, P("stage")))
            before, v = v, {**v, COLLECTION: step(placed, x, dy)}
            got = read(jax.device_get(leaves_of(v[COLLECTION])))
            # From the second step on scales are no powers of two, and every layer rounds to E4M3 or E5M2.
            rounding = (1 + 2.0**-3) ** (STAGES * (n - 1)) * (1 + 2.0**-20)
            newest = got.history[..., 0]
            assert (newest >= true / rounding).all()
            assert (newest <= true * 2**0.5 * rounding).all()
            if n == 2:
                np.testing.assert_allclose(got.history[..., 1], seen, rtol=2.0**-20)
            seen = newest
            np.testing.assert_array_equal(got.parity, np.full((STAGES, 3), (-1.0) ** n))
            te.state.check(before[COLLECTION], jax.device_get(v[COLLECTION]))
