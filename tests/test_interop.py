"""Parameters and FP8 scales of Flax and TransformerEngine in te_jax models, and parameters of te_jax in Flax models."""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_jax as te
from te_jax import ops
from te_jax.quant import state as fp8_state

ROWS, K, F = 32, 64, 96
X = jax.random.normal(jax.random.key(0), (ROWS, K))
OWG = "_overwrite_with_gradient"


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def next_scales(variables, recipe):
    """The scales that the next step reads, of two linears: x, kernel and dy of each."""
    formats = jnp.asarray([448.0, 448.0, 57344.0] * 2)
    (run,) = variables[OWG].values()
    return np.asarray(fp8_state.read(run, formats, recipe).scale)


def random_params(module, x, seed=1):
    """As ``init`` shapes them: float32, normal with deviation 0.1; compiles nothing."""
    random = np.random.default_rng(seed)
    shapes = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
    return jax.tree.map(lambda a: jnp.asarray(random.normal(0, 0.1, a.shape), a.dtype), shapes)


def used_scales(module, variables, x):
    """Name -> the scale that the next step quantizes with."""
    return {name: tensor.scale for name, tensor in next_report(module, variables, x).items()}


def next_report(module, variables, x):
    probe = te.health.instrument(module, variables, x)
    loss = lambda v, x: jnp.mean(module.apply(v, x).astype(jnp.float32) ** 2)  # noqa: E731
    return te.state.report(jax.jit(lambda v, x: te.health.measure(loss, v, x))({**variables, **probe}, x))


# -------------------------------------------------------------------------------------------------------- parameters


class FlaxMLP(nn.Module):
    """As te.flax.LayerNormMLP with a gate, of Flax's own modules."""

    dtype: object = None
    dot: object = None

    @nn.compact
    def __call__(self, x):
        options = {"use_bias": False, "dtype": self.dtype} | ({"dot_general_cls": self.dot} if self.dot else {})
        h = nn.RMSNorm(epsilon=1e-6, dtype=self.dtype, name="norm")(x)
        h = nn.silu(nn.Dense(F, name="gate", **options)(h)) * nn.Dense(F, name="up", **options)(h)
        return x + nn.Dense(K, name="down", **options)(h)


MLP_RULES = {"mlp_norm": "norm", "fc1": ("gate", "up"), "fc2": "down"}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_gated_mlp_there_and_back(dtype):
    theirs, ours = FlaxMLP(dtype), te.flax.LayerNormMLP(K, F, residual=True, dtype=dtype)
    x = X.astype(dtype)
    source = random_params(theirs, x)
    like = jax.eval_shape(ours.init, jax.random.key(0), x)["params"]
    params = te.interop.import_params(like, source, rules=MLP_RULES)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, like)
    got, want = ours.apply({"params": params}, x), theirs.apply({"params": source}, x)
    tolerance = 1e-5 if dtype == jnp.float32 else 0.03
    np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=tolerance, atol=tolerance)
    assert_same(te.interop.export_params(params, source, rules=MLP_RULES), source)


class FlaxBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.RMSNorm(epsilon=1e-6, name="norm")(x)
        query, key, value = (nn.DenseGeneral((2, 16), use_bias=True, name=n)(h) for n in ("query", "key", "value"))
        h = nn.DenseGeneral(32, axis=(-2, -1), name="out")(nn.dot_product_attention(query, key, value))
        return x + h


