"""Kernels kept in FP8 for inference: half the memory, the same outputs, and their way through checkpoints."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
from te_jax import ops

RECIPES = {"delayed": te.DelayedScaling(amax_history_len=4), "current": te.CurrentScaling(), "block": te.BlockScaling()}
BF16 = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}


class Layer(te.flax.LayerNormMLP):
    @nn.compact
    def __call__(self, x, _):
        return super().__call__(x), None


class Model(nn.Module):
    """Two stacked layers, a DenseGeneral and a linear that isn't quantized."""

    recipe: te.Recipe | None

    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, te.state.COLLECTION: 0}
        layers = nn.scan(nn.remat(Layer), length=2, variable_axes=axes, split_rngs={"params": True})
        x, _ = layers(64, 128, residual=True, recipe=self.recipe, name="layers", **BF16)(x, None)
        x = te.flax.DenseGeneral((4, 16), recipe=self.recipe, name="general", **BF16)(x)
        return te.flax.Dense(7, recipe=self.recipe, name="odd", **BF16)(x)


@functools.cache
def made(recipe):
    """(model, variables, quantized variables, x)."""
    model = Model(RECIPES.get(recipe))
    x = jax.random.normal(jax.random.key(0), (2, 16, 64), jnp.bfloat16)
    variables = jax.jit(model.init)(jax.random.key(1), x)
    if recipe == "delayed":  # scales of another step
        variables = jax.tree.map(lambda a: a, variables)
        grads = jax.jit(jax.grad(lambda v: jnp.sum(model.apply(v, 1.5 * x).astype(jnp.float32) ** 2)))(variables)
        variables = te.state.merge(te.state.split(variables)[0], te.state.split(grads)[1])
    return model, variables, te.quantize_params(model, variables, jax.ShapeDtypeStruct(x.shape, x.dtype)), x


def kernels(params):
    """Path -> kernel or FP8 kernel."""
    is_kernel = lambda path: path[-1] == "kernel"  # noqa: E731
    flat = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: isinstance(x, dict) and "data_t" in x)
    named = {tuple(key.key for key in path): leaf for path, leaf in flat}
    return {path: leaf for path, leaf in named.items() if is_kernel(path)}


