"""Residuals inside a chain, and the sum of the cotangents where a value branches off."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import te_jax as te
from te_jax import ops
from te_jax.quant.state import COLLECTION

BF16 = jnp.bfloat16


def random(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def nested(features=32):
    """x + f(x), f(x) = g(norm(x)) + 2 norm(x) in brackets of its own."""
    inner = [ops.StartResidual(), ops.Linear(features), ops.GELU(), ops.Linear(features), ops.AddResidual()]
    return [ops.StartResidual(), ops.RMSNorm(), *inner, ops.ConstantScale(0.5), ops.AddResidual()]


def plain(params, x):
    h = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * params["ops_1"]["scale"]
    dense = lambda p, h: h @ p["kernel"] + p["bias"]  # noqa: E731
    return x + 0.5 * (h + dense(params["ops_5"], jax.nn.gelu(dense(params["ops_3"], h))))


def value_and_grads(function, *args):
    weights = random(9, *args[-1].shape)
    return jax.jit(jax.value_and_grad(lambda *a: (function(*a) * weights).sum(), argnums=(0, 1)))(*args)


def assert_close(got, want, rtol):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= rtol * np.linalg.norm(b)


def test_values_and_gradients_are_those_of_plain_jax():
    module, x = te.Sequential(nested()), random(0, 2, 5, 32)
    params = module.init(jax.random.key(1), x)["params"]
    got = value_and_grads(lambda params, x: module.apply({"params": params}, x), params, x)
    assert_close(got, value_and_grads(plain, params, x), 1e-5)


@pytest.mark.parametrize("recipe", [te.DelayedScaling(amax_history_len=2), te.CurrentScaling()], ids=lambda r: r.name)
def test_inside_and_outside_are_the_same(recipe):
    """A residual inside of a chain is the extra output and extra input of one: bit for bit, FP8 state included."""
    branch = [ops.RMSNorm(name="norm"), ops.Linear(48, name="fc1"), ops.SiLU(), ops.Linear(32, name="fc2")]
    inside = te.Sequential([ops.StartResidual(), *branch, ops.AddResidual()], recipe=recipe, dtype=BF16)
    outside = te.Sequential([ops.Identity(), *branch, ops.AddExtraInput()], recipe=recipe, dtype=BF16)
    x = random(0, 16, 32, dtype=BF16)
    variables = jax.jit(inside.init)(jax.random.key(1), x)
    y, grads = jax.jit(jax.value_and_grad(lambda v: inside.apply(v, x).astype(jnp.float32).sum()))(variables)
    y2, grads2 = jax.jit(jax.value_and_grad(lambda v: outside.apply(v, x, x).astype(jnp.float32).sum()))(variables)
    for a, b in zip(jax.tree.leaves((y, grads)), jax.tree.leaves((y2, grads2)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_gradients_are_summed_in_kernels():
    chain = [ops.StartResidual(), ops.RMSNorm(), ops.Linear(32), ops.AddResidual()]
    chain += [ops.MakeExtraOutput(), ops.Linear(32), ops.AddExtraInput()]
    x = jax.ShapeDtypeStruct((2, 16, 32), BF16)
    plan = te.Sequential(chain, recipe=te.CurrentScaling(), dtype=BF16).plan(x, x)
    steps = (*plan.forward, *plan.backward)
    assert [step.ops for step in steps if step.computes and not step.custom_calls] == []
    assert [step.name for step in plan.backward if step.computes] == [
        "dbias+quantize+dgrad+add+wgrad",
        "dbias+quantize+dgrad+wgrad",
        "d-norm+add",
    ]


def test_a_sum_in_a_kernel_is_rounded_once():
    """Small gradients of a branch beside large ones of the residual: no worse than the nearest bfloat16 of the sum."""
    module = te.Sequential([ops.MakeExtraOutput(), ops.RMSNorm()], recipe=te.CurrentScaling(), dtype=BF16)
    x, dy, extra = random(0, 64, 64, dtype=BF16), random(1, 64, 64, dtype=BF16), 64 * random(2, 64, 64, dtype=BF16)
    variables = module.init(jax.random.key(3), x)
    _, pullback = jax.vjp(lambda x: module.apply(variables, x), x)
    (dx,) = jax.jit(pullback)((dy, extra))
    x64 = np.asarray(x, np.float64)
    rstd = 1 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6)
    dy64, x_hat = np.asarray(dy, np.float64), x64 * rstd
    want = rstd * (dy64 - x_hat * (dy64 * x_hat).mean(-1, keepdims=True)) + np.asarray(extra, np.float64)
    np.testing.assert_allclose(np.asarray(dx, np.float64), want, rtol=2.0**-8 * 1.01, atol=1e-6)


@pytest.mark.parametrize("recipe", [None, te.CurrentScaling(power_of_two=True)], ids=["none", "current"])
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "linear"])
def test_a_replicated_extra_outputs_cotangent_counts_once(recipe, norm):
    """Column parallel in ``shard_map``: the branch's cotangent is a part of a sum, the extra output's a whole."""
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))

    def make(features):
        linear = ops.Linear(features, use_bias=False, name="fc")
        return te.Sequential([ops.MakeExtraOutput(), *([ops.RMSNorm(name="n")] if norm else []), linear], recipe=recipe)

    x = random(0, 16, 32)
    variables = make(128).init(jax.random.key(1), x)

    def gradients(module, total):
        def loss(variables, x):
            y, extra = module.apply(variables, x)
            return total((y**2).sum()) + (extra**3).sum()

        return jax.grad(loss, argnums=(0, 1))

    specs = {"params": {scope: {"scale": P()} if scope == "n" else {"kernel": P(None, "model")}
                        for scope in variables["params"]}}  # fmt: skip
    shard = gradients(make(32), lambda part: jax.lax.psum(part, "model"))
    got = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=(specs, P()), out_specs=(specs, P())))(variables, x)
    want = jax.jit(gradients(make(128), lambda whole: whole))(variables, x)
    assert_close(got, want, 1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_on_a_mesh(kind):
    """A scale in the GEMMs, a residual, and a channel that is taken from twice."""
    chain = [ops.StartResidual(), ops.RMSNorm(), ops.MakeExtraOutput(channel="h"), ops.Linear(64, use_bias=False)]
    chain += [ops.SiLU(), ops.Linear(32, use_bias=False), ops.ConstantScale(0.5)]
    chain += [ops.AddExtraInput(channel="h")] * 2 + [ops.AddResidual()]
    module = te.Sequential(chain, recipe=te.CurrentScaling(power_of_two=True))
    x, mesh = random(0, 8, 16, 32), jax.make_mesh((8,), ("data",), axis_types=(kind,))
    variables = module.init(jax.random.key(1), x)
    want = value_and_grads(module.apply, variables, x)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
        got = value_and_grads(module.apply, jax.device_put(variables, jax.NamedSharding(mesh, P())), sharded)
    assert_close(got, want, 1e-5)


def test_second_derivatives_without_a_recipe():
    module, x = te.Sequential(nested()), random(0, 3, 32)
    params = module.init(jax.random.key(1), x)["params"]
    weights = random(9, *x.shape)

    def penalty(function):
        grad = jax.grad(lambda x: (function(params, x) * weights).sum())
        return jax.jit(jax.grad(lambda x: (grad(x) ** 2).sum()))

    got = penalty(lambda params, x: module.apply({"params": params}, x))(x)
    assert_close(got, penalty(plain)(x), 1e-4)


def test_residuals_in_a_scan_with_remat():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return te.Sequential(nested(), recipe=te.DelayedScaling(amax_history_len=2), name="layer")(x), None

    x = random(0, 16, 32)
    results = []
    for layer in (Layer, nn.remat(Layer)):
        axes = {"params": 0, COLLECTION: 0}
        stack = nn.scan(layer, variable_axes=axes, split_rngs={"params": True}, length=2)()
        variables = jax.jit(stack.init)(jax.random.key(1), x, None)
        results.append(value_and_grads(lambda v, x, stack=stack: stack.apply(v, x, None)[0], variables, x))
    assert_close(*results, 1e-6)


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (
            [ops.RMSNorm(), ops.AddResidual()],
            r"ops\[1\] \(AddResidual\): expected a StartResidual before it, in the same",
        ),
        (
            [ops.StartResidual(), ops.RMSNorm()],
            r"ops\[0\] \(StartResidual\): expected an AddResidual after it, in the sam",
        ),
        (
            [ops.StartResidual(), [ops.AddResidual()]],
            r"ops\[1\]\[0\] \(AddResidual\): expected a StartResidual before it",
        ),
        (
            [ops.StartResidual(), ops.Linear(16), ops.AddResidual()],
            r"of ops\[2\] \(AddResidual\), made by ops\[0\] \(StartResidual\): expected shape \(4, 16\), got \(4, 32\)",
        ),
    ],
)
def test_errors(chain, message):
    module = te.Sequential(chain)
    with pytest.raises(ValueError, match=message):
        module.init(jax.random.key(0), jnp.ones((4, 32)))
    with pytest.raises(ValueError, match=message):
        module.plan(jnp.ones((4, 32)))
