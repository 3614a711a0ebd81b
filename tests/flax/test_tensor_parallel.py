"""Modules whose linears are split over devices, against the same on one device: values, gradients, FP8 state."""

import contextlib
import functools

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import te_jax as te
from te_jax.primitives.collective_schedule import arena_bytes
from te_jax.testing import hlo
from te_jax.testing.compare import assert_trees_identical

P = PartitionSpec
DATA, RANKS = 2, 4
X = (4, 32, 64)


def make_mesh(kind=AxisType.Auto):
    return jax.make_mesh((DATA, RANKS), ("data", "tp"), axis_types=(kind,) * 2)


def gradients(module, axes=()):
    """A function of variables, x and weights that gives (y, gradients of the sum of y * weights)."""

    def function(variables, x, weights):
        def loss(variables, x):
            y = module.apply(variables, x)
            total = jnp.sum(y * weights)
            return (jax.lax.psum(total, axes) if axes else total), y

        (_, y), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(variables, x)
        return y, grads

    return function


def assert_as_on_one_device(module, *, y_spec, x_spec, tolerance=2e-6):
    """The parameters' specs, by path."""
    x, weights = (jax.random.normal(jax.random.key(i), X) for i in range(2))
    boxed = jax.jit(module.init)(jax.random.key(2), x)
    specs, variables = nn.get_partition_spec(boxed), nn.unbox(boxed)
    weights = jax.random.normal(jax.random.key(1), jax.eval_shape(module.apply, variables, x).shape)
    axes = tuple(name for entry in y_spec if entry for name in (entry if isinstance(entry, tuple) else (entry,)))
    split = jax.shard_map(
        gradients(module, axes),
        mesh=make_mesh(),
        in_specs=(specs, x_spec, y_spec),
        out_specs=(y_spec, (specs, x_spec)),
    )
    got, want = jax.jit(split)(variables, x, weights), jax.jit(gradients(module))(variables, x, weights)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error <= tolerance, (jax.tree_util.keystr(path), error)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (leaf.shape, spec)
        for (path, leaf), spec in zip(
            jax.tree_util.tree_leaves_with_path(variables["params"]),
            jax.tree.leaves(specs["params"], is_leaf=lambda s: isinstance(s, P)),
            strict=True,
        )
    }


def assert_close(got, want, tolerance=2e-6):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error <= tolerance, (jax.tree_util.keystr(path), error)


def assert_whole_arrays_as_on_one_device(module, kind):
    """Without ``shard_map``, on a mesh of that kind, variables placed as their boxes say: gives the program's text."""
    x, weights = (jax.random.normal(jax.random.key(i), X) for i in range(2))
    boxed = jax.jit(module.init)(jax.random.key(2), x)
    specs, variables = nn.get_partition_spec(boxed), nn.unbox(boxed)
    mesh, split = make_mesh(kind), P("data", "tp")
    place = lambda tree, specs: jax.device_put(tree, jax.tree.map(lambda s: NamedSharding(mesh, s), specs))  # noqa: E731
    with jax.set_mesh(mesh):
        args = place(variables, specs), place(x, split), place(weights, split)
        compiled = jax.jit(gradients(module)).lower(*args).compile()
        got = compiled(*args)
    assert_close(got, jax.jit(gradients(module))(variables, x, weights))
    return compiled.as_text()


