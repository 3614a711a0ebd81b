"""Dense, DenseGeneral and LayerNormDense against flax's own modules and plain jax.numpy."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_jax as te
from te_jax.testing import modules as references

KEY = jax.random.key(7)


def init(module, *args):
    return jax.jit(module.init)(KEY, *args)  # jitted: faster than compiling every small operation by itself


def random(*shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(len(shape) + sum(shape)), shape, dtype)


def assert_same_tree(ours, theirs):
    """Same paths and bit-identical leaves."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def assert_same_function(ours, theirs, variables, x, rtol):
    """Same value and gradients, of parameters and x, under a random cotangent."""
    y = theirs.apply(variables, x)
    cotangent = random(*y.shape)

    def loss(module):
        return lambda v, x: (module.apply(v, x).astype(jnp.float32) * cotangent).sum()

    np.testing.assert_allclose(jax.jit(ours.apply)(variables, x), y, rtol=rtol, atol=rtol)
    got = jax.jit(jax.grad(loss(ours), argnums=(0, 1)))(variables, x)
    want = jax.jit(jax.grad(loss(theirs), argnums=(0, 1)))(variables, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max()), got, want)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("lead", [(6,), (2, 3)])
def test_dense_is_nn_dense(use_bias, lead):
    x = random(*lead, 24)
    bias_init = nn.initializers.normal(1.0)
    ours = te.flax.Dense(40, use_bias, bias_init=bias_init)
    theirs = nn.Dense(40, use_bias, bias_init=bias_init)
    variables = init(ours, x)
    assert_same_tree(variables, init(theirs, x))
    assert set(variables["params"]) == ({"kernel", "bias"} if use_bias else {"kernel"})
    assert_same_function(ours, theirs, variables, x, rtol=1e-5)


def test_dense_inside_a_module_is_initialised_as_nn_dense():
    class Net(nn.Module):
        dense: type

        @nn.compact
        def __call__(self, x):
            return self.dense(8, name="b")(self.dense(16, name="a")(x))

    x = random(4, 16)
    assert_same_tree(init(Net(te.flax.Dense), x), init(Net(nn.Dense), x))


def test_dense_dtype():
    x = random(4, 16)
    dense = te.flax.Dense(8, dtype=jnp.bfloat16)
    variables = init(dense, x)
    assert variables["params"]["kernel"].dtype == jnp.float32
    assert dense.apply(variables, x).dtype == jnp.bfloat16
    assert te.flax.Dense(8, param_dtype=jnp.bfloat16).init(KEY, x)["params"]["kernel"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("features", "axis", "use_bias"),
    [
        (5, -1, True),
        ((5, 6), -1, False),
        (5, (1, -1), True),
        ((5, 6), (-2, -1), True),
        ((5, 6), 1, True),
        (4, (-1, 0), False),
    ],
)
def test_dense_general_is_nn_dense_general(features, axis, use_bias):
    x = random(2, 3, 4, 7)
    config = {"features": features, "axis": axis, "use_bias": use_bias, "bias_init": nn.initializers.normal(1.0)}
    ours, theirs = te.flax.DenseGeneral(**config), nn.DenseGeneral(**config)
    variables = init(ours, x)
    assert_same_tree(variables, init(theirs, x))
    assert_same_function(ours, theirs, variables, x, rtol=1e-5)


@pytest.mark.parametrize("axis", [(0, 0), (1, -2), 3, (-4,)])
def test_dense_general_refuses_axes(axis):
    with pytest.raises(ValueError, match=r"^te_jax.DenseGeneral: axis: expected distinct axes"):
        te.flax.DenseGeneral(4, axis=axis).init(KEY, random(2, 3, 4))


@pytest.mark.parametrize("recipe", [te.DelayedScaling(amax_history_len=4), te.CurrentScaling()])
@pytest.mark.parametrize("dense", [te.flax.Dense(48), te.flax.DenseGeneral((3, 16), axis=(-2, -1))])
def test_fp8_error_is_that_of_the_format(recipe, dense):
    x = random(32, 2, 32)
    dense = dense.clone(recipe=recipe, dtype=jnp.float32)
    variables = init(dense, x)
    kernel = np.asarray(variables["params"]["kernel"], np.float64)
    want = np.tensordot(np.asarray(x, np.float64), kernel, 2 if kernel.ndim == 4 else 1)
    error = np.asarray(jax.jit(dense.apply)(variables, x), np.float64) - want
    relative = np.sqrt((error**2).mean() / (want**2).mean())
    # Each E4M3 operand is rounded with at most 2**-4 relative error, uniform at worst; two independent operands.
    assert 1e-3 < relative < np.sqrt(2 / 3) * 2**-4


def test_delayed_scaling_state_of_dense():
    x = random(32, 32)
    dense = te.flax.Dense(48, recipe=te.DelayedScaling(amax_history_len=4))
    rest, state = te.state.split(init(dense, x))

    def loss(state, params):
        return (dense.apply(te.state.merge({"params": params}, state), x) ** 2).sum()

    state = jax.jit(lambda *a: te.state.apply(state, jax.grad(loss)(*a)))(state, rest["params"])
    (history,) = [
        leaf for path, leaf in jax.tree.leaves_with_path(state) if "amax_history" in jax.tree_util.keystr(path)
    ]
    newest = np.asarray(history)[:, 0] / np.asarray(history)[:, 0].max()
    assert history.shape == (3, 4)  # x, kernel, dy
    assert (newest > 0).all()


def test_layernorm_dense():
    x = random(4, 24)
    for kind in ("rmsnorm", "layernorm"):
        module = te.flax.LayerNormDense(16, norm=kind, bias_init=nn.initializers.normal(1.0))
        params = init(module, x)["params"]
        want = references.linear(params["dense"], references.norm(params["norm"], x))
        np.testing.assert_allclose(jax.jit(module.apply)({"params": params}, x), want, rtol=1e-5, atol=1e-5)
    assert set(params["norm"]) == {"scale", "bias"}


def test_unknown_norm():
    with pytest.raises(ValueError, match=r"LayerNormDense: norm: expected one of .*, got 'batchnorm'"):
        te.flax.LayerNormDense(16, norm="batchnorm").init(KEY, random(4, 24))


@pytest.mark.parametrize(
    ("dense", "names"), [(te.flax.Dense(8), ("x", "y")), (te.flax.DenseGeneral((2, 4)), ("x", "y", None))]
)
def test_partitioned_parameters(dense, names):
    """Parameters boxed by nn.with_partitioning are unboxed for the computation and keep their names."""
    x = random(4, 16)
    boxed = dense.clone(kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), names))
    variables = init(boxed, x)
    assert variables["params"]["kernel"].names == names
    plain = nn.unbox(variables)
    np.testing.assert_array_equal(boxed.apply(variables, x), dense.apply(plain, x))
    grads = jax.grad(lambda v: boxed.apply(v, x).sum())(variables)
    assert grads["params"]["kernel"].names == names
    spec = nn.get_partition_spec(variables)["params"]["kernel"]
    assert spec == jax.sharding.PartitionSpec(*names)
