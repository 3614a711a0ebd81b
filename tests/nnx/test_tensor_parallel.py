"""te.nnx modules whose linears are split over devices: as te.flax's, which tests/flax compares with one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import te_jax as te
from te_jax import compat, ops
from te_jax.testing.compare import assert_trees_identical

RECIPE = te.DelayedScaling(amax_history_len=2)
K = 64
X = jax.random.normal(jax.random.key(0), (4, 32, K))
SPLIT, BIAS = P("data", "tp"), nn.initializers.normal(1.0)
LECUN = nn.initializers.lecun_normal()
FEATURES = P("data", None, "tp")


def make_mesh(kind=AxisType.Auto):
    return jax.make_mesh((2, 4), ("data", "tp"), axis_types=(kind,) * 2)


def split_loss(call, specs, x_spec):
    """(variables, x) -> the mean square of what a device computes, over devices; variables of the whole."""

    def shard(variables, x):
        mean = jnp.mean(call(variables, x) ** 2)
        return jax.lax.pmean(mean, tuple(sorted(compat.varying_axes(mean))))

    return jax.shard_map(shard, mesh=make_mesh(), in_specs=(specs, x_spec), out_specs=P())


def nnx_loss(x_spec):
    def loss(model, x):
        graphdef, state = nnx.split(model)
        call = lambda state, x: nnx.merge(graphdef, state)(x)  # noqa: E731
        return split_loss(call, nnx.get_partition_spec(state), x_spec)(state, x)

    return loss


def specs_of(model):
    return te.nnx.to_variables(nnx.merge(nnx.graphdef(model), nnx.get_partition_spec(nnx.state(model))))


def linen_layer(**options):
    return te.flax.TransformerLayer(8, 128, **options)


def nnx_layer(rngs, **options):
    return te.nnx.TransformerLayer(K, 8, 128, rngs=rngs, **options)


LAYER = {"num_kv_heads": 4, "sequence_parallel": True, "overlap": "overlapped"}
MODULES = {
    "layers": (
        lambda **k: te.flax.LayerStack(linen_layer(**LAYER, **k), 2),
        lambda rngs, **k: te.nnx.LayerStack(lambda rngs: nnx_layer(rngs, **LAYER, **k), 2, rngs=rngs),
        SPLIT,
    ),
    "mlp": (  # x on all devices: sums
        lambda **k: te.flax.LayerNormMLP(K, 128, "gelu", residual=True, norm="layernorm", **k),
        lambda rngs, **k: te.nnx.LayerNormMLP(
            K, 128, activation="gelu", residual=True, norm="layernorm", rngs=rngs, **k
        ),
        P("data"),
    ),
    "norm": (
        lambda **k: te.flax.LayerNormDense(64, sequence_parallel=True, **k),
        lambda rngs, **k: te.nnx.LayerNormDense(K, 64, sequence_parallel=True, rngs=rngs, **k),
        SPLIT,
    ),
    "row": (
        lambda **k: te.flax.Dense(64, parallel="row", sequence_parallel=True, **k),
        lambda rngs, **k: te.nnx.Dense(K, 64, parallel="row", sequence_parallel=True, rngs=rngs, **k),
        FEATURES,
    ),
}


def assert_same_sums(got, want):
    """Equal but for the order of sums (of bias gradients), which XLA chooses for each program."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    np.testing.assert_allclose(got, want, rtol=0, atol=2.0**-20 * np.abs(want).max())


@pytest.mark.parametrize("name", MODULES)
def test_loss_gradients_and_fp8_state_are_those_of_linen(name):
    make_linen, make_nnx, x_spec = MODULES[name]
    options = {"tensor_axis": "tp", "recipe": None if name == "norm" else RECIPE, "use_bias": True, "bias_init": BIAS}
    module, model = make_linen(**options), make_nnx(nnx.Rngs(0), **options)
    boxed = jax.jit(module.init)(jax.random.key(2), X)
    specs, variables = nn.get_partition_spec(boxed), nn.unbox(boxed)
    assert specs_of(model) == specs
    te.nnx.update(model, variables)  # the same paths, shapes and dtypes

    loss = split_loss(module.apply, specs, x_spec)
    want, want_grads = jax.jit(jax.value_and_grad(loss))(variables, X)
    got, grads = nnx.jit(te.nnx.value_and_grad(nnx_loss(x_spec)))(model, X)
    np.testing.assert_array_equal(got, want)
    jax.tree.map(assert_same_sums, nnx.to_pure_dict(grads), want_grads["params"])
    if options["recipe"] is not None:
        state = te.nnx.to_variables(model)[te.state.COLLECTION]
        assert_trees_identical(state, want_grads[te.state.COLLECTION])
        te.state.check(variables[te.state.COLLECTION], state)


