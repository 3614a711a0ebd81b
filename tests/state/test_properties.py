"""The algebra of FP8 state, on random amaxes and treatments (hypothesis, with fixed examples)."""

import functools
import operator

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from flax.core import freeze
from hypothesis import Phase, example, given, settings

import te_jax as te
from te_jax.quant import state as leaves_of_a_run
from te_jax.quant.state_leaves import contradicts, decode, follows

Q, H = 3, 4
RECIPE = te.DelayedScaling(amax_history_len=H)
FP8_MAX = np.float32([448, 448, 57344])
HALF_OCTAVE = 2.0**0.5

PHASES = (Phase.explicit, Phase.generate)  # without the one that explains failures, which takes minutes
repeatable = functools.partial(settings, derandomize=True, database=None, deadline=None, phases=PHASES)
amax = st.floats(2.0**-40, 2.0**40, width=32)
amaxes = st.tuples(*[amax] * Q).map(np.float32)
any_amaxes = st.tuples(*[amax | st.sampled_from([0.0, 1e-30, np.inf, np.nan])] * Q).map(np.float32)
history = st.lists(amaxes, max_size=H)  # of the steps before

read = jax.jit(functools.partial(leaves_of_a_run.read, fp8_max=FP8_MAX, recipe=RECIPE))
accumulate, apply = jax.jit(te.state.accumulate), jax.jit(te.state.apply)


@jax.jit
def use(leaves, amax):
    """What a use of these amaxes writes; a scale of 0 is taken from the amax, as quantizing passes do."""
    view = leaves_of_a_run.read(leaves, FP8_MAX, RECIPE)
    seeded = jnp.where((amax > 0) & jnp.isfinite(amax), jnp.minimum(FP8_MAX / amax, 2.0**126), 1.0)
    return leaves_of_a_run.write(view, jnp.where(view.scale == 0, seeded, view.scale), amax, like=leaves)


def after(steps):
    leaves = te.state.init(Q, RECIPE)
    for amax in steps:
        leaves = use(leaves, amax)
    return to_numpy(leaves)


def to_numpy(tree):
    return jax.tree.map(np.asarray, tree)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def ulps(got, want):
    """The largest difference in units of the last place of `want`."""
    got, want = np.asarray(got), np.asarray(want)
    difference = np.abs(got.astype(np.float64) - want.astype(np.float64))
    return (difference / np.spacing(np.where(want > 0, want, 1))).max()


# ------------------------------------------------------------------------------------------------------ accumulate


def some_unused(leaves, used):
    return {name: np.where(np.reshape(used, (Q,) + (1,) * (leaf.ndim - 1)), leaf, 0) for name, leaf in leaves.items()}


@repeatable(max_examples=60)
@given(history, st.lists(st.tuples(any_amaxes, st.tuples(*[st.booleans()] * Q)), min_size=3, max_size=3))
def test_accumulate_is_associative_and_commutative(steps, uses):
    before = after(steps)
    a, b, c = ({"run": some_unused(to_numpy(use(before, amax)), used)} for amax, used in uses)
    total = accumulate(accumulate(a, b), c)
    assert_same(total, accumulate(a, accumulate(b, c)))
    assert_same(total, accumulate(accumulate(b, a), c))
    assert_same(total, accumulate(c, accumulate(b, a)))
    for q in range(Q):
        seen = [amax[q] for amax, used in uses if used[q] and np.isfinite(amax[q]) and amax[q] > 2.0**-62]
        newest = decode(total["run"]).newest[q]
        assert newest == max(seen, default=0)


@repeatable(max_examples=30)
@given(history, amaxes)
def test_zeros_are_neutral(steps, amax):
    a = {"run": use(after(steps), amax)}
    zeros = jax.tree.map(np.zeros_like, to_numpy(a))
    assert_same(accumulate(a, zeros), a)
    assert_same(accumulate(zeros, a), a)
    assert_same(accumulate(zeros, zeros), zeros)


# ---------------------------------------------------------------------------------------------- split, merge, apply

NAMES = st.sampled_from(["a", "b", "fp8_0", "scale", "uses", "layers"])


@st.composite
def modules(draw, depth=2):
    """A nested dict of arrays and of runs of state."""
    found = {}
    for name in draw(st.sets(NAMES, min_size=1, max_size=3)):
        kind = draw(st.sampled_from(["array", "run"] + ["module"] * (depth > 0)))
        if kind == "run":
            found[name] = te.state.init(1, RECIPE)
        else:
            found[name] = np.ones(2, np.float32) if kind == "array" else draw(modules(depth=depth - 1))
    return found


