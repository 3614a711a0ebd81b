"""FP8 state after what may be done to it: the rows of the table in docs/numerics.md with their right values.

What must be in the state is computed by hand in float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from state_steps import (
    FP8_MAX,
    HALF_OCTAVE,
    READ,
    RECIPE,
    after,
    gradients,
    loss,
    overwrite,
    read,
    scale,
    seeded,
    step,
    use,
    variables,
    view,
    write,
)

from te_jax import primitives
from te_jax.quant import state


def test_train_state_apply_gradients():
    ts = TrainState.create(apply_fn=None, params=variables(), tx=optax.adam(1e-3))
    ts = ts.apply_gradients(grads=gradients(ts.params, (3.0, 0.7))[0])
    w = float(ts.params["params"]["w"])
    ts = ts.apply_gradients(grads=gradients(ts.params, (5.0, 0.2))[0])
    np.testing.assert_array_equal(view(ts.params).history[0, :2], np.float32([np.float32(w) * np.float32(5), 3]))
    np.testing.assert_array_equal(view(ts.params).history[1, :2], np.float32([0.2, 0.7]))


def test_unused_layer_starts_anew():
    v = after((3.0, 0.7))
    v = overwrite(v, jax.tree.map(jnp.zeros_like, v))  # the cotangent of what isn't used
    np.testing.assert_array_equal(view(v).scale, [0, 0])
    v = step(v, 5.0, 0.2)
    np.testing.assert_array_equal(view(v).scale, scale(np.float32([5.0, 0.2])))


def test_branch_not_taken():
    def branch_loss(v, x, taken):
        return jax.lax.cond(taken, lambda: loss(v, x, jnp.float32(0.5)), lambda: x)

    v = after((3.0, 0.7))
    got = jax.jit(jax.grad(branch_loss))(v, jnp.float32(2.0), False)
    np.testing.assert_array_equal(view(overwrite(v, got)).scale, [0, 0])
    got = jax.jit(jax.grad(branch_loss))(v, jnp.float32(2.0), True)
    np.testing.assert_array_equal(view(overwrite(v, got)).history[:, 0], [2.0, 0.5])


def test_apply_keeps_unused():
    v = after((3.0, 0.7))
    old = v[state.COLLECTION]
    kept = state.apply(old, jax.tree.map(jnp.zeros_like, old))
    jax.tree.map(np.testing.assert_array_equal, kept, old)
    new = gradients(v, (5.0, 0.2))[0][state.COLLECTION]
    jax.tree.map(np.testing.assert_array_equal, state.apply(old, new), new)
    # quantizer by quantizer
    half = jax.tree.map(lambda leaf: leaf.at[0].set(0), new)
    got = read(state.apply(old, half)["mlp"], FP8_MAX, RECIPE)
    np.testing.assert_array_equal(got.history[:, 0], np.float32([3.0, 0.2]))


USES = [(3.0, 0.9), (11.0, 1e-5), (0.2, 0.3), (10.0, 0.0), (1.0, 0.31)]

TREATMENTS = {
    "summed": lambda grads: functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), grads),
    "averaged": lambda grads: jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *grads),
    "unscaled": lambda grads: jax.tree.map(lambda *leaves: sum(leaves) / 1024, *grads),
    "clipped one by one": lambda grads: jax.tree.map(lambda a, *rest: 0.37 * a + sum(rest), *grads),
    "negated": lambda grads: jax.tree.map(lambda *leaves: -sum(leaves), *grads),
    "cast to bfloat16": lambda grads: jax.tree.map(lambda *leaves: (sum(leaves) / 3).astype(jnp.bfloat16), *grads),
    "summed in bfloat16": lambda grads: jax.tree.map(
        lambda *leaves: sum((leaf / 3).astype(jnp.bfloat16) for leaf in leaves), *grads
    ),
}


@pytest.mark.parametrize("fresh", [True, False], ids=["first step", "later step"])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("treatment", TREATMENTS)
def test_linear_treatments(treatment, k, fresh):
    """Older history and parity right, newest amax within half an octave above the true maximum (exact for k = 1)."""
    before = variables() if fresh else after((7.0, 0.4), (2.0, 0.6))
    grads = TREATMENTS[treatment](gradients(before, *USES[:k]))
    got = view(overwrite(before, grads))
    true = np.max(USES[:k], axis=0)
    rtol = 2.0**-7 if "bfloat16" in treatment else 2.0**-22
    ratio = np.asarray(got.history[:, 0], np.float64) / true
    above, below = (1, 1) if k == 1 else (HALF_OCTAVE, HALF_OCTAVE**-1)
    assert (ratio <= above * (1 + rtol)).all()
    assert (ratio >= below * (1 - rtol)).all()
    np.testing.assert_allclose(got.history[:, 1:], view(before).history[:, :-1], rtol=rtol)
    np.testing.assert_allclose(got.scale, scale(np.asarray(got.history).max(1)), rtol=1e-6)
    np.testing.assert_array_equal(got.parity, -view(before).parity)
    assert not got.bad.any()


@pytest.mark.parametrize("k", [1, 2, 3, 7, 16])
def test_rounding_of_a_sum_over_uses(k):
    """Older history is exact for one and two uses, within (k + 1) / 2 ulp for k (of sum and division)."""
    rng = np.random.default_rng(k)
    fp8_max = np.full(64, 448, np.float32)
    leaves = state.init(64, RECIPE)
    for _ in range(3):
        old = read(leaves, fp8_max, RECIPE)
        leaves = write(old, jnp.ones(64), rng.lognormal(0, 5, 64).astype(np.float32), leaves)
    old = read(leaves, fp8_max, RECIPE)
    use = write(old, old.scale, jnp.ones(64), leaves)
    got = np.asarray(read(TREATMENTS["summed"]([use] * k), fp8_max, RECIPE).history[:, 1:])
    expected = np.asarray(old.history[:, :-1])
    assert (np.abs(got - expected) <= (0 if k <= 2 else (k + 1) / 2) * np.spacing(expected)).all()


def test_a_thousand_microbatches_are_not_taken_for_an_optimizer():
    """The largest rounding of a sum in fp32: equal terms, added one by one to separate rungs."""
    rng = np.random.default_rng(0)
    before = read(state.init(64, RECIPE), np.full(64, 448, np.float32), RECIPE)

    def add(total, amax):
        one = state.write(before, jnp.ones(64), amax, total)
        return jax.tree.map(lambda t, x: t + x * jnp.float32(0.1), total, one), None

    amax = rng.lognormal(0, 2, (1000, 64)).astype(np.float32)
    total, _ = jax.jit(functools.partial(jax.lax.scan, add))(state.init(64, RECIPE), amax)
    got = read(total, np.full(64, 448, np.float32), RECIPE)
    assert not got.bad.any()
    ratio = np.asarray(got.history[:, 0]) / amax.max(0)
    assert (ratio >= 1).all()
    assert (ratio <= HALF_OCTAVE).all()


@pytest.mark.parametrize("k", [24, 48, 100])
def test_microbatches_averaged_in_bfloat16_are_not_taken_for_an_optimizer(k):
    """Every slot is rounded at every addition, those of few microbatches less often than the parity."""
    before = after((7.0, 0.4))
    leaves = before[state.COLLECTION]["mlp"]
    amaxes = np.random.default_rng(0).lognormal(0, 2, (k, 2)).astype(np.float32)
    total = jax.tree.map(lambda leaf: np.zeros(leaf.shape, jnp.bfloat16), leaves)
    for amax in amaxes:
        one = write(view(before), view(before).scale, amax, like=leaves)
        total = jax.tree.map(lambda t, x: t + (np.asarray(x) / k).astype(jnp.bfloat16), total, one)
    got = jax.jit(lambda leaves: primitives.scale_read(leaves, READ))(total)
    newest = FP8_MAX / np.maximum(got, 1e-30)
    assert (newest >= amaxes.max(0) / HALF_OCTAVE).all()
    assert (newest <= np.maximum(amaxes.max(0) * HALF_OCTAVE, np.float32([7.0, 0.4]) * 1.1)).all()


def test_layer_applied_twice():
    def twice(v, x):
        leaves = v[state.COLLECTION]["mlp"]
        return use(use(v["params"]["w"] * x, leaves) * 6.0, leaves) * 0.5

    before = after((7.0, 0.4))
    got = view(overwrite(before, jax.grad(twice)(before, jnp.float32(2.0))))
    assert 12.0 <= got.history[0, 0] <= 12.0 * HALF_OCTAVE  # x: 2 and 12
    assert 3.0 <= got.history[1, 0] <= 3.0 * HALF_OCTAVE  # dy: 3 and 0.5
    np.testing.assert_array_equal(got.history[:, 1], np.float32([7.0, 0.4]))


def test_uses_far_apart():
    """A use 2**32 and more below the others is not mistaken for one above them."""
    for distance in range(25, 46):
        leaves = variables()[state.COLLECTION]["mlp"]
        unseeded = read(leaves, FP8_MAX, RECIPE)
        amaxes = (1.3, 1.3 * 2.0**-distance)
        writes = [write(unseeded, jnp.ones(2), jnp.full(2, amax, jnp.float32), leaves) for amax in amaxes]
        got = read(jax.tree.map(jnp.add, *writes), FP8_MAX, RECIPE).history[:, 0]
        assert (got >= 1.3 / 2).all(), distance
        assert (got <= 1.3 * 2 * HALF_OCTAVE).all(), distance


def test_pmean_over_devices():
    before = after((7.0, 0.4))
    x = jnp.arange(1.0, 9.0)

    def device(x):
        g = jax.grad(loss)(before, x, x / 100)
        return jax.tree.map(lambda leaf: jax.lax.pmean(leaf, "data"), g)

    grads = jax.tree.map(lambda leaf: leaf[0], jax.jit(jax.vmap(device, axis_name="data"))(x))
    got = view(overwrite(before, grads))
    true = np.array([8.0, 0.08])
    assert (got.history[:, 0] >= true).all()
    assert (got.history[:, 0] <= true * HALF_OCTAVE).all()
    np.testing.assert_allclose(got.history[:, 1], [7.0, 0.4], rtol=1e-6)
    assert not got.bad.any()


def test_shard_map_over_devices():
    """Inside a checked shard_map the state is invariant: read, written and reduced alike on all devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    spec = jax.sharding.PartitionSpec

    def per_shard(leaves, x):
        view = state.read(leaves, FP8_MAX, RECIPE)
        amax = jax.lax.pmax(jnp.max(jnp.abs(x)), "data") * jnp.array([1.0, 0.5])
        return state.write(view, seeded(view.scale, amax), amax, like=leaves)

    step = jax.jit(jax.shard_map(per_shard, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec()))
    leaves = state.init(2, RECIPE)
    for factor in (1.0, 3.0):
        leaves = step(leaves, factor * jnp.arange(16.0))
    got = read(leaves, FP8_MAX, RECIPE)
    np.testing.assert_array_equal(got.history[:, :2], [[45.0, 15.0], [22.5, 7.5]])


