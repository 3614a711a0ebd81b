"""Sequential: parameters, extras, sharing, foreign modules, transformations, errors."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_jax as te
from te_jax import ops
from te_jax.quant import state as fp8_state
from te_jax.testing import modules, tolerance
from te_jax.testing.compare import assert_trees_identical

F32, BF16 = jnp.float32, jnp.bfloat16
DELAYED = te.DelayedScaling(amax_history_len=4)
STATE = fp8_state.COLLECTION


def random(seed, shape, dtype=F32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def relative_error(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def loss_of(module, weights):
    def loss(variables, x, *extras, **kwargs):
        y = module.apply(variables, x, *extras, **kwargs)
        return jnp.sum(y.astype(F32) * weights)

    return loss


# Values


def chain(recipe, dtype=None, activation=ops.SwiGLU, **kwargs):
    features = 128 if activation in (ops.SwiGLU, ops.GEGLU) else 64
    return te.Sequential(
        [ops.RMSNorm(name="mlp_norm"), ops.Linear(features, name="fc1"), activation(), ops.Linear(48, name="fc2")],
        recipe=recipe,
        dtype=dtype,
        **kwargs,
    )


@pytest.mark.parametrize("activation", [ops.SwiGLU, ops.GEGLU, ops.GELU, ops.SiLU, ops.ReLU])
def test_without_a_recipe_it_is_plain_jax(activation):
    module, x, weights = chain(None, activation=activation), random(0, (2, 3, 32)), random(1, (2, 3, 48))
    variables = jax.jit(module.init)(jax.random.key(2), x)
    assert set(variables) == {"params"}
    plain = lambda params, x: jnp.sum(modules.mlp(params, x, activation.kind) * weights)  # noqa: E731
    got = jax.jit(jax.value_and_grad(loss_of(module, weights), argnums=(0, 1)))(variables, x)
    want = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(variables["params"], x)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5),
        got,
        (want[0], ({"params": want[1][0]}, want[1][1])),
    )


@pytest.mark.parametrize("recipe", [DELAYED, te.CurrentScaling(), te.BlockScaling()], ids=lambda r: r.name)
@pytest.mark.parametrize("dtype", [F32, BF16, jnp.float16], ids=lambda d: jnp.dtype(d).name)
def test_fp8_is_near_fp64(recipe, dtype):
    module, x, weights = chain(recipe, dtype), random(0, (4, 32, 128), dtype), random(1, (4, 32, 48))
    variables = jax.jit(module.init)(jax.random.key(2), x)
    plain = lambda params, x: jnp.sum(modules.mlp(params, x, "swiglu") * weights)  # noqa: E731
    y = jax.jit(module.apply)(variables, x)
    assert y.dtype == dtype
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (variables["params"], x))
        want_y = jax.jit(modules.mlp, static_argnums=2)(*exact, "swiglu")
        want = jax.jit(jax.grad(plain, argnums=(0, 1)))(*exact)
    # Two linears in a row: errors of two contractions.
    forward = tolerance.relative_rms_error(*["e4m3"] * 4)
    assert relative_error(y, want_y) < 1.5 * forward
    grads = jax.jit(jax.grad(loss_of(module, weights), argnums=(0, 1)))(variables, x)
    backward = tolerance.relative_rms_error(*["e4m3"] * 4, *["e5m2"] * 2)
    for got, exact_grad in zip(jax.tree.leaves((grads[0]["params"], grads[1])), jax.tree.leaves(want), strict=True):
        assert relative_error(got, exact_grad) < 1.5 * backward


def test_delayed_scaling_uses_the_history():
    """The second step quantizes with the first one's amax: values beyond it saturate."""
    module = te.Sequential([ops.Linear(16, use_bias=False, kernel_init=nn.initializers.ones)], recipe=DELAYED)
    x = jnp.ones((16, 16))
    variables = jax.jit(module.init)(jax.random.key(0), x)
    step = jax.jit(jax.grad(lambda v, x: module.apply(v, x).sum()))
    state = {STATE: step(variables, x)[STATE]}
    view = fp8_state.read(state[STATE]["fp8_0"], np.array([448.0, 448.0, 57344.0], np.float32), DELAYED)
    np.testing.assert_array_equal(view.scale, [448.0, 448.0, 57344.0])
    np.testing.assert_array_equal(view.history[:, 0], [1.0, 1.0, 1.0])
    apply = jax.jit(module.apply)
    y = apply({**variables, **state}, 100 * x)
    np.testing.assert_allclose(y, 16.0, rtol=1e-6)  # 100 saturates at 448 / 448 = 1
    state = {STATE: step({**variables, **state}, 100 * x)[STATE]}
    y = apply({**variables, **state}, 100 * x)
    np.testing.assert_allclose(y, 1600.0, rtol=1e-6)


