"""FP8 state over plain steps: scales and history bit for bit, and what it costs."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from state_steps import FP8_MAX, RECIPE, H, after, read, scale, seeded, step, variables, view, write

from te_jax.quant import state
from te_jax.recipe import CurrentScaling, DelayedScaling


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


def test_cost_does_not_grow_with_the_number_of_quantizers():
    """All quantizers of a run share the same few loops (30 on CPU, 8 kernels on an H200 without the custom calls)."""
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