def test_a_bias_behind_a_sum_counts_once():
    model = te.nnx.Dense(K, 48, parallel="row", tensor_axis="tp", bias_init=BIAS, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    specs = nnx.get_partition_spec(state)
    call = jax.shard_map(
        lambda state, x: nnx.merge(graphdef, state)(x),
        mesh=make_mesh(), in_specs=(specs, FEATURES), out_specs=P("data"),
    )  # fmt: skip
    x, kernel, bias = (np.asarray(a, np.float64) for a in (X, model.kernel.get_value(), model.bias.get_value()))
    np.testing.assert_allclose(call(state, X), x @ kernel + bias, rtol=1e-5, atol=1e-5)


def test_made_inside_of_shard_map():
    """Of a device's part, as linen's init makes it there."""
    shapes = {}

    def shard(x):
        model = te.nnx.Dense(K, 48, parallel="row", tensor_axis="tp", sequence_parallel=True, rngs=nnx.Rngs(0))
        mlp = te.nnx.LayerNormMLP(48, 128, tensor_axis="tp", sequence_parallel=True, rngs=nnx.Rngs(0))
        shapes.update(dense=model.kernel.shape, fc1=mlp.fc1.kernel.shape, fc2=mlp.fc2.kernel.shape)
        return mlp(model(x))

    y = jax.eval_shape(jax.shard_map(shard, mesh=make_mesh(), in_specs=FEATURES, out_specs=SPLIT), X)
    assert y.shape == (4, 32, 48)
    assert shapes == {"dense": (16, 48), "fc1": (48, 2, 32), "fc2": (32, 48)}


def test_nnx_grad_inside_of_shard_map_leaves_the_state_of_one_device():
    """The forward pass updates the state, with the amax of all devices; parameters step where they are."""
    make = MODULES["mlp"][1]
    options = {"tensor_axis": "tp", "recipe": RECIPE}
    model, want = make(nnx.Rngs(0), **options), make(nnx.Rngs(0), **options)
    nnx.grad(lambda model, x: (model(x) ** 2).mean())(want, X)
    graphdef, params, fp8 = nnx.split(model, nnx.Param, te.nnx.FP8State)

    def shard(params, fp8, x):
        model = nnx.merge(graphdef, params, fp8)
        grads = nnx.grad(lambda model, x: jax.lax.pmean((model(x) ** 2).mean(), "data"))(model, x)
        return grads, nnx.state(model, te.nnx.FP8State)

    specs = nnx.get_partition_spec(params)
    step = jax.shard_map(shard, mesh=make_mesh(), in_specs=(specs, P(), P("data")), out_specs=(specs, P()))
    grads, state = jax.jit(step)(params, fp8, X)
    assert jax.tree.map(jnp.shape, nnx.to_pure_dict(grads)) == jax.tree.map(jnp.shape, nnx.to_pure_dict(params))
    wanted = nnx.to_pure_dict(nnx.state(want, te.nnx.FP8State))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), nnx.to_pure_dict(state), wanted)