KINDS = (AxisType.Auto, AxisType.Explicit)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_transformer_layer_on_whole_arrays(kind):
    """All eight products with a collective overlap."""
    module = te.flax.TransformerLayer(
        8,
        128,
        num_kv_heads=4,
        recipe=te.DelayedScaling(amax_history_len=2),
        tensor_axis="tp",
        sequence_parallel=True,
        overlap="overlapped",
    )
    text = assert_whole_arrays_as_on_one_device(module, kind)
    assert hlo.count_custom_calls(text)["te_jax_collective_gemm"] == 8


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("recipe", [None, te.DelayedScaling(amax_history_len=2), te.BlockScaling()], ids=str)
def test_gated_mlp_on_whole_arrays(recipe, kind):
    """Nothing travels by itself where products overlap, which those of block scaling don't."""
    module = te.flax.LayerNormMLP(
        64,
        128,
        use_bias=True,
        bias_init=nn.initializers.normal(1.0),
        recipe=recipe,
        tensor_axis="tp",
        sequence_parallel=True,
        overlap="overlapped",
    )
    text = assert_whole_arrays_as_on_one_device(module, kind)
    if not isinstance(recipe, te.BlockScaling):
        assert set(hlo.count_collectives(text)) == {"all-reduce"}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_gated_mlp_on_whole_arrays_in_fp64(kind):
    """Against NumPy: gate and value are the halves that are kept."""
    module = te.flax.LayerNormMLP(64, 32, norm="layernorm", tensor_axis="tp", sequence_parallel=True)
    x = jax.random.normal(jax.random.key(0), X)
    variables = nn.unbox(jax.jit(module.init)(jax.random.key(2), x))
    with jax.set_mesh(make_mesh(kind)):
        y = jax.jit(module.apply)(variables, x)
    wide = np.asarray(x, np.float64)
    wide = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-6)
    fc1, fc2 = (np.asarray(variables["params"][name]["kernel"], np.float64) for name in ("fc1", "fc2"))
    gate, value = wide @ fc1[:, 0], wide @ fc1[:, 1]
    want = (gate / (1 + np.exp(-gate)) * value) @ fc2
    assert_close(y, want)


def test_kernels_in_fp8_on_whole_arrays():
    """Those of ``quantize_kernels`` say in which order they are; those for inference are refused."""
    module = te.flax.LayerNormMLP(64, 128, recipe=te.CurrentScaling(), tensor_axis="tp")
    x = jax.random.normal(jax.random.key(0), X)
    variables = nn.unbox(jax.jit(module.init)(jax.random.key(1), x))
    want = jax.jit(module.apply)(variables, x)
    kernels, fp8 = te.quantize_kernels(module, variables, x), te.quantize_params(module, variables, x)
    with jax.set_mesh(make_mesh()):
        made = jax.jit(lambda v: te.quantize_kernels(module, v, x))(variables)
        assert_close(jax.jit(module.apply)({**variables, **made}, x), want)
        with pytest.raises(ValueError, match=r"LayerNormMLP: fp8_kernels/.*_of_4_devices/.*: expected .*, got none"):
            jax.jit(module.apply)({**variables, **kernels}, x)
        with pytest.raises(
            ValueError, match=r"LayerNormMLP: fc1/kernel: expected one in high precision where the mesh"
        ):
            jax.jit(module.apply)(fp8, x)
    with pytest.raises(ValueError, match=r"LayerNormMLP: fp8_kernels/.*: expected .*, got none"):
        module.apply({**variables, **made}, x)


def test_transformer_layer():
    """Sequence parallelism, grouped queries, a gated activation, FP8 state; every product overlapped."""
    module = te.flax.TransformerLayer(
        8,
        128,
        num_kv_heads=4,
        use_bias=True,
        bias_init=nn.initializers.normal(1.0),
        recipe=te.DelayedScaling(amax_history_len=2),
        tensor_axis="tp",
        sequence_parallel=True,
        overlap="overlapped",
    )
    split = P("data", "tp")
    assert assert_as_on_one_device(module, x_spec=split, y_spec=split) == {
        "attn/proj/attn_proj/bias": ((64,), P(None)),
        "attn/proj/attn_proj/kernel": ((64, 64), P("tp", None)),
        "attn/qkv/attn_norm/scale": ((64,), P()),
        "attn/qkv/qkv_linear/bias": ((4, 4, 8), P("tp", None, None)),
        "attn/qkv/qkv_linear/kernel": ((64, 4, 4, 8), P(None, "tp", None, None)),
        "mlp/fc1/bias": ((2, 128), P(None, "tp")),
        "mlp/fc1/kernel": ((64, 2, 128), P(None, None, "tp")),
        "mlp/fc2/bias": ((64,), P(None)),
        "mlp/fc2/kernel": ((128, 64), P("tp", None)),
        "mlp/mlp_norm/scale": ((64,), P()),
    }