class FlaxStack(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in (9, 10):  # in the order of numbers, not of letters
            x = FlaxBlock(name=f"layer_{i}")(x)
        return nn.Dense(5, name="head")(x)


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        class Layer(te.flax.MultiHeadAttention):
            @nn.compact
            def __call__(self, x, _):
                return super().__call__(x), None

        scan = nn.scan(Layer, length=2, variable_axes={"params": 0}, split_rngs={"params": True})
        x, _ = scan(num_heads=2, norm="rmsnorm", use_bias=True, residual=True, name="layers")(x, None)
        return te.flax.Dense(5, name="head")(x)


def test_attention_of_stacked_layers_there_and_back():
    x = jax.random.normal(jax.random.key(0), (2, 8, 32))
    theirs, ours = FlaxStack(), Stack()
    source = random_params(theirs, x)
    rules = {
        "layers/qkv/attn_norm": "layer_*/norm",
        "layers/qkv/qkv_linear": tuple(f"layer_*/{name}" for name in ("query", "key", "value")),
        "layers/proj/attn_proj": "layer_*/out",
    }
    like = jax.eval_shape(ours.init, jax.random.key(0), x)["params"]
    params = te.interop.import_params(like, source, rules=rules)
    np.testing.assert_array_equal(params["layers"]["proj"]["attn_proj"]["bias"][1], source["layer_10"]["out"]["bias"])
    got, want = jax.jit(ours.apply)({"params": params}, x), jax.jit(theirs.apply)({"params": source}, x)
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)
    assert_same(te.interop.export_params(params, source, rules=rules), source)


def test_a_dense_general_has_the_same_parameters():
    theirs, ours = nn.DenseGeneral((4, 16)), te.flax.DenseGeneral((4, 16))
    source = random_params(theirs, X)
    params = te.interop.import_params(random_params(ours, X, seed=2), source)
    assert_same(params, source)
    np.testing.assert_allclose(
        ours.apply({"params": params}, X), theirs.apply({"params": source}, X), rtol=1e-5, atol=1e-5
    )


def test_an_exported_tree_trains_on_in_flax():
    """A trained FP8 model's parameters in a bf16 Flax model: what te_jax without a recipe gives."""
    fp8 = te.Sequential(
        [ops.Linear(F, name="Dense_0"), ops.GELU(), ops.Linear(K, name="Dense_1")], recipe=te.DelayedScaling()
    )

    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.gelu(nn.Dense(F, dtype=jnp.bfloat16)(x))
            return nn.Dense(K, dtype=jnp.bfloat16)(x)

    variables = fp8.init(jax.random.key(0), X)
    like = jax.eval_shape(Plain().init, jax.random.key(0), X)["params"]
    params = te.interop.export_params(variables["params"], like)
    want = te.Sequential(fp8.ops, dtype=jnp.bfloat16).apply({"params": variables["params"]}, X)
    got = Plain().apply({"params": params}, X)
    np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=0.02, atol=0.02)
    half = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16), like)
    assert all(
        leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(te.interop.export_params(params, half, cast=True))
    )


def test_errors_name_path_expected_and_got():
    like, source = random_params(te.flax.LayerNormMLP(K, F), X), random_params(FlaxMLP(), X)
    imports = te.interop.import_params
    with pytest.raises(
        ValueError, match=r"fc1/kernel: expected 'fc1/kernel' in the other tree.*got none; near: \['down/k"
    ):
        imports(like, source, rules={"mlp_norm": "norm"})
    with pytest.raises(ValueError, match=r"fc1/kernel: expected shape \[64, 192\], got \[64, 96\] at gate/kernel"):
        imports(like, source, rules=MLP_RULES | {"fc1": "gate"})
    with pytest.raises(
        ValueError,
        match=r"fc1/kernel: expected shape \[64, 192\], got \[96, 64\] at down/kernel and \[64, 96\] at up/k",
    ):
        imports(like, source, rules=MLP_RULES | {"fc1": ("down", "up")})
    extra = {**source, "ema": {"decay": jnp.ones(())}}
    with pytest.raises(ValueError, match=r"source: expected every parameter to be used.*ema/decay"):
        imports(like, extra, rules=MLP_RULES)
    assert_same(imports(like, extra, rules=MLP_RULES, ignore=["ema"]), imports(like, source, rules=MLP_RULES))
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), source)
    with pytest.raises(TypeError, match=r"expected dtype float32 \(or cast=True\), got bfloat16 of"):
        imports(like, half, rules=MLP_RULES)
    assert imports(like, half, rules=MLP_RULES, cast=True)["fc2"]["kernel"].dtype == jnp.float32
    fp8 = jax.tree.map(lambda a: a.astype(jnp.float8_e4m3fn), source)
    with pytest.raises(TypeError, match="FP8 needs its scale"):
        imports(like, fp8, rules=MLP_RULES, cast=True)
    with pytest.raises(TypeError, match="rules"):
        imports(like, source, rules={"fc1": 3})
    idle = MLP_RULES | {"fc": "up", "": "up"}  # "" is above every parameter, "fc" above none
    with pytest.raises(
        ValueError, match=r"rules: expected paths .*; they are fc1/kernel, .*, got 'fc', for which there"
    ):
        imports(like, source, rules=idle)
    with pytest.raises(ValueError, match=r"export_params: rules: expected paths .*, got 'fc', for which there is none"):
        te.interop.export_params(like, source, rules=idle)
    with pytest.raises(ValueError, match=r"like: expected parameters that the te_jax model has too.*ema/decay"):
        te.interop.export_params(imports(like, source, rules=MLP_RULES), extra, rules=MLP_RULES)


