"""Amaxes over a mesh: how often a program reduces them, and that this changes no bit of what it computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
from te_jax import compat, ops
from te_jax.ops import linear
from te_jax.ops.base import ForwardContext, LinkInfo, TensorType
from te_jax.parallel.amax import reduce_amax, reduce_together
from te_jax.quant.state import COLLECTION
from te_jax.recipe import recipe_from_json

RECIPE = te.DelayedScaling(amax_history_len=3)
FIXED = dataclasses.replace(RECIPE, initial_scale=1.0)
QUANTIZERS = 6  # x, kernel and dy of each of two linears
OF_PARTS = 4  # x and dy, over tokens; kernels are the same on all devices


def module_of(recipe):
    chain = [ops.RMSNorm(), ops.Linear(64), ops.SwiGLU(), ops.Linear(32, use_bias=False)]
    return te.Sequential(chain, recipe=recipe, dtype=jnp.bfloat16)


@pytest.fixture(scope="module")
def arguments():
    """Variables, and x whose rows on each of 4 devices are of very different size."""
    x = jax.random.normal(jax.random.key(0), (4, 16, 32), jnp.bfloat16)
    x = x * jnp.exp2(2 * jnp.arange(4.0) - 4).astype(x.dtype)[:, None, None]
    return jax.jit(module_of(RECIPE).init)(jax.random.key(1), x), x


def gradient(recipe, axis=None):
    """(variables, x) -> their gradients of the sum of squares, over the devices of ``axis``."""

    def loss(variables, x):
        total = jnp.sum(module_of(recipe).apply(variables, x).astype(jnp.float32) ** 2)
        return total if axis is None else jax.lax.psum(total, axis)

    return jax.grad(loss, argnums=(0, 1))


def sharded(recipe):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    specs = (P(), P("data"))
    return jax.jit(jax.shard_map(gradient(recipe, "data"), mesh=mesh, in_specs=specs, out_specs=specs)), mesh


def placed(mesh, variables, x):
    return jax.device_put(variables, NamedSharding(mesh, P())), jax.device_put(x, NamedSharding(mesh, P("data")))


def maxima(lowered) -> int:
    """How many reductions by maximum over devices a lowered program has."""
    operations = lowered.as_text().split("stablehlo.all_reduce")[1:]
    return sum("stablehlo.maximum" in operation.split("stablehlo.return")[0] for operation in operations)


# Each quantizer of a tensor in parts: an amax for a scale that may be missing; and all together one for the state.
@pytest.mark.parametrize(("recipe", "expected"), [(RECIPE, OF_PARTS + 1), (FIXED, 1)], ids=["of_amax", "fixed"])
def test_how_often_a_step_reduces(recipe, expected, arguments):
    step, mesh = sharded(recipe)
    with jax.set_mesh(mesh):
        lowered = step.trace(*placed(mesh, *arguments)).lower(lowering_platforms=("cuda",))
    assert maxima(lowered) == expected


@pytest.mark.parametrize("recipe", [RECIPE, FIXED], ids=["of_amax", "fixed"])
def test_steps_are_those_of_one_device(recipe, arguments):
    """State to the bit, and dx, which no device sums: of a first step, of one with history, and of one in between."""
    step, mesh = sharded(recipe)
    whole = jax.jit(gradient(recipe))
    variables, x = arguments
    with jax.set_mesh(mesh):
        for number in range(3):
            got, want = step(*placed(mesh, variables, x)), whole(variables, x)
            for a, b in zip(jax.tree.leaves(got[0][COLLECTION]), jax.tree.leaves(want[0][COLLECTION]), strict=True):
                np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(np.asarray(got[1], np.float32), np.asarray(want[1], np.float32))
            state = jax.tree.map(np.asarray, want[0][COLLECTION])
            if number == 0:  # two quantizers lose their history, as of a layer that a step doesn't use
                state = jax.tree.map(
                    lambda leaf: leaf * np.array([1, 0, 1, 1, 1, 0]).reshape(-1, *[1] * (leaf.ndim - 1)), state
                )
            variables = {**variables, COLLECTION: state}


def test_a_step_without_varying_types(arguments):
    """``check_vma=False``: the state is reduced over all manual axes."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    want = jax.jit(gradient(FIXED))(*arguments)[0][COLLECTION]

    def shard(variables, x):
        return gradient(FIXED)(variables, x)[0][COLLECTION]

    with jax.set_mesh(mesh):
        step = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False))
        arrays = placed(mesh, *arguments)
        got, text = step(*arrays), step.lower(*arrays)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert all(np.array_equal(part.data, b) for part in a.addressable_shards)
    assert maxima(text) == 1


def test_initial_scale_is_what_a_quantizer_without_history_uses():
    """x w of FP8 numbers in float64, rounded by ml_dtypes; and its state is that of a scale from the amax."""
    x = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
    y, states = {}, {}
    for scale in (None, 1.0, 0.25):
        recipe = dataclasses.replace(RECIPE, initial_scale=scale)
        module = te.Sequential([ops.Linear(16, use_bias=False)], recipe=recipe, dtype=jnp.float32)
        variables = jax.jit(module.init)(jax.random.key(1), x)

        def loss(variables, module=module):
            y = module.apply(variables, x)
            return jnp.sum(y), y

        grads, y[scale] = jax.jit(jax.grad(loss, has_aux=True))(variables)
        states[scale] = grads[COLLECTION]
    (kernel,) = jax.tree.leaves(variables["params"])
    for scale in (1.0, 0.25):
        x_q, w_q = (
            (a.astype(np.float32) * scale).astype(jnp.float8_e4m3fn).astype(np.float64) for a in (x, np.asarray(kernel))
        )
        np.testing.assert_allclose(y[scale], x_q @ w_q / scale**2, rtol=1e-5, atol=1e-6)
        for a, b in zip(jax.tree.leaves(states[scale]), jax.tree.leaves(states[None]), strict=True):
            np.testing.assert_array_equal(a, b)
    assert not np.array_equal(y[1.0], y[0.25])


