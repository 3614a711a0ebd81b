"""What a policy makes a program do, counted where it is lowered for CUDA: custom calls and copies to and from the host.

One gated MLP a layer: norm, fc1, activation, fc2. Without remat a layer quantizes two kernels and one cotangent by
themselves (the rest is written in FP8 by norm, activation and d-activation), and has three GEMMs for each linear.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import te_jax as te
from te_jax import ops
from te_jax.testing import hlo

BF16 = jnp.bfloat16
RECIPE = te.DelayedScaling(amax_history_len=2)
TOKENS, WIDTH, HIDDEN = 48, 32, 64
X = jax.ShapeDtypeStruct((TOKENS, WIDTH), BF16)
KERNELS = ("fc1_kernel", "fc2_kernel")
COUNTED = ("te_jax_quantize", "te_jax_norm", "te_jax_activation", "te_jax_gemm", "annotate_device_placement")
MAXTEXT = {"fc1": "offload", "mlpwi": "device", "fc2": "remat", "mlpwo": "offload"}

# policy -> how often a layer has each of COUNTED
CASES = {
    "nothing": (te.remat.policy(min_bytes=0), (5, 2, 2, 7, 0)),
    "fc1's input": (te.remat.policy(offload=("fc1",), min_bytes=0), (5, 2, 2, 7, 2)),
    # The GEMM isn't run again, but the norm is, for the FP8 input of the weight gradient.
    "the activation's input": (te.remat.policy(offload=("act",), min_bytes=0), (5, 2, 2, 6, 2)),
    "every input": (te.remat.policy(offload=("fc1", "act", "fc2"), min_bytes=0), (5, 1, 1, 6, 6)),
    "every input, kernels": (te.remat.policy(KERNELS, ("fc1", "act", "fc2"), min_bytes=0), (3, 1, 1, 6, 6)),
    "everything on the device": (te.remat.policy(("fc1", "act", "fc2", *KERNELS)), (3, 1, 1, 6, 0)),
    "only what is large": (te.remat.policy(KERNELS, ("fc1", "act", "fc2"), min_bytes=1 << 20), (3, 1, 1, 6, 0)),
    "a dictionary": (te.remat.policy(MAXTEXT, min_bytes=0), (5, 1, 2, 6, 2)),
}


def mlp(recipe=RECIPE):
    return te.flax.LayerNormMLP(WIDTH, HIDDEN, "swiglu", residual=True, recipe=recipe, dtype=BF16)


def total(y):
    return jnp.sum(y.astype(jnp.float32))


def count(step, *args):
    text = jax.jit(step).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    counts = hlo.count_custom_calls(text, "")
    return tuple(counts[name] for name in COUNTED), text


def gradients(apply, variables, *args):
    """(a step with the loss and the gradients of variables and x, its arguments)."""
    step = jax.value_and_grad(lambda variables, *args: total(apply(variables, *args)), argnums=(0, 1))
    return step, variables, *args


def plain(policy, wrap=jax.checkpoint):
    module = mlp()
    variables = jax.eval_shape(module.init, jax.random.key(0), X)
    return gradients(wrap(module.apply, policy=policy), variables, X)


def in_linen(policy):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.remat(te.flax.LayerNormMLP, policy=policy)(
                WIDTH, HIDDEN, "swiglu", residual=True, recipe=RECIPE, dtype=BF16, name="mlp"
            )(x)

    variables = jax.eval_shape(Layer().init, jax.random.key(0), X)
    return gradients(Layer().apply, variables, X)


def linen_stack(policy):
    stack = te.flax.LayerStack(mlp(), 3, policy)
    return gradients(stack.apply, jax.eval_shape(stack.init, jax.random.key(0), X), X)


def nnx_layer(rngs):
    return te.nnx.LayerNormMLP(WIDTH, HIDDEN, activation="swiglu", residual=True, recipe=RECIPE, dtype=BF16, rngs=rngs)


def nnx_step(make, call):
    graphdef, state = nnx.split(make())

    def step(state, x):
        model = nnx.merge(graphdef, state)
        return te.nnx.value_and_grad(lambda model, x: total(call(model, x)), argnums=(0, 1))(model, x)

    return step, state, X


def in_nnx(policy):
    return nnx_step(lambda: nnx_layer(nnx.Rngs(0)), nnx.remat(lambda model, x: model(x), policy=policy))


def nnx_stack(policy):
    def make():
        return te.nnx.LayerStack(nnx_layer, 3, policy=policy, rngs=nnx.Rngs(0))

    return nnx_step(make, lambda model, x: model(x))


def plain_stack(policy):
    module = mlp()
    variables = jax.eval_shape(module.init, jax.random.key(0), X)
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), variables)

    def apply(variables, x):
        return te.remat.scan(lambda x, v: (module.apply(v, x), None), x, variables, policy=policy)[0]

    return gradients(apply, stacked, X)


def in_shard_map(policy):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    module = mlp()
    variables = jax.eval_shape(module.init, jax.random.key(0), X)
    apply = jax.checkpoint(module.apply, policy=policy)
    step = jax.value_and_grad(lambda v, x: jax.lax.psum(total(apply(v, x)), "data"), argnums=(0, 1))
    x = jax.ShapeDtypeStruct((2 * TOKENS, WIDTH), BF16)
    return jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), (P(), P("data")))), variables, x


CONTEXTS = (plain, in_linen, linen_stack, in_nnx, nnx_stack, plain_stack, in_shard_map)


@pytest.mark.parametrize("context", CONTEXTS, ids=lambda context: context.__name__)
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_done_twice_because_of_a_policy(context, case):
    policy, (quantize, norm, activation, gemm, copies) = CASES[case]
    if context is in_shard_map:  # what devices have parts of is quantized in two passes, the first for the amax of all
        quantize, norm, activation = quantize + 1, 2 * norm, 2 * activation
    if case == "only what is large" and getattr(jax.config, "jax_remat3", False) and jax.__version_info__ < (0, 12):
        copies = 6  # that jax doesn't tell policies about sizes
    assert count(*context(policy))[0] == (quantize, norm, activation, gemm, copies)


def test_saving_everything_is_as_good_as_no_remat():
    without = count(*plain(None, wrap=lambda apply, policy: apply))[0]
    assert without == CASES["everything on the device"][1]


def placed(text):
    """(type, where to) of every tensor that a lowered program moves between memories."""
    found = []
    for line in text.splitlines():
        if "@annotate_device_placement" in line:
            kind = re.search(r'_xla_buffer_placement = "(\w+)"', line)[1]
            tensor = re.search(r"-> tensor<(\S+)>", line)[1]
            found.append((tensor.replace("xui8", "xf8E4M3FN"), kind))  # as jax_remat3 gets it
    return sorted(found)


def test_fp8_goes_to_the_host_once_in_the_layout_that_is_read():
    """Q(x)^T [features, tokens] of both linears, to the host and back; scales stay."""
    _, text = count(*plain(te.remat.policy(offload=("fc1", "fc2"), min_bytes=0)))
    tensors = [f"{HIDDEN}x{TOKENS}xf8E4M3FN", f"{WIDTH}x{TOKENS}xf8E4M3FN"]
    assert placed(text) == sorted((t, kind) for t in tensors for kind in ("device", "pinned_host"))


@pytest.mark.parametrize("recipe", [te.CurrentScaling(), te.BlockScaling()], ids=lambda recipe: recipe.name)
def test_other_recipes_quantize_nothing_twice(recipe):
    x = jax.ShapeDtypeStruct((256, 128), BF16)
    module = te.flax.LayerNormMLP(128, 256, "swiglu", residual=True, recipe=recipe, dtype=BF16)
    variables = jax.eval_shape(module.init, jax.random.key(0), x)
    policy = te.remat.policy(KERNELS, ("fc1", "act", "fc2"), min_bytes=0)
    without = count(*gradients(module.apply, variables, x))[0]
    offloaded, text = count(*gradients(jax.checkpoint(module.apply, policy=policy), variables, x))
    assert offloaded[:-1] == without[:-1]
    assert without[0] > 0
    moved = [tensor for tensor, _ in placed(text)]
    assert len(moved) == 6
    assert not [tensor for tensor in moved if tensor.endswith("f32")]  # scales, of blocks too, stay on the device


def test_without_a_recipe_inputs_are_offloaded_as_they_are():
    module = mlp(None)
    variables = jax.eval_shape(module.init, jax.random.key(0), X)
    policy = te.remat.policy(offload=("fc1", "act", "fc2"), min_bytes=0)
    step = gradients(jax.checkpoint(module.apply, policy=policy), variables, X)
    counts, text = count(*step)
    assert counts[-1] == 6
    assert {tensor for tensor, _ in placed(text)} == {f"{TOKENS}x{n}xbf16" for n in (WIDTH, 2 * HIDDEN, HIDDEN)}
    assert text.count("stablehlo.dot_general") == 6  # two for each of three products: none is run again


@pytest.mark.parametrize(
    ("save", "offload", "attention", "gemms", "copies"),
    [
        ((), (), 2, 15, 0),
        ((), ("core_attn",), 2, 14, 6),  # query, key, value; attention is run again, its projection isn't
        ((), ("context",), 1, 15, 4),  # attention's result and statistics
        ((), ("attn_norm", "core_attn", "context"), 1, 14, 12),
        (("attn_norm", "core_attn", "context"), ("mlp_norm",), 1, 13, 2),  # from there fc1 alone is run again
        (("context",), ("core_attn", "qkv_linear", "fc1"), 1, 14, 10),  # from the context its projection and fc1
    ],
)
def test_attention(save, offload, attention, gemms, copies):
    layer = te.flax.TransformerLayer(4, 64, recipe=RECIPE, dtype=BF16)
    x = jax.ShapeDtypeStruct((2, 128, 64), BF16)
    policy = te.remat.policy(save, offload, min_bytes=0)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    counts, text = count(*gradients(jax.checkpoint(layer.apply, policy=policy), variables, x))
    fmha = hlo.count_custom_calls(text, "__cudnn$fmha")
    assert fmha == {"__cudnn$fmhaSoftmax": attention, "__cudnn$fmhaSoftmaxBackward": 1}
    assert counts[-2:] == (gemms, copies)


@pytest.mark.parametrize(
    ("offload", "expected"),
    [
        ((), (7, 2, 5, 2)),
        (("expert_fc1", "moe_act", "expert_fc2"), (6, 1, 4, 2)),
        (("expert_fc1", "moe_act", "expert_fc2", "expert_fc1_kernel", "expert_fc2_kernel"), (4, 1, 4, 2)),
    ],
)
def test_experts_and_their_router(offload, expected):
    """(quantize, activation, grouped GEMM, grouped wgrad): a grouped MLP behind a router in plain jax."""
    experts = te.Sequential(
        [
            ops.GroupedLinear(2, 128, use_bias=False, name="expert_fc1"),
            ops.SwiGLU(name="moe_act"),
            ops.GroupedLinear(2, 32, use_bias=False, name="expert_fc2"),
        ],
        recipe=RECIPE,
        dtype=BF16,
    )
    sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
    variables = jax.eval_shape(experts.init, jax.random.key(0), X, sizes, sizes)
    router = jax.ShapeDtypeStruct((WIDTH, 2), jnp.float32)

    def layer(variables, router, x, sizes):
        x = te.remat.name(x, "router_fc1")
        weights = jax.nn.softmax(x.astype(jnp.float32) @ router)
        y = te.remat.name(experts.apply(variables, x, sizes, sizes), "moe_mlpwo")
        return y * weights[:, :1]  # its gradient reads y

    rematted = jax.checkpoint(layer, policy=te.remat.policy(("moe_mlpwo",), ("router_fc1", *offload), min_bytes=0))
    grad = jax.value_and_grad(lambda *args: total(rematted(*args)), argnums=(0, 1, 2))
    text = jax.jit(grad).trace(variables, router, X, sizes).lower(lowering_platforms=("cuda",)).as_text()
    counts = hlo.count_custom_calls(text, "")
    names = ("te_jax_quantize", "te_jax_activation", "te_jax_grouped_gemm", "te_jax_grouped_wgrad")
    assert tuple(counts[name] for name in names) == expected
    assert counts["annotate_device_placement"] == 2 * (1 + len(offload))
    assert (f"{TOKENS}x{WIDTH}xbf16", "pinned_host") in placed(text)  # the router's input