# ------------------------------------------------------------------------------------------------------ scales of Flax

FLAX_OPS = {"direct": nn.Fp8DirectDotGeneralOp, "qdq": nn.Fp8DotGeneralOp, "nanoo": nn.NANOOFp8DotGeneralOp}
FACTORS = (1.0, 8.0, 2.0, 0.5, 4.0)
FLAX_NAMES = {"x": "input", "kernel": "kernel", "dy": "output_grad"}


class FlaxFp8(nn.Module):
    dot: object

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(F, dot_general_cls=self.dot, name="up")(x))
        return nn.Dense(K, dot_general_cls=self.dot, name="down")(x)


def ours(recipe, names=("up", "down")):
    return te.Sequential([ops.Linear(F, name=names[0]), ops.ReLU(), ops.Linear(K, name=names[1])], recipe=recipe)


@functools.cache
def trained_in_flax(dot, factors):
    """Variables after one step for each of X times a factor, and the scales that the step after them uses."""
    model = FlaxFp8(dot)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        variables = model.init(jax.random.key(1), X)
        grad = jax.jit(jax.grad(lambda v, x: jnp.mean(model.apply(v, x) ** 2)))
        for factor in factors:
            grads = grad(variables, factor * X)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads["params"])
            variables = {"params": params, OWG: grads[OWG]}
        following = grad(variables, X)[OWG]
    return variables, following


@pytest.mark.parametrize("dot", FLAX_OPS)
def test_scales_of_flax(dot):
    variables, following = trained_in_flax(FLAX_OPS[dot], FACTORS)
    want = []
    for linear in ("up", "down"):
        (metas,) = following[linear].values()
        for role, name in FLAX_NAMES.items():
            factor = 448 / 240 if dot == "nanoo" and role != "dy" else 1.0  # e4m3fnuz ends at 240
            want.append(factor / metas[f"{name}_scale"][0])
    for length in (1024, 3):
        recipe = te.DelayedScaling(amax_history_len=length)
        imported = te.interop.import_variables(ours(recipe), variables, X)
        assert_same(imported["params"], variables["params"])
        np.testing.assert_allclose(next_scales(imported, recipe), want, rtol=3e-7)
    if dot == "direct":  # and that is what a step uses, after which the state goes on as te_jax's own
        module = ours(recipe)
        np.testing.assert_allclose(list(used_scales(module, imported, X).values()), want, rtol=3e-7)
        grads = jax.jit(jax.grad(lambda v: jnp.mean(module.apply(v, X) ** 2)))(imported)
        te.state.check(te.state.split(imported)[1], te.state.split(grads)[1])


def test_scales_go_to_linears_and_what_else_is_quantized_starts_anew():
    """A Quantize, experts and a kernel that two linears share beside linears that Flax has scales of."""
    variables, _ = trained_in_flax(nn.Fp8DirectDotGeneralOp, FACTORS)
    recipe = te.DelayedScaling(amax_history_len=8)
    down = ops.Linear(K, name="down")
    up = ops.Linear(F, name="up")
    experts = ops.GroupedLinear(2, K, use_bias=False, name="experts")
    module = te.Sequential([ops.Quantize(True, True), up, ops.GELU(), down, experts, up], recipe=recipe)
    kernel = jnp.zeros((2, K, K))
    source = {**variables, "params": {**variables["params"], "experts": {"kernel": kernel}}}
    with pytest.warns(
        UserWarning, match=r"none of \['ops_0/x', 'ops_0/dy', 'fp8_4_experts_grouped'\], which start anew"
    ):
        imported = te.interop.import_variables(module, source, X, jnp.asarray([20, 12]))
    assert_same(imported["params"], source["params"])
    grouped = imported[OWG]["fp8_4_experts_grouped"]
    assert grouped["uses"].shape == (2, 3, 66)
    assert not any(leaf.any() for leaf in grouped.values())
    scales = fp8_state.read(
        imported[OWG]["fp8_0_ops_0_x_dy_up_down_up"], jnp.asarray([448, 57344] + [448, 448, 57344] * 3), recipe
    ).scale
    plain = te.interop.import_variables(ours(recipe), variables, X)
    want = next_scales(plain, recipe)
    np.testing.assert_array_equal(scales, [0, 0, *want, *want[:3]])