@pytest.mark.parametrize("by_hand", [True, False])
def test_clip_by_global_norm(by_hand):
    """The clip is that of the parameters' gradients alone, bit for bit, and the state is read as if unclipped."""
    v = after((7.0, 0.4), (2.0, 30.0))
    grads = gradients(v, (3.0, 20.0))[0]  # the gradient of w is 60

    def clip(tree):
        if not by_hand:
            return optax.clip_by_global_norm(1.0).update(tree, optax.EmptyState())[0]
        norm = jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(tree)))
        return jax.tree.map(lambda leaf: leaf / jnp.maximum(norm, 1.0), tree)

    clipped = clip(grads)
    assert clipped["params"]["w"] == clip({"params": grads["params"]})["params"]["w"]
    got = view(overwrite(v, clipped))
    np.testing.assert_allclose(got.history[:, :3], [[3, 2, 7], [20, 30, 0.4]], rtol=2.0**-22)
    assert not got.bad.any()


def test_accumulate_is_exact():
    before = after((7.3, 0.41), (2.1, 0.63))
    total = jax.tree.map(jnp.zeros_like, before[state.COLLECTION])
    for g in gradients(before, *USES):
        total = jax.jit(state.accumulate)(total, g[state.COLLECTION])
    got = view({state.COLLECTION: total})
    np.testing.assert_array_equal(got.history[:, 0], np.max(USES, axis=0).astype(np.float32))
    np.testing.assert_array_equal(got.history[:, 1:], view(before).history[:, :-1])
    np.testing.assert_array_equal(got.parity, -view(before).parity)


