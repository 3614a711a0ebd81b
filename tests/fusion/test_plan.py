"""FusionPlan: what it says is what is lowered, for CUDA too, without a GPU."""

import collections

import jax
import jax.numpy as jnp
import pytest

import te_jax as te
from te_jax import ops
from te_jax.fusion.pattern import Rule, slot
from te_jax.testing import hlo

X = jax.ShapeDtypeStruct((2, 32, 64), jnp.bfloat16)
RECIPES = {
    "delayed": te.DelayedScaling(amax_history_len=4),
    "current": te.CurrentScaling(),
    "block": te.BlockScaling(),
    "none": None,
}


def mlp(recipe, **kwargs):
    chain = [ops.RMSNorm(), ops.Linear(256, use_bias=False), ops.SwiGLU(), ops.Linear(64, use_bias=False)]
    return te.Sequential(chain, recipe=recipe, dtype=jnp.bfloat16, **kwargs)


def lowered_custom_calls(module, *inputs, platform, train=True):
    variables = jax.eval_shape(module.init, jax.random.key(0), *inputs)

    def loss(variables, *inputs):
        return jnp.sum(module.apply(variables, *inputs).astype(jnp.float32) ** 2)

    fn = jax.grad(loss, argnums=tuple(range(1 + len(inputs)))) if train else module.apply
    lowered = jax.jit(fn).trace(variables, *inputs).lower(lowering_platforms=(platform,))
    return hlo.count_custom_calls(lowered.as_text())


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_norm_and_activation_write_fp8_and_nothing_else_quantizes_activations(recipe):
    plan = mlp(RECIPES[recipe]).plan(X)
    assert [step.name for step in plan.forward if step.writes_fp8] == ["quantizes for the next linear"] * 2
    # The two that are left quantize kernels.
    calls = [call for step in plan.forward for call in step.custom_calls if not call.startswith("te_jax_scale")]
    assert calls == ["te_jax_norm", *(kernel := ["te_jax_quantize", "te_jax_gemm"]), "te_jax_activation", *kernel]
    backward = [call for step in plan.backward for call in step.custom_calls if not call.startswith("te_jax_scale")]
    gemms = ["te_jax_gemm"] * 2
    assert backward == ["te_jax_quantize", *gemms, "te_jax_activation_grad", *gemms, "te_jax_norm_grad"]


@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_plan_counts_what_is_lowered_with_quantize_and_other_kinds(recipe):
    """Every op behind the first linear writes, forward and backward, what the next one reads in FP8."""
    chain = [ops.L2Normalization(), ops.Quantize(), ops.Linear(256), ops.ClampedSwiGLU(gate="second")]
    chain += [ops.Linear(128, use_bias=False), ops.Quantize(backward=True), ops.SquaredReLU(), ops.Linear(64)]
    module = te.Sequential(chain, recipe=RECIPES[recipe], dtype=jnp.bfloat16)
    plan = module.plan(X, platform="cuda")
    assert collections.Counter(plan.custom_calls) == lowered_custom_calls(module, X, platform="cuda")
    # Beside the passes of norm and activations: three kernels, the first Quantize's is the norm's pass, the second one
    # quantizes x and dy, and the last linear dy.
    assert plan.custom_calls["te_jax_quantize"] == 3 + 2 + 1
    assert plan.custom_calls["te_jax_activation"] == 2


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_plan_counts_what_is_lowered(recipe, train, platform):
    module = mlp(RECIPES[recipe])
    plan = module.plan(X, train=train, platform=platform)
    assert collections.Counter(plan.custom_calls) == lowered_custom_calls(module, X, platform=platform, train=train)
    stateless, delayed = (13, 15) if train else (6, 7)
    count = {"none": 0, "current": stateless, "block": stateless, "delayed": delayed}
    assert sum(plan.custom_calls.values()) == count[recipe]


