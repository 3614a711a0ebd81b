"""LayerNormMLP, MultiHeadAttention and TransformerLayer: values, gradients, causality, scan and remat."""

import operator

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_jax as te
from te_jax.testing import modules as references

KEY = jax.random.key(11)
SCAN_AXES = {"params": 0, te.state.COLLECTION: 0}


def init(module, *args):
    return jax.jit(module.init)(KEY, *args)  # jitted: faster than compiling every small operation by itself


def random(*shape):
    return jax.random.normal(jax.random.key(sum(shape)), shape)


def assert_close(got, want, rtol=2e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max()), got, want)


@pytest.mark.parametrize(
    ("activation", "residual"), [("relu", False), ("silu", True), ("gelu", False), ("swiglu", True), ("geglu", False)]
)
def test_mlp(activation, residual):
    x = random(2, 5, 24)
    module = te.flax.LayerNormMLP(24, 32, activation=activation, residual=residual, use_bias=True, norm="layernorm")
    params = init(module, x)["params"]
    assert set(params) == {"mlp_norm", "fc1", "fc2"}

    def want(params, x):
        return references.mlp(params, x, activation) + (x if residual else 0)

    assert_close(jax.jit(module.apply)({"params": params}, x), want(params, x))
    cotangent = random(2, 5, 24)
    got_grads = jax.jit(jax.grad(lambda p, x: (module.apply({"params": p}, x) * cotangent).sum(), (0, 1)))(params, x)
    want_grads = jax.jit(jax.grad(lambda p, x: (want(p, x) * cotangent).sum(), (0, 1)))(params, x)
    assert_close(got_grads, want_grads, rtol=1e-4)


@pytest.mark.parametrize(
    ("kv_heads", "causal", "rope"), [(4, True, True), (2, True, False), (2, False, True), (1, False, False)]
)
def test_attention(kv_heads, causal, rope):
    x = random(2, 6, 32)
    module = te.flax.MultiHeadAttention(4, kv_heads, causal=causal, rope=rope, norm="rmsnorm", use_bias=True)
    variables = init(module, x)
    want = [references.attention(variables["params"], row, 4, kv_heads, 8, causal=causal, rope=rope) for row in x]
    assert_close(jax.jit(module.apply)(variables, x), jnp.stack(want), rtol=1e-4)
    assert_close(jax.jit(module.apply)(variables, x[0]), want[0], rtol=1e-4)  # [T, C]


@pytest.mark.parametrize(
    ("dtype", "asked", "said"),
    [
        (jnp.bfloat16, None, "attention: cuDNN flash attention"),
        (jnp.float32, None, "attention: XLA: dtype float32 is not bfloat16 or float16"),
        (jnp.bfloat16, "xla", "attention: XLA: attention_implementation='xla'"),
    ],
)
def test_attention_plan_is_what_is_lowered(dtype, asked, said):
    x = random(2, 8, 32)
    module = te.flax.MultiHeadAttention(4, dtype=dtype, attention_implementation=asked)
    assert module.attention_plan(x) == said
    traced = jax.jit(module.apply).trace(init(module, x), x)
    for platform, wanted in (("cuda", "cuDNN" in said), ("cpu", False)):
        assert ("__cudnn$fmha" in traced.lower(lowering_platforms=(platform,)).as_text()) == wanted
    assert module.attention_plan(x, platform="cpu").startswith("attention: XLA: ")


def test_attention_in_bfloat16_is_that_in_float32():
    """The two ways to attention on a CPU: te_jax's reference, which cuDNN replaces, and jax's."""
    x = random(2, 8, 32)
    module = te.flax.MultiHeadAttention(4, 2, causal=True, rope=True, dtype=jnp.bfloat16)
    variables = init(module, x)
    wide = module.clone(dtype=jnp.float32)

    def loss(variables, module):
        return (module.apply(variables, x).astype(jnp.float32) ** 2).sum()

    got, want = (jax.jit(jax.value_and_grad(loss), static_argnums=1)(variables, m) for m in (module, wide))
    assert_close(got, want, rtol=0.05)


def test_attention_without_norm_and_with_head_dim():
    x = random(1, 6, 20)
    module = te.flax.MultiHeadAttention(3, head_dim=16, residual=True)
    variables = init(module, x)
    assert set(variables["params"]["qkv"]) == {"qkv_linear"}

    def want(params, x):
        return x[0] + references.attention(params, x[0], 3, 3, 16, causal=False, rope=False)

    assert_close(jax.jit(module.apply)(variables, x)[0], want(variables["params"], x), rtol=1e-4)
    cotangent = random(6, 20)
    got = jax.jit(jax.grad(lambda p, x: (module.apply({"params": p}, x)[0] * cotangent).sum(), (0, 1)))
    grads = jax.jit(jax.grad(lambda p, x: (want(p, x) * cotangent).sum(), (0, 1)))(variables["params"], x)
    assert_close(got(variables["params"], x), grads, rtol=1e-4)