def size(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("recipe", RECIPES)
def test_outputs_are_the_same_bits(recipe):
    model, variables, quantized, x = made(recipe)
    assert_same(jax.jit(model.apply)(quantized, x), jax.jit(model.apply)(variables, x))
    assert set(quantized) == set(variables)


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_memory_is_half_of_bfloat16(recipe):
    _, variables, quantized, _ = made(recipe)
    before, after = kernels(variables["params"]), kernels(quantized["params"])
    assert set(before) == set(after)
    in_fp8 = [path for path in after if path != ("odd", "kernel")]
    assert len(in_fp8) == 3
    assert after[("odd", "kernel")].dtype == jnp.bfloat16
    for path in in_fp8:
        count = before[path].size
        assert size(before[path]) == 2 * count
        blocks = count // (64 * 64)  # at least 64x64 elements share a scale here
        assert count < size(after[path]) <= count + 4 * max(2, blocks)
    assert size(quantized["params"]) < 0.53 * size(variables["params"])


def test_values_against_numpy():
    _, variables, quantized, _ = made("current")
    kernel, fp8 = (tree["params"]["layers"]["fc1"]["kernel"] for tree in (variables, quantized))
    for layer in range(2):
        scale = np.float32(448) / np.abs(np.asarray(kernel[layer], np.float32)).max()
        data = (np.asarray(kernel[layer], np.float32) * scale).astype(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(np.asarray(fp8["data_t"][layer].T, np.float32), data.astype(np.float32))
        np.testing.assert_allclose(fp8["scale_inv"][layer], 1 / scale, rtol=1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_dequantized_they_are_within_half_a_step(recipe):
    _, variables, quantized, _ = made(recipe)
    params = te.dequantize_params(quantized["params"], variables["params"])
    assert jax.tree.map(lambda a: (a.dtype, a.shape), params) == jax.tree.map(
        lambda a: (a.dtype, a.shape), variables["params"]
    )
    for path, got in kernels(params).items():
        want = np.asarray(kernels(variables["params"])[path], np.float64)
        error = np.abs(np.asarray(got, np.float64) - want)
        step = np.maximum(np.abs(want) / 16, np.abs(want).max() * 2.0**-16)  # half a step, and bfloat16's rounding
        assert (error <= step * 1.1).all() or recipe == "delayed", path
        assert error.max() <= 0.07 * np.abs(want).max()


def test_through_orbax_and_checkpoints_into_fp8_and_bf16_models(tmp_path):
    model, variables, quantized, x = made("current")
    with ocp.StandardCheckpointer() as plain:  # plain orbax, nothing of ours
        plain.save(tmp_path / "plain", quantized)
        plain.wait_until_finished()
        assert_same(plain.restore(tmp_path / "plain", quantized), quantized)

    te.checkpoint.save(tmp_path / "run", 3, quantized, recipe=model.recipe)
    abstract = jax.eval_shape(lambda: te.quantize_params(model, variables, x))
    back = te.checkpoint.restore(tmp_path / "run", abstract, recipe=model.recipe).variables
    assert_same(back, quantized)
    assert_same(te.checkpoint.restore_params(tmp_path / "run", abstract["params"]), quantized["params"])

    bf16 = Model(None)
    like = jax.eval_shape(bf16.init, jax.random.key(0), x)["params"]
    with pytest.raises(ValueError, match=r"params/general/kernel: expected bfloat16.*dequantize=True.*FP8"):
        te.checkpoint.restore_params(tmp_path / "run", like)
    params = te.checkpoint.restore_params(tmp_path / "run", like, dequantize=True)
    assert_same(params, te.dequantize_params(quantized["params"], like))
    got, want = bf16.apply({"params": params}, x), bf16.apply({"params": variables["params"]}, x)
    assert np.linalg.norm(np.float32(got - want)) < 0.1 * np.linalg.norm(np.float32(want))

    # A checkpoint of parameters that are not quantized gives them to a model of any recipe, and no cast.
    te.checkpoint.save(tmp_path / "bf16", 0, variables, recipe=model.recipe)
    assert_same(te.checkpoint.restore_params(tmp_path / "bf16", like), variables["params"])
    with pytest.raises(ValueError, match=r"^te_jax.checkpoint.restore_params: params/.*float32"):
        te.checkpoint.restore_params(
            tmp_path / "bf16", jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), like)
        )
    with pytest.raises(FileNotFoundError, match="restore_params: directory"):
        te.checkpoint.restore_params(tmp_path / "none", like)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_experts(recipe, tmp_path):
    """A scale for each; the same outputs, half the memory, and back by a checkpoint. No gradient goes through."""
    chain = [ops.GroupedLinear(2, 64), ops.SwiGLU(), ops.GroupedLinear(2, 64)]
    module = te.Sequential(chain, recipe=RECIPES[recipe], **BF16)
    x, sizes = jax.random.normal(jax.random.key(0), (37, 64), jnp.bfloat16), jnp.asarray([20, 12])
    variables = module.init(jax.random.key(1), x, sizes, sizes)
    loss = lambda v, x: jnp.sum(module.apply(v, x, sizes, sizes).astype(jnp.float32) ** 2)  # noqa: E731
    if recipe == "delayed":
        grads = jax.jit(jax.grad(loss))(variables, 1.5 * x)
        variables = te.state.merge(te.state.split(variables)[0], te.state.split(grads)[1])
    quantized = te.quantize_params(module, variables, x, sizes, sizes)
    apply = jax.jit(module.apply)
    assert_same(apply(quantized, x, sizes, sizes), apply(variables, x, sizes, sizes))
    restored = te.dequantize_params(quantized["params"], variables["params"])
    for name in ("ops_0", "ops_2"):
        kernel, fp8 = (np.asarray(p[name]["kernel"], np.float64) for p in (variables["params"], restored))
        one = quantized["params"][name]["kernel"]
        assert (one["data_t"].shape, one["scale_inv"].shape) == ((2, *kernel.shape[:0:-1]), (2,))
        np.testing.assert_allclose(1 / one["scale_inv"], 448 / np.abs(kernel).max((1, 2)), rtol=1e-6)
        steps = np.maximum(np.abs(kernel) / 16, np.abs(kernel).max((1, 2), keepdims=True) * 2.0**-16)
        assert (np.abs(fp8 - kernel) <= 1.1 * steps).all()  # half a step, and bfloat16's rounding
    te.checkpoint.save(tmp_path, 0, quantized, recipe=module.recipe)
    back = te.checkpoint.restore_params(tmp_path, jax.eval_shape(lambda: quantized["params"]))
    assert_same(back, quantized["params"])
    back = te.checkpoint.restore_params(tmp_path, variables["params"], dequantize=True)
    assert_same(back, restored)
    with pytest.raises(ValueError, match=r"GroupedLinear\(ops_0\): kernel: expected a kernel that gradients can go"):
        jax.grad(lambda x: loss(quantized, x))(x)


def test_experts_in_block_scaling_keep_their_kernels():
    grouped = ops.GroupedLinear(2, 64, use_bias=False)
    module = te.Sequential([ops.Linear(64), grouped], recipe=RECIPES["block"], **BF16)
    x, sizes = jnp.ones((32, 64), jnp.bfloat16), jnp.asarray([20, 12])
    variables = module.init(jax.random.key(1), x, sizes)
    params = te.quantize_params(module, variables, x, sizes)["params"]
    assert set(params["ops_0"]["kernel"]) == {"data_t", "scale_inv_t"}
    assert_same(params["ops_1"], variables["params"]["ops_1"])
    alone = te.Sequential([grouped], recipe=RECIPES["block"], **BF16)
    with pytest.raises(ValueError, match="not all of them grouped in block scaling"):
        te.quantize_params(alone, alone.init(jax.random.key(1), x, sizes), x, sizes)


def test_on_a_mesh(tmp_path):
    module = te.flax.LayerNormMLP(64, 128, recipe=te.CurrentScaling(), **BF16)
    x = jax.random.normal(jax.random.key(0), (32, 64), jnp.bfloat16)
    variables = module.init(jax.random.key(1), x)
    want = jax.jit(module.apply)(variables, x)
    mesh = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"fc1": P(None, "model"), "fc2": P("model", None)}
    place = lambda path, a: jax.device_put(a, NamedSharding(mesh, specs.get(path[1].key, P())))  # noqa: E731
    sharded = jax.tree_util.tree_map_with_path(place, variables)
    with jax.set_mesh(mesh):
        quantized = te.quantize_params(module, sharded, x)
        got = jax.jit(module.apply)(quantized, x)
    assert_same(
        jax.device_get(quantized["params"]["fc1"]),
        jax.device_get(te.quantize_params(module, variables, x)["params"]["fc1"]),
    )
    np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=0.02, atol=0.02)

    te.checkpoint.save(tmp_path, 0, quantized, recipe=module.recipe)
    params = te.checkpoint.restore_params(tmp_path, sharded["params"], dequantize=True)
    assert params["fc1"]["kernel"].sharding.is_equivalent_to(sharded["params"]["fc1"]["kernel"].sharding, 2)