@pytest.mark.parametrize("activation", ["geglu", "gelu"])
def test_parameters_of_fused_projections_there_and_back(activation):
    """Stacked over layers, and an optimizer's state; the modules compute the same with them."""
    options = {"num_kv_heads": 2, "activation": activation, "use_bias": True}
    heads = {"num_heads": 4, "num_kv_heads": 2, "activation": activation}
    plain = te.flax.TransformerLayer(4, 48, bias_init=nn.initializers.normal(1.0), **options)
    split = te.flax.TransformerLayer(4, 48, tensor_axis="tp", **options)
    x = jax.random.normal(jax.random.key(0), (2, 6, 32))
    params = plain.init(jax.random.key(1), x)["params"]
    made = te.flax.split_projections(params, **heads)
    wanted = nn.unbox(jax.eval_shape(split.init, jax.random.key(1), x))["params"]
    assert jax.tree.map(lambda a: a.shape, made) == jax.tree.map(lambda a: a.shape, wanted)
    np.testing.assert_array_equal(split.apply({"params": made}, x), plain.apply({"params": params}, x))
    state = optax.adam(1e-3).init(jax.tree.map(lambda a: jnp.stack([a, 2 * a]), params))
    there = te.flax.split_projections(state, **heads)
    assert there[0].mu["attn"]["qkv"]["qkv_linear"]["kernel"].shape == (2, 32, 2, 4, 8)
    for tree, back in ((params, made), (state, there)):
        assert_trees_identical(te.flax.join_projections(back, **heads), tree)
    with pytest.raises(ValueError, match=r"attn/qkv/qkv_linear/bias: expected \[..., 2, 4, head_dim\]"):
        te.flax.join_projections(params, **heads)


@pytest.mark.parametrize("mesh", [False, True], ids=["one device", "mesh"])
def test_main_gradients_have_the_shapes_of_kept_parameters(mesh):
    module = te.flax.LayerNormMLP(32, 48, tensor_axis="tp", recipe=te.CurrentScaling())
    x = jax.random.normal(jax.random.key(0), (64, 32))
    variables = nn.unbox(module.init(jax.random.key(1), x))

    def loss(variables, batch):
        return jnp.mean(module.apply(variables, batch) ** 2)

    def gradients_of(main_grad):
        step = functools.partial(te.accumulate_gradients, loss, num_microbatches=4, main_grad=main_grad)
        return jax.jit(step)(variables, x)[1]

    want = gradients_of(False)
    with jax.set_mesh(make_mesh()) if mesh else contextlib.nullcontext():
        got = gradients_of(True)
    assert got["params"]["fc1"]["kernel"].shape == (32, 2, 48)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, want)


def test_mlp_with_x_on_all_devices():
    """Without sequence parallelism: an all-reduce behind fc2, and one of dx."""
    module = te.flax.LayerNormMLP(
        64, 128, "gelu", use_bias=True, residual=True, norm="layernorm", tensor_axis="tp", overlap="ring"
    )
    specs = assert_as_on_one_device(module, x_spec=P("data"), y_spec=P("data"))
    assert specs["fc1/kernel"] == ((64, 128), P(None, "tp"))
    assert specs["fc1/bias"] == ((128,), P("tp"))