def test_rotary_depends_on_distance_only():
    q, k = random(1, 1, 16), random(1, 1, 16) + 1

    def score(i, j):
        at = lambda x, p: te.flax.apply_rotary(x, jnp.asarray([p]))[0, 0]  # noqa: E731
        return at(q, i) @ at(k, j)

    np.testing.assert_allclose(score(3, 1), score(103, 101), rtol=1e-4)
    assert abs(score(3, 1) - score(3, 2)) > 1e-3


def test_positions_shift():
    """Rotary attention sees relative positions: shifting them all changes nothing, spreading them does."""
    x = random(2, 6, 32)
    module = te.flax.MultiHeadAttention(4, causal=True, rope=True)
    variables = init(module, x)
    y = jax.jit(module.apply)(variables, x)
    assert_close(module.apply(variables, x, positions=jnp.arange(6) + 50), y, rtol=1e-4)
    spread = module.apply(variables, x, positions=jnp.arange(6) * 3)
    assert np.abs(spread - y).max() > 1e-3


@pytest.mark.parametrize("recipe", [None, te.DelayedScaling(amax_history_len=2)])
def test_future_tokens_do_not_change_past_outputs(recipe):
    """Bit for bit; with delayed scaling too, once the scales come from history and no longer from this tensor."""
    x = random(16, 32)
    layer = te.flax.TransformerLayer(4, 64, recipe=recipe)
    rest, state = te.state.split(init(layer, x))

    def loss(state):
        return layer.apply(te.state.merge(rest, state), x).sum()

    state = jax.jit(lambda state: te.state.apply(state, jax.grad(loss)(state)))(state)
    variables = te.state.merge(rest, state)
    other = x.at[9:].set(2 * x[9:][::-1])
    apply = jax.jit(layer.apply)
    y, z = apply(variables, x), apply(variables, other)
    np.testing.assert_array_equal(y[:9], z[:9])
    assert np.abs(y[9:] - z[9:]).max() > 0.1
    both_ways = jax.jit(layer.clone(causal=False).apply)
    assert np.abs(both_ways(variables, x)[:9] - both_ways(variables, other)[:9]).max() > 1e-4


def test_layer_is_attention_then_mlp():
    x = random(2, 6, 32)
    layer = te.flax.TransformerLayer(4, 64, num_kv_heads=2, activation="geglu", norm="layernorm", use_bias=True)
    params = init(layer, x)["params"]
    for row, got in zip(x, jax.jit(layer.apply)({"params": params}, x), strict=True):
        h = row + references.attention(params["attn"], row, 4, 2, 8, causal=True, rope=True)
        assert_close(got, h + references.mlp(params["mlp"], h, "geglu"), rtol=1e-4)


def test_layer_plan_names_its_chains():
    layer = te.flax.TransformerLayer(4, 64, recipe=te.CurrentScaling())
    plans = layer.plan(random(2, 8, 32))
    assert list(plans) == ["attn/qkv", "attn/proj", "mlp"]
    assert "SwiGLU" in str(plans["mlp"])
    assert str(plans) == "\n\n".join(f"{name}: {plan}" for name, plan in plans.items())
    assert plans == layer.plan(random(2, 8, 32))
    assert plans != te.flax.TransformerLayer(4, 64).plan(random(2, 8, 32))
    attention = te.flax.MultiHeadAttention(4, recipe=te.CurrentScaling()).plan(random(2, 8, 32))
    assert str(attention).startswith(f"qkv: {attention['qkv']}\n\nproj: ")


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("recipe", [te.DelayedScaling(), te.CurrentScaling()], ids=lambda r: r.name)
def test_everything_of_a_layer_but_attention_is_a_custom_call(recipe, norm):
    """No sum of a residual, forward or backward, is a step of its own, and no norm is XLA's."""
    layer = te.flax.TransformerLayer(4, 64, recipe=recipe, dtype=jnp.bfloat16, norm=norm, use_bias=norm == "layernorm")
    plans = layer.plan(random(2, 16, 32))
    steps = [step for plan in plans.values() for step in (*plan.forward, *plan.backward)]
    assert [step for step in steps if step.computes and not step.custom_calls] == []
    assert sum("+add" in step.name for step in steps) == 4


def test_names_of_parameters():
    """They are in checkpoints."""
    layer = te.flax.TransformerLayer(
        4, 64, recipe=te.DelayedScaling(amax_history_len=2), norm="layernorm", use_bias=True
    )
    variables = jax.eval_shape(layer.init, KEY, random(2, 16, 32))
    names = {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(variables)}
    linears = ["attn/proj/attn_proj", "attn/qkv/qkv_linear", "mlp/fc1", "mlp/fc2"]
    params = [f"{linear}/{name}" for linear in linears for name in ("bias", "kernel")]
    params += [f"{norm}/{name}" for norm in ("attn/qkv/attn_norm", "mlp/mlp_norm") for name in ("bias", "scale")]
    state = [
        f"{chain}/fp8_0/{leaf}"
        for chain in ("attn/proj", "attn/qkv", "mlp")
        for leaf in ("amax_history", "scale", "uses")
    ]
    assert names == {*(f"params/{name}" for name in params), *(f"{te.state.COLLECTION}/{name}" for name in state)}