def test_errors():
    model, variables, quantized, x = made("current")
    with pytest.raises(ValueError, match=r"expected a kernel that gradients can go through.*FP8 for inference"):
        jax.grad(lambda x: jnp.sum(model.apply(quantized, x)).astype(jnp.float32))(x)
    with pytest.raises(ValueError, match=r"kernel in FP8: expected a linear that runs in FP8.*recipe None"):
        Model(None).apply(quantized, x)
    with pytest.raises(ValueError, match=r"kernel in FP8: expected .*scale_inv_t"):
        Model(te.BlockScaling()).apply(quantized, x)
    with pytest.raises(ValueError, match="tokens: 3 is not a multiple of 16"):
        te.flax.Dense(64, recipe=te.CurrentScaling(), **BF16).apply(
            te.quantize_params(te.flax.Dense(64, recipe=te.CurrentScaling(), **BF16), dense(), x), x[0, :3]
        )
    with pytest.raises(ValueError, match="kernel: expected one in high precision, got one in FP8"):
        te.quantize_kernels(model, quantized, x)
    with pytest.raises(ValueError, match="linears that are quantized"):
        te.quantize_params(Model(None), variables, x)
    with pytest.raises(ValueError, match="variables: expected kernels in high precision, got kernels in FP8 already"):
        te.quantize_params(model, quantized, x)
    shared = ops.Linear(64, use_bias=False)
    twice = te.Sequential([shared, ops.ReLU(), shared], recipe=RECIPES["delayed"])
    with pytest.raises(ValueError, match="linears that share a kernel"):
        te.quantize_params(twice, twice.init(jax.random.key(0), x), x)
    with pytest.raises(ValueError, match="a module that says its dtype"):
        te.quantize_params(te.flax.Dense(64, recipe=te.CurrentScaling()), dense(), x)
    lost = {"kernel": {"data_t": jnp.zeros((64, 64), jnp.float8_e4m3fn)}}
    with pytest.raises(ValueError, match="kernel: expected data_t and one of"):
        te.dequantize_params(lost, {"kernel": jnp.zeros((64, 64))})
    with pytest.raises(ValueError, match=r"dequantize_params: params: expected \['bias', 'kernel'\]"):
        te.dequantize_params(lost, {"kernel": jnp.zeros((64, 64)), "bias": jnp.zeros(64)})


def dense():
    return {"params": {"kernel": jnp.ones((64, 64), jnp.bfloat16), "bias": jnp.ones((64,), jnp.bfloat16)}}