# Parameters and extras


def test_parameter_paths():
    chain = [ops.LayerNorm(), ops.Linear(32), ops.Dropout(0.1), ops.Linear(16, use_bias=False, name="head")]
    variables = te.Sequential(chain, recipe=DELAYED).init(jax.random.key(0), jnp.zeros((16, 32)))
    shapes = jax.tree.map(jnp.shape, variables["params"])
    assert shapes == {
        "ops_0": {"scale": (32,), "bias": (32,)},
        "ops_1": {"kernel": (32, 32), "bias": (32,)},
        "head": {"kernel": (32, 16)},
    }
    assert jax.tree.map(jnp.shape, variables[STATE]) == {
        "fp8_0_ops_1_head": {"amax_history": (6, 4), "scale": (6,), "uses": (6, 66)}
    }


@pytest.mark.parametrize("recipe", [None, DELAYED, te.CurrentScaling()], ids=str)
def test_an_op_listed_twice_shares_its_parameters(recipe):
    linear = ops.Linear(32)
    module = te.Sequential([linear, ops.ReLU(), linear], recipe=recipe)
    apart = te.Sequential([ops.Linear(32), ops.ReLU(), ops.Linear(32)], recipe=recipe)
    x, weights = random(0, (16, 32)), random(1, (16, 32))
    variables = jax.jit(module.init)(jax.random.key(0), x)
    assert list(variables["params"]) == ["ops_0"]
    both = {"params": {"ops_0": variables["params"]["ops_0"], "ops_2": variables["params"]["ops_0"]}}
    state = {k: v for k, v in variables.items() if k != "params"}
    got = jax.jit(jax.grad(loss_of(module, weights)))(variables, x)
    want = jax.jit(jax.grad(loss_of(apart, weights)))({**both, **state}, x)
    for name, first in want["params"]["ops_0"].items():  # on a GPU two programs may choose different GEMM algorithms
        total = np.float64(first) + np.float64(want["params"]["ops_2"][name])
        assert relative_error(got["params"]["ops_0"][name], total) < 1e-6
    if recipe is DELAYED:
        assert_trees_identical(got[STATE], want[STATE])


def test_equal_ops_that_are_not_the_same_object_share_nothing():
    variables = te.Sequential([ops.Linear(32), ops.Linear(32)]).init(jax.random.key(0), jnp.zeros((16, 32)))
    assert list(variables["params"]) == ["ops_0", "ops_1"]


@pytest.mark.parametrize("recipe", [None, te.CurrentScaling()], ids=str)
def test_extra_inputs_and_outputs(recipe):
    module = te.Sequential(
        [ops.MakeExtraOutput(), ops.Linear(32), ops.AddExtraInput(), ops.Linear(16), ops.AddExtraInput(in_place=False)],
        recipe=recipe,
    )
    x, a, b = random(0, (16, 32)), random(1, (16, 32)), random(2, (16, 16))
    variables = jax.jit(module.init)(jax.random.key(0), x, a, b)
    y, extra = module.apply(variables, x, a, b)
    np.testing.assert_array_equal(extra, x)
    first = te.Sequential([ops.Linear(32, name="ops_1")], recipe=recipe)
    second = te.Sequential([ops.Linear(16, name="ops_3")], recipe=recipe)
    want = second.apply(variables, first.apply(variables, x) + a) + b
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
    # The cotangent of the extra output comes on top of that of the main path.
    grads = jax.grad(
        lambda x, a, b, w: sum(jnp.sum(o) * s for o, s in zip(module.apply(variables, x, a, b), w, strict=True)),
        argnums=(0, 1, 2),
    )
    dx, da, db = grads(x, a, b, (1.0, 3.0))
    dx0, da0, _ = grads(x, a, b, (1.0, 0.0))
    np.testing.assert_allclose(dx, dx0 + 3.0, rtol=1e-6)
    np.testing.assert_array_equal(da, da0)
    np.testing.assert_array_equal(db, jnp.ones_like(b))