def test_a_chain_with_collectives():
    """Its sizes are a device's, in nnx as in linen."""

    def chain(first=LECUN, second=LECUN, bias=BIAS):
        up = ops.Linear(32, kernel_init=first, bias_init=bias)
        down = ops.Linear(K, kernel_init=second, bias_init=BIAS)
        return ops.RMSNorm(), ops.AllGather("tp"), up, ops.GELU(), down, ops.ReduceScatter("tp")

    def split(init, *names):
        return nnx.with_partitioning(init, names, eager_sharding=False)

    annotated = chain(split(LECUN, None, "tp"), split(LECUN, "tp", None), split(BIAS, "tp"))
    model = te.nnx.Sequential(annotated, K, recipe=RECIPE, rngs=nnx.Rngs(0))
    assert model.ops_2.kernel.shape == (K, 32)
    for scope, name, shape in (("ops_2", "kernel", (K, 128)), ("ops_2", "bias", (128,)), ("ops_4", "kernel", (128, K))):
        getattr(getattr(model, scope), name).set_value(jax.random.normal(jax.random.key(len(shape)), shape) / 8)
    variables, specs = te.nnx.to_variables(model), specs_of(model)
    loss = split_loss(te.Sequential(chain(), recipe=RECIPE).apply, specs, SPLIT)
    want, want_grads = jax.jit(jax.value_and_grad(loss))(variables, X)
    got, grads = nnx.jit(te.nnx.value_and_grad(nnx_loss(SPLIT)))(model, X)
    np.testing.assert_array_equal(got, want)
    assert_trees_identical(nnx.to_pure_dict(grads), want_grads["params"])
    assert_trees_identical(te.nnx.to_variables(model)[te.state.COLLECTION], want_grads[te.state.COLLECTION])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_parameters_are_made_split_where_a_mesh_is_set(kind):
    """As nnx's own are, and they are those that are made without one."""
    want = te.nnx.to_variables(nnx_layer(nnx.Rngs(0), tensor_axis="tp", sequence_parallel=True))["params"]
    with jax.set_mesh(make_mesh(kind)):
        model = nnx_layer(nnx.Rngs(0), tensor_axis="tp", sequence_parallel=True)
        got = te.nnx.to_variables(model)["params"]
        assert got["mlp"]["fc1"]["kernel"].sharding.spec == P(None, None, "tp")
        assert got["attn"]["proj"]["attn_proj"]["kernel"].sharding.spec == P("tp", None)
    assert_trees_identical(jax.device_get(got), jax.device_get(want))


def test_names_of_a_users_initialiser_stay():
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"), eager_sharding=False)
    model = te.nnx.Dense(K, 32, parallel="column", tensor_axis="tp", kernel_init=init, rngs=nnx.Rngs(0))
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(model)))
    assert specs == {"kernel": P("embed", "mlp"), "bias": P("tp")}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda **k: te.nnx.Dense(8, 8, tensor_axis="tp", **k), "Dense: parallel: expected 'column' or 'row'"),
        (lambda **k: te.nnx.LayerNormDense(8, 8, sequence_parallel=True, **k), "LayerNormDense: sequence_parallel"),
        (lambda **k: te.nnx.LayerNormMLP(8, 8, tensor_axis="tq", **k), "LayerNormMLP: tensor_axis: expected one of"),
    ],
)
def test_errors(make, message):
    with jax.set_mesh(make_mesh()), pytest.raises(ValueError, match=message):
        make(rngs=nnx.Rngs(0))


def test_parameters_of_the_whole_in_shard_map():
    """What in_specs were forgotten for; the error is that of linen."""
    graphdef, state = nnx.split(te.nnx.Dense(K, 48, parallel="row", tensor_axis="tp", rngs=nnx.Rngs(0)))

    def shard(state, x):
        return nnx.merge(graphdef, state)(x)

    mapped = jax.shard_map(shard, mesh=make_mesh(), in_specs=(P(), FEATURES), out_specs=P("data"))
    expected = r"Dense: params/kernel: expected shape \(16, 48\), .*got shape \(64, 48\), .*nnx.get_partition_spec"
    with pytest.raises(ValueError, match=expected):
        jax.eval_shape(mapped, state, X)
    specs = nnx.get_partition_spec(state)
    with pytest.raises(ValueError, match=r"Dense: x: expected \[\*lead, 16\], got \(2, 32, 64\)"):
        jax.eval_shape(
            jax.shard_map(shard, mesh=make_mesh(), in_specs=(specs, P("data")), out_specs=P("data")), state, X
        )