def test_dropout_needs_and_uses_its_random_stream():
    x = random(2, 6, 32)
    layer = te.flax.TransformerLayer(4, 64, dropout_rate=0.5)
    variables = init(layer, x)
    y = jax.jit(layer.apply)(variables, x)
    drop = [layer.apply(variables, x, deterministic=False, rngs={"dropout": jax.random.key(k)}) for k in (0, 0, 1)]
    np.testing.assert_array_equal(drop[0], drop[1])
    assert np.abs(drop[0] - drop[2]).max() > 0.1
    assert np.abs(drop[0] - y).max() > 0.1
    with pytest.raises(Exception, match="dropout"):
        layer.apply(variables, x, deterministic=False)


class ScanLayer(te.flax.TransformerLayer):
    @nn.compact
    def __call__(self, x, _):
        return super().__call__(x), None


@pytest.mark.parametrize(
    ("recipe", "remat"), [(None, True), (te.CurrentScaling(), False), (te.DelayedScaling(amax_history_len=4), True)]
)
def test_scan_over_layers_is_the_unrolled_loop(recipe, remat):
    """Outputs, gradients and each layer's FP8 state; also in a second step, when there is a history."""
    layers, x = 2, random(2, 16, 32)
    config = {"num_heads": 4, "hidden_features": 32, "recipe": recipe}
    body = nn.remat(ScanLayer, prevent_cse=False) if remat else ScanLayer
    scanned = nn.scan(body, length=layers, variable_axes=SCAN_AXES, split_rngs={"params": True})(**config)
    single = te.flax.TransformerLayer(**config)

    def scan_loss(params, state):
        y, _ = scanned.apply(te.state.merge({"params": params}, state), x, None)
        return (y**2).sum(), y

    def layer_loss(params, state):
        """One layer at a time, each with its slice of the parameters and of the state."""
        h = x
        for i in range(layers):
            params_i, state_i = jax.tree.map(operator.itemgetter(i), (params, state))
            h = single.apply(te.state.merge({"params": params_i}, state_i), h)
        return (h**2).sum(), h

    steps = [jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)) for loss in (scan_loss, layer_loss)]
    rest, state = te.state.split(init(scanned, x, None))
    for _ in range(2):
        results = [step(rest["params"], state) for step in steps]
        ((_, y), (grads, new_state)), ((_, y_loop), (grads_loop, new_state_loop)) = results
        assert_close(y, y_loop, rtol=1e-4)
        assert_close(grads, grads_loop, rtol=1e-3)
        assert_close(new_state, new_state_loop, rtol=1e-4)
        state = jax.jit(te.state.apply)(state, new_state)
    assert bool(state) == isinstance(recipe, te.DelayedScaling)


@pytest.mark.parametrize(
    ("config", "x_shape", "message"),
    [
        ({"num_heads": 4, "num_kv_heads": 3}, (2, 6, 32), "num_kv_heads: expected a divisor of num_heads=4, got 3"),
        ({"num_heads": 5}, (2, 6, 32), "num_heads: expected a divisor of x.shape"),
        ({"num_heads": 4}, (2, 2, 6, 32), r"x: expected \[B, T, C\] or \[T, C\], got shape \(2, 2, 6, 32\)"),
        ({"num_heads": 4, "head_dim": 7, "rope": True}, (6, 32), "head_dim: expected an even number"),
        ({"num_heads": 4, "norm": "none"}, (6, 32), "norm: expected one of"),
        ({"num_heads": 4, "attention_implementation": "flash"}, (6, 32), "attention_implementation: expected None"),
    ],
)
def test_attention_errors(config, x_shape, message):
    with pytest.raises(ValueError, match=r"^te_jax.MultiHeadAttention: " + message):
        te.flax.MultiHeadAttention(**config).init(KEY, random(*x_shape))


def test_mlp_errors():
    with pytest.raises(ValueError, match=r"^te_jax.LayerNormMLP: activation: expected one of .*, got 'tanh'"):
        te.flax.LayerNormMLP(32, 64, activation="tanh").init(KEY, random(4, 32))
    with pytest.raises(
        ValueError,
        match=r"^te_jax.LayerNormMLP: x: expected shape \[\*lead, 48\]: .* residual=True, got shape \[4, 32\]",
    ):
        te.flax.LayerNormMLP(48, 64, residual=True).init(KEY, random(4, 32))


def test_no_dots_in_names():
    x = random(2, 16, 32)
    variables = init(te.flax.TransformerLayer(4, 64, recipe=te.DelayedScaling(amax_history_len=2)), x)
    names = {key.key for path, _ in jax.tree.leaves_with_path(variables) for key in path}
    assert not [name for name in names if "." in name]
    assert te.state.COLLECTION in variables