def test_foreign_modules_and_functions_end_a_run():
    module = te.Sequential([ops.Linear(32), jnp.tanh, ops.RMSNorm(), nn.Dense(16), ops.Linear(16)], recipe=DELAYED)
    x = random(0, (16, 32))
    variables = jax.jit(module.init)(jax.random.key(0), x)
    assert set(variables["params"]) == {"ops_0", "ops_2", "ops_3", "ops_4"}
    assert set(variables[STATE]) == {"fp8_0", "fp8_4"}
    grads = jax.jit(jax.grad(lambda v: module.apply(v, x).sum()))(variables)
    assert all(jnp.any(g != 0) for g in jax.tree.leaves(grads["params"]))


def test_dropout():
    module = te.Sequential([ops.Dropout(0.5), ops.ConstantScale(2.0)])
    x = jnp.ones((64, 64))
    np.testing.assert_array_equal(module.apply({}, x), 2 * x)
    apply = lambda x, seed: module.apply({}, x, deterministic=False, rngs={"dropout": jax.random.key(seed)})  # noqa: E731
    y, dx = jax.value_and_grad(lambda x: apply(x, 0).sum())(x)
    y = apply(x, 0)
    assert set(np.unique(y)) == {0.0, 4.0}
    assert 0.4 < float(jnp.mean(y == 0)) < 0.6
    np.testing.assert_array_equal(dx, y)  # the same mask
    assert jnp.any(apply(x, 1) != y)


def test_reshape():
    module = te.Sequential([ops.Reshape((4, -1, 16)), ops.Linear(8), ops.Reshape((-1, 8))])
    x = random(0, (8, 32))
    variables = jax.jit(module.init)(jax.random.key(0), x)
    y, dx = module.apply(variables, x), jax.grad(lambda x: module.apply(variables, x).sum())(x)
    assert y.shape == (16, 8)
    assert dx.shape == x.shape


# Transformations


@pytest.mark.parametrize("recipe", [DELAYED, te.CurrentScaling()], ids=lambda r: r.name)
def test_vmap_is_a_loop(recipe):
    module, x, weights = chain(recipe, BF16), random(0, (3, 16, 32), BF16), random(1, (16, 48))
    x = x * jnp.array([1.0, 10.0, 0.1], BF16)[:, None, None]  # scales that differ between examples
    variables = jax.jit(module.init)(jax.random.key(2), x[0])
    step = jax.value_and_grad(loss_of(module, weights), argnums=(0, 1))
    got = jax.jit(jax.vmap(step, in_axes=(None, 0)))(variables, x)
    want = jax.tree.map(lambda *a: jnp.stack(a), *[jax.jit(step)(variables, x[i]) for i in range(3)])
    assert_trees_identical(
        got[1][0][STATE] if recipe is DELAYED else {}, want[1][0][STATE] if recipe is DELAYED else {}
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-4), got, want)


