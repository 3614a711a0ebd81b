"""te.nnx modules on meshes: Auto, Explicit and Manual; values, state and the collectives of the compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
from te_jax.testing import hlo
from te_jax.testing.compare import assert_trees_identical

RECIPE = te.DelayedScaling(amax_history_len=4)
K = 64
X = jax.random.normal(jax.random.key(0), (8, 16, K))
X = X * jnp.exp2(jnp.arange(8.0) - 4)[:, None, None]  # shards of very different size


def dense(**kwargs):
    return te.nnx.Dense(K, 32, recipe=RECIPE, rngs=nnx.Rngs(0), **kwargs)


def mlp(**kwargs):
    return te.nnx.LayerNormMLP(K, 128, activation="gelu", recipe=RECIPE, rngs=nnx.Rngs(0), **kwargs)


def loss_fn(model, x):
    return (model(x) ** 2).sum()


def step_of(graphdef, grad, loss=loss_fn):
    """(params, fp8 state, x) -> (gradients, next state) in one pure function."""

    def step(params, fp8, x):
        model = nnx.merge(graphdef, params, fp8)
        grads = grad(loss)(model, x)
        return nnx.to_pure_dict(grads), nnx.to_pure_dict(nnx.state(model, te.nnx.FP8State))

    return step


def assert_close(got, want, bound):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b)


@pytest.mark.parametrize(
    ("make", "grad", "regime"),
    [
        (dense, nnx.grad, "manual"),  # in the other regimes below
        (mlp, nnx.grad, "auto"),
        (mlp, nnx.grad, "explicit"),
        (mlp, nnx.grad, "manual"),
        (mlp, te.nnx.grad, "auto"),
        (mlp, te.nnx.grad, "manual"),
    ],
)
def test_data_parallel_equals_one_device(make, grad, regime):
    """The state is that of one device, to the bit, on every device; nothing is gathered."""
    graphdef, params, fp8 = nnx.split(make(), nnx.Param, te.nnx.FP8State)
    want_grads, want_state = jax.jit(step_of(graphdef, grad))(params, fp8, X)
    kind = AxisType.Auto if regime == "auto" else AxisType.Explicit
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    step = step_of(graphdef, grad)
    if regime == "manual":
        step = step_of(graphdef, grad, lambda model, x: jax.lax.psum(loss_fn(model, x), "data"))
        step = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())
    with jax.set_mesh(mesh):
        params, fp8 = jax.device_put((params, fp8), NamedSharding(mesh, P()))
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        compiled = jax.jit(step).lower(params, fp8, x).compile()
        got_grads, got_state = compiled(params, fp8, x)
    assert set(hlo.count_collectives(compiled.as_text())) == {"all-reduce"}
    for leaf, want in zip(jax.tree.leaves(got_state), jax.tree.leaves(want_state), strict=True):
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(want))
    assert_close(got_grads, want_grads, 1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_kernels_that_are_made_sharded(kind):
    """nnx.with_partitioning: parameters are made on the mesh, used in their shards, updated in place by nnx.jit."""
    names = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    want_model = dense()
    want_grads = nnx.grad(loss_fn)(want_model, X)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        model = dense(kernel_init=names, bias_init=nnx.with_partitioning(nnx.initializers.zeros, ("model",)))
        assert model.kernel.get_value().sharding.spec == P(None, "model")
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        step = nnx.jit(lambda model, x: nnx.grad(loss_fn)(model, x))
        grads = step(model, x)
        text = step.lower(model, x).compile().as_text()
    assert "all-gather" not in hlo.count_collectives(text)
    kernels = [call.operands[0][1] for call in hlo.custom_calls(text) if call.target == "te_jax_quantize"]
    assert (K, 16) in kernels
    assert grads.kernel.get_value().sharding.is_equivalent_to(NamedSharding(mesh, P(None, "model")), 2)
    assert_close(nnx.to_pure_dict(grads), nnx.to_pure_dict(want_grads), 1e-5)
    got, want = (te.nnx.to_variables(m)["_overwrite_with_gradient"] for m in (model, want_model))
    assert_trees_identical(got, want)