def test_accumulate_stacked_is_accumulate():
    """Quantizers that no microbatch used, one whose first microbatch did not use it, one of mixed steps."""
    before = after((7.3, 0.41), (2.1, 0.63))
    zero = jax.tree.map(jnp.zeros_like, before[state.COLLECTION])
    uses = [g[state.COLLECTION] for g in gradients(before, *USES)]
    other_step = gradients(overwrite(before, {state.COLLECTION: uses[0]}), USES[0])[0][state.COLLECTION]
    for parts in ([zero, zero], [zero, *uses], uses, [zero, uses[0], other_step], [uses[1]]):
        got = jax.jit(state.accumulate_stacked)(jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts))
        want = functools.reduce(state.accumulate, parts[1:], state.accumulate(zero, parts[0]))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(a, b)


def test_accumulate_different_steps_is_bad():
    v = after((7.0, 0.4))
    a = gradients(v, (1.0, 1.0))[0]
    b = gradients(overwrite(v, a), (1.0, 1.0))[0]
    assert view({state.COLLECTION: state.accumulate(a[state.COLLECTION], b[state.COLLECTION])}).bad.all()


def test_scanned_layers_with_remat():
    """State stacked over layers: each layer its own, once per step although the forward pass runs twice."""
    layers = 3
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * layers), state.init(2, RECIPE))

    def scan_loss(stacked, x):
        body = jax.checkpoint(lambda x, leaves: (use(x, leaves) * 2.0, None))
        return jax.lax.scan(body, x, stacked)[0]

    for _ in range(2):
        stacked = jax.jit(jax.grad(scan_loss))(stacked, jnp.float32(1.5))
    got = jax.jit(jax.vmap(lambda leaves: state.read(leaves, FP8_MAX, RECIPE)))(stacked)
    np.testing.assert_array_equal(got.history[:, 0, :2], np.array([1.5, 3.0, 6.0])[:, None] * np.ones(2))
    np.testing.assert_array_equal(got.history[:, 1, :2], np.array([8.0, 4.0, 2.0])[:, None] * np.ones(2))
    np.testing.assert_array_equal(got.parity, np.ones((layers, 2)))