def test_the_history_of_flax_in_its_order():
    variables, _ = trained_in_flax(nn.Fp8DirectDotGeneralOp, FACTORS)
    imported = te.interop.import_variables(ours(te.DelayedScaling(amax_history_len=6)), variables, X)
    history = np.asarray(imported[OWG]["fp8_0_up_down"]["amax_history"][0]) * 2.0**64
    amaxes = [np.abs(factor * X).max() for factor in FACTORS]
    np.testing.assert_array_equal(history, [*reversed(amaxes), 0])
    short = te.interop.import_variables(ours(te.DelayedScaling(amax_history_len=2)), variables, X)
    history = np.asarray(short[OWG]["fp8_0_up_down"]["amax_history"][0]) * 2.0**64
    np.testing.assert_array_equal(history, [amaxes[4], amaxes[1]])  # the newest, and the largest of the others


def test_a_flax_model_that_has_not_run_keeps_its_scales_of_one():
    variables = FlaxFp8(nn.Fp8DirectDotGeneralOp).init(jax.random.key(1), X)
    recipe = te.DelayedScaling()
    assert set(next_scales(te.interop.import_variables(ours(recipe), variables, X), recipe)) == {1.0}


def test_what_is_several_linears_in_flax():
    recipe = te.DelayedScaling(amax_history_len=8)
    module = te.flax.LayerNormMLP(K, F, residual=True, recipe=recipe)
    model = FlaxMLP(dot=nn.Fp8DirectDotGeneralOp)
    variables = model.init(jax.random.key(1), X)
    variables["params"]["up"]["kernel"] *= 3.0
    grad = jax.jit(jax.grad(lambda v: jnp.mean(model.apply(v, X) ** 2)))
    variables = {"params": variables["params"], OWG: grad(variables)[OWG]}
    following = grad(variables)[OWG]
    imported = te.interop.import_variables(module, variables, X, rules=MLP_RULES)
    scales = next_scales(imported, recipe)[:3]  # of fc1
    for scale, name in zip(scales, FLAX_NAMES.values(), strict=True):
        divisors = [next(iter(following[linear].values()))[f"{name}_scale"][0] for linear in ("gate", "up")]
        np.testing.assert_allclose(scale, 1 / max(divisors), rtol=3e-7)


# ------------------------------------------------------------------------------------- scales of TransformerEngine, JAX


def transformer_engine_step(metas, amax, fp8_max, margin, algorithm):
    """What a step leaves behind: the newest amax goes to slot 0, the scale comes of all slots, slot 0 is emptied."""
    history = metas["amax_history"].copy()
    history[0] = amax
    used = history.max() if algorithm == "max" else history[0]
    scale = metas["scale"] if used == 0 else np.float32(np.float32(fp8_max) / used) / np.float32(2.0**margin)
    history = np.roll(history, -1)
    history[0] = 0
    return {"amax_history": history, "scale": np.full(1, scale, np.float32)}