@pytest.mark.parametrize(
    ("make", "x_spec", "y_spec"),
    [
        (lambda **k: te.flax.Dense(48, parallel="column", **k), P("data", "tp"), P("data", None, "tp")),
        (lambda **k: te.flax.Dense(48, parallel="row", **k), P("data", None, "tp"), P("data", "tp")),
        (lambda **k: te.flax.LayerNormDense(64, **k), P("data", "tp"), P("data", None, "tp")),
    ],
    ids=["column", "row", "norm"],
)
def test_dense(make, x_spec, y_spec):
    module = make(tensor_axis="tp", sequence_parallel=True, bias_init=nn.initializers.normal(1.0))
    assert_as_on_one_device(module, x_spec=x_spec, y_spec=y_spec)


def test_parameters_of_a_stack_and_of_an_init_on_a_mesh():
    """Of a stack no device has fewer layers. On a mesh fused projections are made split."""
    layer = te.flax.TransformerLayer(8, 48, tensor_axis="tp", sequence_parallel=True)
    x = jnp.ones((2, 8, 32))
    stack = te.flax.LayerStack(layer, 3)
    specs = nn.get_partition_spec(jax.eval_shape(stack.init, jax.random.key(0), x))["params"]["layers"]
    assert specs["mlp"]["fc1"]["kernel"] == P(None, None, None, "tp")
    assert specs["attn"]["proj"]["attn_proj"]["kernel"] == P(None, "tp", None)
    with jax.set_mesh(make_mesh()):
        kernel = nn.unbox(jax.jit(layer.init)(jax.random.key(0), x))["params"]["mlp"]["fc1"]["kernel"]
    assert kernel.sharding.spec == P(None, None, "tp")


def test_the_plan_of_a_layer():
    layer = te.flax.TransformerLayer(
        32,
        16384,
        head_dim=128,
        recipe=te.CurrentScaling(),
        dtype=jnp.bfloat16,
        tensor_axis="tp",
        sequence_parallel=True,
    )
    plans = []

    def shard(x):
        plans.extend(layer.plan(x, platform=platform) for platform in ("cpu", "cuda"))
        return x

    x = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
    program = jax.shard_map(shard, mesh=make_mesh(), in_specs=P("tp"), out_specs=P("tp"))
    jax.jit(program).trace(x)
    for name, plan in plans[0].items():
        assert plan == plans[1][name]
        assert "runs as the GEMM and the collective" not in str(plan)
        assert "arena" not in str(plan)
    arena = arena_bytes(RANKS, 2048 * 4096 * 2) >> 20  # a device's rows of sums in bfloat16
    assert f"axis 'tp' has an arena of {arena} MiB on each device" in str(plans[1]["mlp"])
    text = str(plans[0])
    for step in ("all-gather+linear", "linear+reduce-scatter", "dgrad+reduce-scatter, wgrad", "all-gather+dgrad"):
        assert text.count(f": {step}") == 2, (step, text)
    assert text.count("overlapped: copy, ") == 8
    assert text.count(": quantizes for the linear behind the gather, writes FP8 [te_jax_norm]") == 2


def test_a_wrapped_initialiser_keeps_its_names():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    module = te.flax.Dense(32, parallel="column", tensor_axis="tp", kernel_init=init)
    specs = nn.get_partition_spec(jax.eval_shape(module.init, jax.random.key(0), jnp.ones((16, 32))))
    assert specs["params"] == {"kernel": P("embed", "mlp"), "bias": P("tp")}