@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_layers_is_the_unrolled_loop(remat):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            layer = te.Sequential(
                [ops.RMSNorm(), ops.Linear(64), ops.GELU(), ops.Linear(32), ops.AddExtraInput()],
                recipe=DELAYED,
                name="mlp",
            )
            return layer(x, x), None

    layer = nn.remat(Layer) if remat else Layer
    scanned = nn.scan(layer, variable_axes={"params": 0, STATE: 0}, split_rngs={"params": True}, length=3)()
    x, weights = random(0, (16, 32)), random(1, (16, 32))
    variables = jax.jit(scanned.init)(jax.random.key(0), x, None)
    assert jax.tree.leaves(variables[STATE])[0].shape[0] == 3

    def unrolled(variables, x):
        for i in range(3):
            x, _ = Layer().apply(jax.tree.map(lambda leaf: leaf[i], variables), x, None)  # noqa: B023
        return jnp.sum(x * weights)

    scan_loss = lambda variables, x: jnp.sum(scanned.apply(variables, x, None)[0] * weights)  # noqa: E731
    scan_grad, unrolled_grad = (jax.jit(jax.grad(loss, argnums=(0, 1))) for loss in (scan_loss, unrolled))
    for _ in range(2):  # a new state, then one with history
        got, want = scan_grad(variables, x), unrolled_grad(variables, x)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert relative_error(a, b) < 1e-3
        variables = {"params": variables["params"], STATE: got[0][STATE]}


def test_checkpoint_recomputes_the_same():
    module, x, weights = chain(DELAYED, BF16), random(0, (16, 32), BF16), random(1, (16, 48))
    variables = jax.jit(module.init)(jax.random.key(2), x)
    loss = loss_of(module, weights)
    assert_trees_identical(jax.jit(jax.grad(jax.checkpoint(loss)))(variables, x), jax.jit(jax.grad(loss))(variables, x))


def test_a_branch_not_taken_leaves_the_state_unused():
    module, x = te.Sequential([ops.Linear(32)], recipe=DELAYED), random(0, (16, 32))
    variables = jax.jit(module.init)(jax.random.key(0), x)

    def loss(variables, x, on):
        return jax.lax.cond(on, lambda v, x: module.apply(v, x), lambda v, x: x, variables, x).sum()

    step = jax.jit(jax.grad(loss))
    state = step(variables, x, True)[STATE]
    unused = step({**variables, STATE: state}, x, False)[STATE]
    assert all(not jnp.any(leaf) for leaf in jax.tree.leaves(unused))
    again = module.apply({**variables, STATE: unused}, x)
    np.testing.assert_array_equal(again, module.apply(variables, x))  # starts anew from the current tensor


# Errors: what users get wrong, each naming the argument, expected and got


def test_errors():
    x = jnp.zeros((16, 32))
    linear = te.Sequential([ops.Linear(32)], recipe=DELAYED)
    with pytest.raises(TypeError, match=r"Sequential: x: expected dtype bfloat16, float16, float32, got int32"):
        linear.init(jax.random.key(0), x.astype(jnp.int32))
    with jax.enable_x64(True), pytest.raises(TypeError, match=r"x: expected dtype .*, got float64"):
        linear.init(jax.random.key(0), jnp.zeros((16, 32), jnp.float64))
    with pytest.raises(ValueError, match=r"x: expected at least one dimension, got shape \(\)"):
        linear.init(jax.random.key(0), jnp.zeros(()))
    with pytest.raises(ValueError, match=r"extra inputs: expected 0, got 1"):
        linear.init(jax.random.key(0), x, x)
    with pytest.raises(ValueError, match=r"extra inputs: expected 1, for ops\[0\] \(AddExtraInput\), got 0"):
        te.Sequential([ops.AddExtraInput()]).init(jax.random.key(0), x)
    with pytest.raises(
        ValueError, match=r"extra input 0, for ops\[0\] \(AddExtraInput\): expected shape \(16, 32\), got \(16, 16\)"
    ):
        te.Sequential([ops.AddExtraInput()]).init(jax.random.key(0), x, x[:, :16])
    with pytest.raises(ValueError, match=r"SwiGLU: x: expected an even last dimension"):
        te.Sequential([ops.SwiGLU()]).init(jax.random.key(0), x[:, :31])
    with pytest.raises(ValueError, match=r"Linear: features: expected a positive int, got 0"):
        te.Sequential([ops.Linear(0)]).init(jax.random.key(0), x)
    with pytest.raises(TypeError, match=r"ops\[0\]: expected an op, a Flax module or a function, got 3"):
        te.Sequential([3]).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=r"Reshape: x: expected a size that \(7, -1\) holds, got shape \(16, 32\)"):
        te.Sequential([ops.Reshape((7, -1))]).init(jax.random.key(0), x)
    shared = ops.Linear(16)
    with pytest.raises(
        ValueError,
        match=r"ops_0/kernel of ops\[1\] \(Linear\): expected shape \(16, 16\), got \(32, 16\), from its first place",
    ):
        te.Sequential([shared, shared]).init(jax.random.key(0), x)