@repeatable(max_examples=30)
@given(modules(), st.booleans())
def test_split_and_merge_are_inverse(module, has_params):
    fp8 = {name: te.state.init(1, RECIPE) for name in module}
    collections = {te.state.COLLECTION: fp8} | ({"params": module} if has_params else {})
    for tree in (collections, freeze(collections), {"params": module}, nnx.State(module)):
        rest, state = te.state.split(tree)
        assert_same(te.state.merge(rest, state), tree)
        kept = te.state.apply(state, jax.tree.map(np.zeros_like, state))  # nothing was used
        assert_same(te.state.merge(rest, kept), tree)


@repeatable(max_examples=30)
@given(history, amaxes, st.tuples(*[st.booleans()] * Q))
def test_apply_takes_what_was_used(steps, amax, used):
    old = after(steps)
    new = some_unused(to_numpy(use(old, amax)), used)
    got = to_numpy(apply({"run": old}, {"run": new}))["run"]
    for q in range(Q):
        assert_same(
            {n: leaf[q] for n, leaf in got.items()}, {n: leaf[q] for n, leaf in (new if used[q] else old).items()}
        )


# ------------------------------------------------------------------------------------------------ linear treatments


def scaled(leaves, c):
    return jax.tree.map(lambda leaf: leaf * np.float32(c), leaves)


def summed(parts):
    return functools.reduce(lambda a, b: jax.tree.map(operator.add, a, b), parts)


@repeatable(max_examples=40)
@given(history, any_amaxes, st.integers(-14, 14), st.sampled_from([1, -1]))
def test_a_power_of_two_changes_nothing(steps, amax, exponent, sign):
    leaves = to_numpy(use(after(steps), amax))
    assert_same(read(scaled(leaves, sign * 2.0**exponent)), read(leaves))


@repeatable(max_examples=60)
@given(history, amaxes, st.floats(2.0**-14, 2.0**14))
def test_a_factor_is_within_two_ulp(steps, amax, c):
    leaves = to_numpy(use(after(steps), amax))
    got, want = read(scaled(leaves, c)), read(leaves)
    assert ulps(got.history, want.history) <= 2
    assert ulps(got.scale, want.scale) <= 4  # the largest entry's 2, at a mantissa of up to twice its own
    np.testing.assert_array_equal(got.parity, want.parity)
    assert not got.bad.any()


@repeatable(max_examples=60)
@given(history, st.lists(amaxes, min_size=1, max_size=16), st.floats(2.0**-10, 2.0**10))
def test_a_sum_of_uses(steps, uses, c):
    """Older entries within (k + 1) / 2 ulp for k uses, exact for 1 and 2; 2 more if it is scaled."""
    before = after(steps)
    k, total = len(uses), summed([to_numpy(use(before, amax)) for amax in uses])
    want = read(before).history[:, :-1]
    got = read(total).history[:, 1:]
    assert ulps(got, want) <= (0 if k <= 2 else (k + 1) / 2)
    assert ulps(read(scaled(total, c)).history[:, 1:], want) <= (k + 1) / 2 + 2


# A treatment: the order of the uses, where they are cut into two groups (and these again), and the weight of each sum.
weight = st.floats(1 / 8, 8, width=32)
treatment = st.tuples(
    st.permutations(range(8)),
    st.lists(st.integers(1, 7), min_size=3, max_size=3),
    st.lists(weight, min_size=7, max_size=7),
)
# Amaxes of the uses of one step: up to 2**28 apart, anywhere.
near = st.tuples(
    st.integers(-24, 24), st.lists(st.tuples(*[st.floats(2.0**-14, 2.0**14, width=32)] * Q), min_size=1, max_size=8)
)


def treated(parts, treatment):
    """Weighted sums of weighted sums of the parts; the weights are those of clips, means and loss scales."""
    order, (cut, *cuts), weights = treatment
    parts = [parts[i] for i in order if i < len(parts)]
    groups = []
    for group, at in zip((parts[:cut], parts[cut:]), cuts, strict=True):
        groups += [part for part in (group[:at], group[at:]) if part]
    return scaled(summed([scaled(summed(group), w) for group, w in zip(groups, weights, strict=False)]), weights[-1])