def test_plan_counts_what_is_lowered_with_bias_residual_and_foreign_ops():
    chain = [
        ops.MakeExtraOutput(),
        ops.LayerNorm(),
        ops.Linear(128),
        ops.GELU(),
        jnp.tanh,
        ops.Linear(64),
        ops.AddExtraInput(),
    ]
    module = te.Sequential(chain, recipe=te.CurrentScaling(), dtype=jnp.bfloat16)
    plan = module.plan(X, X, platform="cuda")
    variables = jax.eval_shape(module.init, jax.random.key(0), X, X)

    def loss(variables, x, residual):
        y, extra = module.apply(variables, x, residual)
        return jnp.sum((y * extra).astype(jnp.float32))

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(variables, X, X)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert hlo.count_custom_calls(text) == collections.Counter(plan.custom_calls)
    assert [s.name for s in plan.forward] == [
        "MakeExtraOutput",
        "quantizes for the next linear",
        "linear+bias",
        "GELU",
        "as it is; ends a run",
        "linear+bias+add",
    ]
    assert [s.name for s in plan.backward][-1] == "d-norm+add"


@pytest.mark.parametrize(
    ("wanted", "gemms", "quantizes"),
    [("x", 4, 3), ("first", 4, 3), ("last", 3, 3), ("all", 6, 3)],
)
def test_unwanted_gradients_cost_nothing(wanted, gemms, quantizes):
    """Each gradient is a custom call of its own: without it, XLA drops the call."""
    module = mlp(te.CurrentScaling())
    variables = module.init(jax.random.key(0), jnp.zeros(X.shape, X.dtype))

    def loss(chosen, variables, x):
        params = variables["params"]
        if wanted in ("first", "last"):
            name = "ops_1" if wanted == "first" else "ops_3"
            params = {**params, name: chosen}
        elif wanted == "x":
            x = chosen
        else:
            params, x = chosen
        return jnp.sum(module.apply({"params": params}, x).astype(jnp.float32) ** 2)

    params = variables["params"]
    x = jnp.ones(X.shape, X.dtype)
    chosen = {"x": x, "first": params["ops_1"], "last": params["ops_3"], "all": (params, x)}[wanted]
    text = jax.jit(jax.grad(loss)).lower(chosen, variables, x).compile().as_text()
    counts = hlo.count_custom_calls(text)
    assert counts["te_jax_gemm"] == gemms
    assert counts["te_jax_quantize"] == quantizes


def test_the_text_tells_what_runs_and_why():
    text = str(mlp(te.DelayedScaling()).plan(X, platform="cuda"))
    assert "DelayedScaling()" in text
    assert "RMSNorm(ops_0): quantizes for the next linear, writes FP8 [te_jax_norm]" in text
    assert "accumulation: dgrad precise, wgrad precise" in text
    assert "RMSNorm(ops_0): d-RMSNorm [te_jax_norm_grad]" in text
    assert "15 custom calls" in text
    assert "FP8 state: writes the state of 6 quantizers [te_jax_scale_write]" in text
    odd = jax.ShapeDtypeStruct((3, 5, 64), jnp.bfloat16)
    text = str(mlp(te.CurrentScaling()).plan(odd))
    assert "not quantized: tokens: 15 is not a multiple of 16" in text
    float32 = te.Sequential([ops.Linear(64)], recipe=te.CurrentScaling())
    assert "adds a bfloat16 bias only, the chain computes in float32" in str(
        float32.plan(jax.ShapeDtypeStruct((32, 64), jnp.float32))
    )


def test_plans_are_values():
    recipe = te.CurrentScaling()
    assert mlp(recipe).plan(X) == mlp(recipe).plan(jnp.zeros(X.shape, X.dtype))
    assert mlp(recipe).plan(X) != mlp(None).plan(X)
    # The platform decides only what is printed about custom calls.
    assert mlp(recipe).plan(X, platform="cpu") == mlp(recipe).plan(X, platform="cuda")
    assert str(mlp(recipe).plan(X, platform="cpu")) != str(mlp(recipe).plan(X, platform="cuda"))


def test_a_step_that_skips_ops_is_refused():
    class Wrong:
        links = (1,)
        name = "wrong"

    rule = Rule("wrong", (slot(ops.RMSNorm),), lambda window: None, lambda window: Wrong())
    with pytest.raises(ValueError, match=r"'wrong': expected it to run links \(0,\), got \(1,\)"):
        mlp(None, forward_rules=(rule,)).plan(X)