def test_errors_of_the_state():
    x = jnp.zeros((16, 32))
    linear = te.Sequential([ops.Linear(32)], recipe=DELAYED)
    variables = linear.init(jax.random.key(0), x)
    with pytest.raises(
        ValueError, match=r"variables: expected collection '_overwrite_with_gradient' with 'fp8_0'.*got none"
    ):
        linear.apply({"params": variables["params"]}, x)
    longer = te.Sequential([ops.Linear(32)], recipe=te.DelayedScaling(amax_history_len=8))
    with pytest.raises(ValueError, match=r"fp8_0/amax_history: expected shape \(3, 8\), got \(3, 4\)"):
        longer.apply(variables, x)


def test_strict_recipes_refuse_what_cannot_be_quantized():
    strict = te.Sequential([ops.Linear(24)], recipe=te.CurrentScaling(strict=True))
    with pytest.raises(ValueError, match=r"output features: 24 is not a multiple of 16"):
        strict.init(jax.random.key(0), jnp.zeros((16, 32)))


@pytest.mark.parametrize("recipe", [None, DELAYED, te.CurrentScaling(), te.BlockScaling()], ids=str)
@pytest.mark.parametrize("shape", [(0, 32), (4, 0, 32), (5, 32), (32,), (3, 5, 32)], ids=str)
def test_shapes_that_run_unquantized(recipe, shape):
    """Empty batches, odd tokens, a single vector: the documented high-precision path, forward and backward."""
    module = te.Sequential([ops.RMSNorm(), ops.Linear(64), ops.SwiGLU(), ops.Linear(32)], recipe=recipe)
    plain = te.Sequential([ops.RMSNorm(), ops.Linear(64), ops.SwiGLU(), ops.Linear(32)])
    x = random(0, shape)
    variables = jax.jit(module.init)(jax.random.key(0), x)
    grad = lambda module: jax.jit(jax.grad(lambda v, x: module.apply(v, x).sum(), argnums=(0, 1)))  # noqa: E731
    got = grad(module)(variables, x)
    want = grad(plain)({"params": variables["params"]}, x)
    # The norm is te_jax's own kernel even so, with sums in another order; quantized, the results would be far off.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, (got[0]["params"], got[1]), (want[0]["params"], want[1]))
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(got))


@pytest.mark.parametrize("recipe", [DELAYED, te.CurrentScaling(), te.BlockScaling()], ids=lambda r: r.name)
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_diverged_run_does_not_look_healthy(recipe, bad):
    module = te.Sequential([ops.Linear(32)], recipe=recipe)
    x = random(0, (16, 32)).at[3, 5].set(bad)
    variables = jax.jit(module.init)(jax.random.key(0), jnp.ones_like(x))
    apply = jax.jit(module.apply)
    y = apply(variables, x)
    assert bool(jnp.all(jnp.isnan(y[3])))
    grads = jax.jit(jax.grad(lambda v: module.apply(v, x).sum()))(variables)
    assert bool(jnp.any(jnp.isnan(grads["params"]["ops_0"]["kernel"])))
    # The state forgets it: the next step with finite values is healthy.
    if recipe is DELAYED:
        y = apply({**variables, STATE: grads[STATE]}, jnp.ones_like(x))
        assert bool(jnp.all(jnp.isfinite(y)))
