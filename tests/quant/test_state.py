"""FP8 state: every row of the table in docs/numerics.md ("What may be done to the state") with its right value.

A run of two quantizers (x in E4M3, dy in E5M2) is reduced to its state: `use` is the identity in x, whose custom
gradient writes the state as a quantizing linear does. What must be in the state is computed by hand in float64.
"""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import te_jax.state
from te_jax.quant import state
from te_jax.recipe import CurrentScaling, DelayedScaling

H = 4
RECIPE = DelayedScaling(amax_history_len=H)
FP8_MAX = np.array([448.0, 57344.0], np.float32)
HALF_OCTAVE = 2.0**0.5


def seeded(scale, amax):
    """What a quantizing pass does with scale 0: derive it from the current tensor."""
    fresh = jnp.where((amax > 0) & jnp.isfinite(amax), FP8_MAX / jnp.where(amax > 0, amax, 1), 1.0)
    return jnp.where(scale == 0, fresh, scale)


@jax.custom_vjp
def use(x, leaves):
    return x * jnp.where(jnp.isnan(state.read(leaves, FP8_MAX, RECIPE).scale[0]), jnp.nan, 1.0)


def use_fwd(x, leaves):
    return use(x, leaves), (jnp.max(jnp.abs(x)), leaves)


def use_bwd(saved, dy):
    amax_x, leaves = saved
    view = state.read(leaves, FP8_MAX, RECIPE)
    amax = jnp.stack([amax_x, jnp.max(jnp.abs(dy))])
    return dy, state.write(view, seeded(view.scale, amax), amax, like=leaves)


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


# ------------------------------------------------------------------------------------------------- plain steps


def test_new_state_is_unseeded():
    v = view(variables())
    np.testing.assert_array_equal(v.scale, [0, 0])
    np.testing.assert_array_equal(v.history, np.zeros((2, H)))
    np.testing.assert_array_equal(v.parity, [1, 1])
    assert not v.bad.any()
    assert {k: (x.shape, x.dtype) for k, x in state.init(2, RECIPE).items()} == {
        "amax_history": ((2, H), jnp.float32),
        "scale": ((2,), jnp.float32),
        "uses": ((2, 66), jnp.float32),
    }


def test_recipe_without_state():
    with pytest.raises(ValueError, match=r"state.init: recipe: expected .*DelayedScaling.*CurrentScaling"):
        state.init(2, CurrentScaling())


def test_plain_steps_are_exact():
    """Scales and history bit for bit, as the maximum leaves the history too."""
    rng = np.random.default_rng(0)
    amax = rng.lognormal(0, 8, (12, 2)).astype(np.float32)
    v = variables()
    for i in range(12):
        v = step(v, *amax[i])
        seen = amax[: i + 1][::-1][:H]
        got = view(v)
        np.testing.assert_array_equal(got.history[:, : len(seen)], seen.T)
        np.testing.assert_array_equal(got.history[:, len(seen) :], 0)
        np.testing.assert_array_equal(got.scale, FP8_MAX / seen.max(0))
        np.testing.assert_array_equal(got.parity, [(-1.0) ** (i + 1)] * 2)
        assert not got.bad.any()


def test_most_recent_and_margin():
    v = after((8.0, 0.5), (2.0, 0.25))
    recent = DelayedScaling(amax_history_len=H, amax_compute_algo="most_recent", margin=1)
    np.testing.assert_array_equal(view(v, recent).scale, scale([2.0, 0.25], margin=1))
    np.testing.assert_array_equal(view(v).scale, scale([8.0, 0.5]))


def test_history_of_one():
    recipe = DelayedScaling(amax_history_len=1)
    leaves = state.init(2, recipe)
    for amax in ([8.0, 0.5], [2.0, 0.25]):
        v = read(leaves, FP8_MAX, recipe)
        leaves = write(v, seeded(v.scale, jnp.array(amax)), jnp.array(amax), like=leaves)
    v = read(leaves, FP8_MAX, recipe)
    np.testing.assert_array_equal(v.scale, scale([2.0, 0.25]))
    leaves = write(v, v.scale, jnp.array([0.0, jnp.nan]), like=leaves)
    np.testing.assert_array_equal(read(leaves, FP8_MAX, recipe).scale, scale([2.0, 0.25]))  # kept


@pytest.mark.parametrize("nothing", [0.0, np.inf, np.nan])
def test_scale_is_kept_without_a_finite_amax(nothing):
    v = after((8.0, 0.5), (2.0, 0.25))
    leaves, before = v[state.COLLECTION]["mlp"], view(v)
    leaves = write(before, before.scale, jnp.full(2, nothing), like=leaves)
    got = read(leaves, FP8_MAX, RECIPE)
    np.testing.assert_array_equal(got.scale, before.scale)
    np.testing.assert_array_equal(got.history, before.history)
    np.testing.assert_array_equal(got.parity, -before.parity)


def test_first_amax_zero_stays_unseeded():
    """The scale 1 that an all-zero tensor gets isn't kept for the first tensor that is not zero."""
    np.testing.assert_array_equal(view(after((8.0, 0.0))).scale, [56.0, 0.0])


def test_scale_is_capped():
    v = after((8.0, 1e-18))
    assert view(v).scale[1] == np.float32(57344.0) / np.float32(1e-18)
    leaves = v[state.COLLECTION]["mlp"]
    tiny = jnp.array([8.0, 1e-37])  # below what the history holds: seeded from the current tensor again
    leaves = write(view(variables()), jnp.array([56.0, 2.0**126]), tiny, like=leaves)
    np.testing.assert_array_equal(read(leaves, FP8_MAX, RECIPE).scale, [56.0, 0.0])
    low = jnp.array([2.0**-61, 2.0**-61])
    leaves = write(view(variables()), low, low, like=leaves)
    np.testing.assert_array_equal(read(leaves, np.float32([2.0**80, 57344]), RECIPE).scale, [2.0**126, 57344 * 2.0**61])


# --------------------------------------------------------------------------------------- what users do: right


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


# --------------------------------------------------------------------------------------- what users do: loud


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
    jax.grad(lambda params: loss({**v, "params": params}, 3.0, 0.7))(v["params"])  # state closed over
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


# ------------------------------------------------------------------------------------------------------ cost


def test_cost_does_not_grow_with_the_number_of_quantizers():
    """All quantizers of a run share the same few loops (30 on CPU, 7 kernels on an H200)."""
    recipe = DelayedScaling()

    def loops(q):
        def read_write(leaves, amax):
            v = state.read(leaves, np.full(q, 448, np.float32), recipe)
            return v.scale, state.write(v, v.scale, amax, like=leaves)

        text = jax.jit(read_write).lower(state.init(q, recipe), jnp.ones(q)).compile().as_text()
        return collections.Counter(re.findall(r" = \S+ ([a-z-]+)\(", text[text.index("ENTRY") :]))

    few, many = loops(3), loops(12)
    assert many.total() <= few.total() + 2
    assert many["fusion"] + many["call"] + many["concatenate"] <= 40
    assert not {"while", "gather", "scatter", "sort", "dot", "custom-call"} & set(many)