def check_treated(got, uses, before, rounding, beyond=1.0, beneath=1.0):
    """The newest amax is within half an octave (times `beyond`, over `beneath`) of the maximum; the rest is right."""
    true = np.max(uses, 0).astype(np.float64)
    newest = np.asarray(got.history[:, 0], np.float64)
    assert not got.bad.any()
    assert (newest >= true / HALF_OCTAVE / beneath * (1 - rounding)).all(), (newest, true)
    assert (newest <= true * HALF_OCTAVE * beyond * (1 + rounding)).all(), (newest, true)
    np.testing.assert_allclose(got.history[:, 1:], read(before).history[:, :-1], rtol=rounding)
    np.testing.assert_array_equal(got.parity, read(use(before, uses[0])).parity)


def beyond_half_an_octave(uses, how):
    """[Q]: the factor by which the newest amax may be above that, of amaxes more than s * 2**31 apart."""
    weights = treated(list(np.eye(len(uses), dtype=np.float32)), how)
    s = weights.min() / weights.sum()  # the smallest share of a use, as in te_jax/quant/state_leaves.py
    return np.where(uses.max(0) > s * 2.0**31 * uses.min(0), 1.1 / s, 1.0)


def bfloat16(tree):
    return jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16).astype(np.float32), tree)


@repeatable(max_examples=100)
@given(history, near, treatment)
def test_any_linear_treatment(steps, uses, how):
    exponent, factors = uses
    uses = np.float32(factors) * np.float32(2.0**exponent)
    before = after(steps)
    leaves = treated([to_numpy(use(before, amax)) for amax in uses], how)
    beyond = beyond_half_an_octave(uses, how)
    check_treated(read(leaves), uses, before, 2.0**-20, beyond)
    check_treated(read(bfloat16(leaves)), uses, before, 2.0**-6, beyond)
    assert not contradicts(leaves).any()  # no false alarm
    assert not contradicts(bfloat16(leaves)).any()
    assert follows(before, leaves).all()
    assert follows(before, bfloat16(leaves)).all()


def share_the_slot_of_the_largest(uses):
    """bool[Q]: whether a use that is at least 2**31 below the largest has its slot."""
    mantissa, exponent = np.frexp(np.stack(uses))
    slot = (2 * exponent + (2 * mantissa >= np.float32(np.sqrt(2)))) % 64
    largest = np.argmax(uses, 0)[None]
    below = np.stack(uses) < np.take_along_axis(np.stack(uses), largest, 0) / 2
    return (below & (slot == np.take_along_axis(slot, largest, 0))).any(0)


@repeatable(max_examples=60)
@given(history, st.lists(amaxes, min_size=1, max_size=8))
@example([], [np.float32([64, 448, 1e12]), np.float32([3.3e11, 9e11, 2.6e11])])  # 64 and 3.3e11 are in one slot
def test_uses_far_apart(steps, uses):
    """Rungs repeat every 2**32: one of k uses so far below the others may be taken for one above them, up to k times.

    One in the slot of the largest hides it: the mean is left, up to k times below it. 1.1: what the reader allows for
    the rounding of shares in bfloat16.
    """
    before = after(steps)
    leaves = summed([to_numpy(use(before, amax)) for amax in uses])
    beneath = np.where(share_the_slot_of_the_largest(uses), len(uses), 1)
    check_treated(read(leaves), uses, before, 2.0**-20, beyond=1.1 * len(uses), beneath=beneath)
    assert not contradicts(leaves).any()
    assert follows(before, leaves).all()


def test_uses_that_share_a_slot_are_no_contradiction():
    """Rungs repeat every 2**32: the mean of k such uses is up to k times below the largest, in another rung."""
    before, far = after([]), np.float32([2.0**32] * Q)
    for k in (2, 8, 128):
        leaves = summed([to_numpy(use(before, far if i == 0 else np.ones(Q, np.float32))) for i in range(k)])
        assert not contradicts(leaves).any()


@repeatable(max_examples=60)
@given(history, amaxes, amaxes, st.floats(2.0**-13, 2.0**13))
def test_steps_that_are_mixed_are_always_found(steps, first, second, weight):
    """What has a memory, as optimizers do, adds state of different steps."""
    one = use(after(steps), first)
    other = use(one, second)
    mixed = jax.tree.map(lambda a, b: np.asarray(a) + np.float32(weight) * np.asarray(b), one, other)
    assert read(mixed).bad.all()
    assert np.isnan(read(mixed).scale).all()
    assert read(to_numpy(accumulate({"run": one}, {"run": other}))["run"]).bad.all()
    assert read(to_numpy(accumulate({"run": other}, {"run": one}))["run"]).bad.all()
