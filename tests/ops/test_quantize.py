"""Quantize: values that have passed through FP8, to the bit; who quantizes what; its state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import te_jax as te
from te_jax import ops
from te_jax.quant.state import COLLECTION
from te_jax.testing import blocks, oracle

BF16 = jnp.bfloat16
P = PartitionSpec


def through_fp8(x, format, scale):
    """x, quantized with that scale and back, in x's dtype."""
    codes = oracle.cast(np.asarray(x), scale, format).view(oracle.DTYPES[format])
    return (codes.astype(np.float32) * (np.float32(1) / np.float32(scale))).astype(x.dtype)


def now(x, format):
    return oracle.scale_from_amax(np.abs(oracle.f64(x)).max(), oracle.MAX[format])


def normal(shape, seed=0):
    return np.asarray(3 * jax.random.normal(jax.random.key(seed), shape, BF16))


@pytest.mark.parametrize(("forward", "backward"), [(True, False), (False, True), (True, True), (False, False)])
def test_current_scaling(forward, backward):
    x, dy = normal((5, 48)), normal((5, 48), 1)
    chain = te.Sequential([ops.Quantize(forward, backward)], recipe=te.CurrentScaling())
    y, pullback = jax.vjp(jax.jit(lambda x: chain.apply({}, x)), x)
    np.testing.assert_array_equal(y, through_fp8(x, "e4m3", now(x, "e4m3")) if forward else x)
    np.testing.assert_array_equal(
        pullback(jnp.asarray(dy))[0], through_fp8(dy, "e5m2", now(dy, "e5m2")) if backward else dy
    )
    assert chain.plan(x).custom_calls.get("te_jax_quantize", 0) == forward + backward


def test_block_scaling():
    x = normal((4, 256))
    chain = te.Sequential([ops.Quantize()], recipe=te.BlockScaling())
    codes, scale_inv = blocks.quantize(x.astype(np.float32), (1, 128), "e4m3", power_of_two=True)
    want = codes.view(oracle.DTYPES["e4m3"]).astype(np.float32) * np.repeat(scale_inv, 128, -1)
    np.testing.assert_array_equal(chain.apply({}, x), want.astype(x.dtype))


def test_delayed_scaling_has_quantizers_of_its_own():
    """The second step quantizes with the scale of the first one's amax, and saturates."""
    chain = te.Sequential([ops.Quantize(backward=True)], recipe=te.DelayedScaling(amax_history_len=4))
    x, dy = normal((16, 32)), normal((16, 32), 1)
    variables = chain.init(jax.random.key(0), x)
    assert variables[COLLECTION]["fp8_0"]["scale"].shape == (2,)
    _, pullback = jax.vjp(lambda v: chain.apply(v, x), variables)
    before, after = te.state.split(variables)[1], te.state.split(pullback(jnp.asarray(dy))[0])[1]
    state = te.state.merge({}, te.state.apply(before, after))
    te.state.check(before, te.state.split(state)[1])
    y, pullback = jax.vjp(lambda x: chain.apply(state, x), 4 * x)
    np.testing.assert_array_equal(y, through_fp8(4 * x, "e4m3", now(x, "e4m3")))
    np.testing.assert_array_equal(pullback(jnp.asarray(4 * dy))[0], through_fp8(4 * dy, "e5m2", now(dy, "e5m2")))


@pytest.mark.parametrize(
    ("before", "first"),
    [((), "te_jax_quantize"), ((ops.RMSNorm(),), "te_jax_norm"), ((ops.SiLU(),), "te_jax_activation")],
)
def test_a_linear_takes_what_was_quantized(before, first):
    recipe = te.DelayedScaling(amax_history_len=4)
    chain = te.Sequential([*before, ops.Quantize(), ops.Linear(64, use_bias=False)], recipe=recipe, dtype=BF16)
    x = normal((32, 64))
    plan = chain.plan(x, platform="cuda")
    assert [c for step in plan.forward for c in step.custom_calls][1:] == [first, "te_jax_quantize", "te_jax_gemm"]
    assert plan.forward[1].writes_fp8
    assert "boundary: x e4m3, dy as it is" in plan.forward[1].notes
    # Both quantizers of x enter its amax, so that neither depends on what is fused.
    variables = chain.init(jax.random.key(0), x)
    grads = jax.grad(lambda v: chain.apply(v, x).sum())(variables)
    (run,) = grads[COLLECTION].values()
    amax = np.asarray(run["amax_history"])[:, 0]
    assert amax.shape == (4,)  # of the Quantize, and x, kernel and dy of the linear
    assert amax[0] == amax[1]
    assert amax[0] > 0


def test_a_cotangent_is_quantized_once_for_the_linear_before():
    def calls(*chain):
        plan = te.Sequential(chain, recipe=te.CurrentScaling(), dtype=BF16).plan(normal((32, 64)))
        return [c for step in plan.backward for c in step.custom_calls]

    linear = ops.Linear(64, use_bias=False)
    assert calls(linear, ops.Quantize(False, True)) == ["te_jax_quantize", "te_jax_gemm", "te_jax_gemm"]
    # The bias gradient is the sum of what came out of FP8: across a Bias there is a pass more.
    assert calls(ops.Linear(64), ops.Quantize(False, True)).count("te_jax_quantize") == 2


def test_without_a_recipe_it_does_nothing_and_says_so():
    x = normal((4, 8))
    chain = te.Sequential([ops.Quantize(backward=True)])
    np.testing.assert_array_equal(chain.apply({}, x), x)
    plan = chain.plan(x)
    assert plan.forward[0].notes == ("not quantized: recipe None",)
    assert not plan.forward[0].computes


def test_kernels_that_are_quantized_before_the_call():
    x = normal((32, 64))
    chain = te.Sequential([ops.Quantize(), ops.Linear(32)], recipe=te.CurrentScaling(), dtype=BF16)
    variables = chain.init(jax.random.key(0), x)
    with_kernels = te.quantize_kernels(chain, variables, x)
    np.testing.assert_array_equal(chain.apply(with_kernels, x), chain.apply(variables, x))


def test_the_scale_is_that_of_all_shards():
    x = np.asarray(normal((8, 4, 32)) * np.exp2(np.arange(8) - 4)[:, None, None].astype(np.float32)).astype(BF16)
    chain = te.Sequential([ops.Quantize()], recipe=te.CurrentScaling())
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    shard = jax.shard_map(lambda x: chain.apply({}, x), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_array_equal(jax.jit(shard)(x), through_fp8(x, "e4m3", now(x, "e4m3")))


@pytest.mark.parametrize("arguments", [{"forward": 1}, {"backward": None}])
def test_errors(arguments):
    (argument,) = arguments
    with pytest.raises(TypeError, match=f"te_jax.Quantize: {argument}: expected a bool"):
        ops.Quantize(**arguments)