def in_shard_map(module, x=(16, 64)):
    def shard(x):
        return module.init_with_output(jax.random.key(0), x)[0]

    return jax.eval_shape(jax.shard_map(shard, mesh=make_mesh(), in_specs=P("tp"), out_specs=P("tp")), jnp.ones(x))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: te.flax.Dense(8, tensor_axis="tp").init(jax.random.key(0), jnp.ones((4, 4))),
            ValueError,
            r"Dense: parallel: expected 'column' or 'row' with a tensor_axis, None without, got None",
        ),
        (
            lambda: te.flax.Dense(8, sequence_parallel=True).init(jax.random.key(0), jnp.ones((4, 4))),
            ValueError,
            "Dense: sequence_parallel: expected False without a tensor_axis, got True",
        ),
        (
            lambda: te.flax.LayerNormMLP(4, 8, tensor_axis=1).init(jax.random.key(0), jnp.ones((4, 4))),
            TypeError,
            "LayerNormMLP: tensor_axis: expected None or the name of a mesh axis, got 1",
        ),
        (
            lambda: in_shard_map(te.flax.Dense(30, parallel="column", tensor_axis="tp")),
            ValueError,
            "Dense: features: expected a multiple of 4, the size of mesh axis 'tp', got 30",
        ),
        (
            lambda: in_shard_map(te.flax.LayerNormMLP(64, 30, tensor_axis="tp")),
            ValueError,
            "LayerNormMLP: hidden_features: expected a multiple of 4, the size of mesh axis 'tp', got 30",
        ),
        (
            lambda: in_shard_map(te.flax.MultiHeadAttention(4, 2, tensor_axis="tp")),
            ValueError,
            "MultiHeadAttention: num_kv_heads: expected a multiple of 4, the size of mesh axis 'tp', got 2",
        ),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def apply_in_shard_map(params, split=None, module=None):
    """An MLP with a gated activation on parameters of these shapes, of which a device has a part as ``split`` says."""
    module = module or te.flax.LayerNormMLP(64, 48, tensor_axis="tp")

    def shard(params, x):
        return module.apply({"params": params}, x)

    specs = (split or P(), P("data"))
    mapped = jax.shard_map(shard, mesh=make_mesh(), in_specs=specs, out_specs=P("data"), check_vma=False)
    return jax.eval_shape(mapped, params, jnp.ones(X))


def mlp_params(tensor_axis=None):
    module = te.flax.LayerNormMLP(64, 48, tensor_axis=tensor_axis)
    return nn.unbox(jax.eval_shape(module.init, jax.random.key(0), jnp.ones(X)))["params"]


PART = r"LayerNormMLP: params/fc1/kernel: expected shape \(64, 2, 12\), a device's part inside of shard_map over"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: apply_in_shard_map(mlp_params("tp")),
            PART + r" \('data', 'tp'\), got shape \(64, 2, 48\), of the whole: give shard_map in_specs that split it "
            r"\(nn.get_partition_spec of the boxed variables that init returns, nnx.get_partition_spec of a state\)",
        ),
        (
            lambda: apply_in_shard_map(mlp_params("tp"), {"mlp_norm": P(), "fc1": P("tp"), "fc2": P("tp")}),
            PART + r" .*, got shape \(16, 2, 48\), a part along another dimension: give shard_map other in_specs",
        ),
        (
            lambda: apply_in_shard_map(mlp_params(), {"mlp_norm": P(), "fc1": P(None, "tp"), "fc2": P("tp")}),
            PART + r" .*, got shape \(64, 24\), of a module without a tensor_axis: te.flax.split_projections makes",
        ),
        (
            lambda: te.flax.LayerNormMLP(64, 48, tensor_axis="tp").apply({"params": mlp_params()}, jnp.ones(X)),
            r"params/fc1/kernel: expected shape \(64, 2, 48\), got shape \(64, 96\), of a module without a tensor_axis",
        ),
        (
            lambda: te.flax.LayerNormMLP(64, 48).apply({"params": mlp_params("tp")}, jnp.ones(X)),
            r"expected shape \(64, 96\), got shape \(64, 2, 48\), .* with a tensor_axis: te.flax.join_projections",
        ),
    ],
    ids=["whole", "other dimension", "not split", "not split, one device", "not joined"],
)
def test_parameters_of_another_split(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_other_shapes_are_flaxs_error():
    module = te.flax.LayerNormMLP(64, 40, tensor_axis="tp")
    for call in (
        lambda: module.apply({"params": mlp_params("tp")}, jnp.ones(X)),
        lambda: apply_in_shard_map(mlp_params("tp"), module=module),
    ):
        with pytest.raises(flax.errors.ScopeParamShapeError, match="fc1"):
            call()