def transformer_engine(steps, length=4, margin=0, algorithm="max"):
    """Variables of its LayerNormMLP (without a gate), with metas after ``steps`` steps of random amaxes."""
    random = np.random.default_rng(0)
    params = {
        "scale": random.normal(size=K), "ln_bias": random.normal(size=K),
        "wi_kernel": random.normal(size=(K, 1, F)), "wi_bias": random.normal(size=(1, F)),
        "wo_kernel": random.normal(size=(F, K)), "wo_bias": random.normal(size=K),
    }  # fmt: skip
    metas = {}
    for postfix in ("_0", "_1"):
        for tensor in ("x", "kernel", "grad"):
            meta = {"scale": np.ones(1, np.float32), "amax_history": np.zeros(length, np.float32)}
            for _ in range(steps):
                amax = np.float32(2.0 ** random.uniform(-8, 8))
                meta = transformer_engine_step(meta, amax, 57344 if tensor == "grad" else 448, margin, algorithm)
            metas |= {f"{tensor}{postfix}_{name}": value for name, value in meta.items()}
    params = {name: np.float32(value) for name, value in params.items()}
    return {"params": {"mlp": params}, "fp8_metas": {"mlp": metas}}


TE_RULES = {
    "mlp_norm/scale": "mlp/scale", "mlp_norm/bias": "mlp/ln_bias",
    "fc1/kernel": "mlp/wi_kernel", "fc1/bias": "mlp/wi_bias", "fc2/kernel": "mlp/wo_kernel", "fc2/bias": "mlp/wo_bias",
}  # fmt: skip


@pytest.mark.parametrize("length", [1024, 4, 2])
@pytest.mark.parametrize(
    "steps, margin, algorithm", [(0, 0, "max"), (2, 0, "max"), (9, 1, "max"), (9, 0, "most_recent")]
)
def test_scales_of_transformer_engine(steps, margin, algorithm, length):
    source = transformer_engine(steps, margin=margin, algorithm=algorithm)
    recipe = te.DelayedScaling(amax_history_len=length, margin=margin, amax_compute_algo=algorithm)
    module = te.flax.LayerNormMLP(K, F, activation="relu", norm="layernorm", use_bias=True, recipe=recipe)
    imported = te.interop.import_variables(module, source, X, rules=TE_RULES)
    np.testing.assert_array_equal(imported["params"]["fc1"]["kernel"], source["params"]["mlp"]["wi_kernel"][:, 0])
    metas = source["fp8_metas"]["mlp"]
    scales = next_scales(imported, recipe)
    names = [f"{tensor}{postfix}_scale" for postfix in ("_0", "_1") for tensor in ("x", "kernel", "grad")]
    np.testing.assert_array_equal(scales, [metas[name][0] for name in names])


def test_a_recipe_that_would_give_other_scales_is_refused():
    source = transformer_engine(9, margin=1)
    module = te.flax.LayerNormMLP(
        K,
        F,
        activation="relu",
        norm="layernorm",
        use_bias=True,
        recipe=te.DelayedScaling(amax_compute_algo="most_recent"),
    )
    with pytest.raises(ValueError, match=r"fp8_\d: expected the scale .* of the history, got .* another margin"):
        te.interop.import_variables(module, source, X, rules=TE_RULES)


def test_state_that_is_new_or_dropped_is_said():
    source = transformer_engine(3)
    options = {"activation": "relu", "norm": "layernorm", "use_bias": True}
    with pytest.warns(UserWarning, match=r"a recipe that keeps state.*dropped"):
        out = te.interop.import_variables(te.flax.LayerNormMLP(K, F, **options), source, X, rules=TE_RULES)
    assert set(out) == {"params"}
    module = te.flax.LayerNormMLP(K, F, recipe=te.DelayedScaling(), **options)
    with pytest.warns(UserWarning, match=r"FP8 scales of every linear, got none of \['fc1/x'.*start anew"):
        out = te.interop.import_variables(module, {"params": source["params"]}, X, rules=TE_RULES)
    assert_same(out[OWG], module.init(jax.random.key(0), X)[OWG])
    del source["fp8_metas"]["mlp"]["x_1_scale"]
    with pytest.warns(UserWarning, match=r"none of \['fc2/x'\], which start anew"):
        out = te.interop.import_variables(module, source, X, rules=TE_RULES)
    report = next_report(module, out, X)
    assert report["fc1/x"].scale == source["fp8_metas"]["mlp"]["x_0_scale"][0]
    np.testing.assert_allclose(report["fc2/x"].utilization, 1, rtol=1e-6)  # from the tensor itself