def test_scale_times_alpha_is_not_zero():
    """0 would be, on several devices, a scale for each: nothing looks for a common one."""
    scales = {"dy": jnp.float32(2.0**-120)}
    info = LinkInfo(ops.BasicLinear(32), (0,), "ops_0", TensorType((16, 32), jnp.bfloat16), FIXED)
    context = ForwardContext(info, {}, train=True, scales=scales)
    assert jax.jit(lambda: linear.scale_of(context, "dy", alpha=2.0**-30))() == 2.0**-126
    assert linear.scale_of(context, "dy", alpha=2.0**3) == 2.0**-117
    assert linear.scale_of(context, "dy") == 2.0**-120
    assert linear.scale_of(context, "x", alpha=0.5) == 0.5  # without state


def test_nnx_modules_keep_current_scaling_of_dy():
    """Nothing writes the state of dy under ``nnx.grad``, so 1.0 would be its scale for ever: this dy would be 0."""
    layer = te.nnx.Dense(32, 32, use_bias=False, recipe=FIXED, rngs=nnx.Rngs(0))
    loss = lambda layer, x: jnp.sum(layer(x)) * 2.0**-30  # noqa: E731
    dx = nnx.jit(nnx.grad(loss, argnums=1))(layer, jnp.ones((16, 32)))
    want = np.asarray(layer.kernel[...]).sum(1) * 2.0**-30
    np.testing.assert_allclose(np.asarray(dx)[0], want, rtol=0.1, atol=0.1 * 2.0**-30)


@pytest.mark.parametrize("scale", [2.0**-60, 2.0**60])
def test_the_ends_of_initial_scale(scale):
    """All is flushed to zero or saturates, but no scale of a product overflows."""
    recipe = dataclasses.replace(RECIPE, initial_scale=scale)
    module = te.Sequential([ops.Linear(32, use_bias=False)], recipe=recipe, dtype=jnp.bfloat16)
    x = jnp.ones((16, 32), jnp.bfloat16)
    variables = jax.jit(module.init)(jax.random.key(0), x)
    grads = jax.jit(jax.grad(lambda v: jnp.sum(module.apply(v, x).astype(jnp.float32))))(variables)
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 2.0**61])
def test_no_initial_scale(scale):
    with pytest.raises(ValueError, match=r"DelayedScaling: initial_scale: expected None or a float from 2\*\*-60"):
        te.DelayedScaling(initial_scale=scale)


def test_description_of_the_recipe():
    assert recipe_from_json(FIXED.to_json()) == FIXED
    assert "initial_scale" not in RECIPE.to_json()["fields"]  # so that older versions read it
    assert recipe_from_json(RECIPE.to_json()) == RECIPE


def test_kernels_quantized_before_the_call_have_the_amax_of_all_parts(arguments):
    """``te.quantize_kernels`` in ``shard_map``, of kernels that differ between devices."""
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    module = te.Sequential([ops.Linear(32, use_bias=False)], recipe=RECIPE, dtype=jnp.bfloat16)
    x = arguments[1][0]
    variables = jax.jit(module.init)(jax.random.key(1), x)
    (kernel,) = jax.tree.leaves(variables["params"])
    kernel = kernel * jnp.where(jnp.arange(32) < 16, 1.0, 8.0)
    variables = {**variables, "params": jax.tree.map(lambda _: kernel, variables["params"])}
    narrow = te.Sequential([ops.Linear(16, use_bias=False)], recipe=RECIPE, dtype=jnp.bfloat16)

    def shard(variables):
        made = te.quantize_kernels(narrow, variables, x)[te.state.KERNELS]
        return [
            leaf for path, leaf in jax.tree_util.tree_leaves_with_path(made) if "amax" in jax.tree_util.keystr(path)
        ]

    specs = {"params": jax.tree.map(lambda _: P(None, "model"), variables["params"]), COLLECTION: P()}
    with jax.set_mesh(mesh):
        (amax,) = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=(specs,), out_specs=P()))(variables)
    assert amax == np.max(np.abs(np.asarray(kernel)))


def test_many_amaxes_at_once_are_those_reduced_one_by_one():
    """NaN and infinity too, of several shapes, over other axes each, and some over none."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    axes = [("a", "b"), (), ("a",), ("a", "b"), ("a",)]
    values = np.random.default_rng(0).uniform(size=(5, 4, 3)).astype(np.float32)
    values[0, 1], values[2, 3, 0], values[3, 2, 1] = np.nan, np.inf, np.nan

    def shard(values):
        given = [values[0, 0], values[1, 0, 0], values[2, 0], values[3, 0, 1], values[4, 0, :2]]
        together = reduce_together(given, axes)
        alone = [reduce_amax(amax, over) for amax, over in zip(given, axes, strict=True)]
        assert [jax.typeof(a) for a in together] == [jax.typeof(b) for b in alone]
        return [[compat.pvary(leaf, ("a", "b"))[None] for leaf in leaves] for leaves in (together, alone)]

    with jax.set_mesh(mesh):
        function = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P(None, ("a", "b")), out_specs=P(("a", "b"))))
        together, alone = function(values)
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
