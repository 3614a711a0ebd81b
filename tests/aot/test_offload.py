"""Activation offload as an H200 gets it: when copies start and end in the schedule, and the memory that is taken."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import te_jax as te
from te_jax.testing import aot, hlo

LAYERS, BATCH, SEQ, WIDTH, HEADS, HIDDEN = 8, 2, 512, 512, 8, 1024
BF16 = jnp.bfloat16
X = jax.ShapeDtypeStruct((BATCH, SEQ, WIDTH), BF16)
INPUTS = ("core_attn", "qkv_linear", "fc1")
RECIPE = te.DelayedScaling(amax_history_len=4)
HIDDEN_COPIES = te.remat.compiler_options()


def total(y):
    return jnp.mean(y.astype(jnp.float32) ** 2)


@functools.cache
def compiled(policy, hidden=True):
    """(optimized HLO, its memory) of a step over a stack of layers."""
    layer = te.flax.TransformerLayer(HEADS, HIDDEN, num_kv_heads=2, recipe=RECIPE, dtype=BF16)
    stack = te.flax.LayerStack(layer, LAYERS, policy)
    variables = jax.eval_shape(stack.init, jax.random.key(0), X)
    step = jax.value_and_grad(lambda variables, x: total(stack.apply(variables, x)))
    program = aot.compile_for_h200(step, (variables, X), options=HIDDEN_COPIES if hidden else {})
    return program.as_text(), program.memory_analysis()


def copies_in_loops(text):
    """(copies to the host, copies from it) in the bodies of loops."""
    copies = [copy for copy in hlo.host_copies(text) if not text.split(f"%{copy.computation} (")[0].endswith("ENTRY ")]
    return [c for c in copies if c.to_host], [c for c in copies if not c.to_host]


def kernels_of(text, computation):
    body = text[text.index(f"\n%{computation} (") :]
    body = body[: body.index("\n}")]
    return sum((" custom-call(" in line or " fusion(" in line) for line in body.splitlines())


INPUTS_OFFLOADED = te.remat.policy(offload=INPUTS, min_bytes=1 << 18)


def test_copies_of_a_layer_hide_under_its_compute():
    """Reloads start before the first kernel of an iteration and end behind the last: they are the next layer's."""
    text, _ = compiled(INPUTS_OFFLOADED)
    to_host, to_device = copies_in_loops(text)
    assert len(to_host) == len(to_device) == 5  # query, key, value, two FP8 inputs
    assert {copy.tensor[0] for copy in to_host} == {"bf16", "f8e4m3fn"}
    for copy in to_device:
        assert copy.before <= 1  # the fusion that computes an index
        assert copy.during >= kernels_of(text, copy.computation) - 2
    for copy in to_host:
        assert copy.during >= 5, copy


def test_without_the_options_reloads_are_waited_for():
    """What the options are for. If this fails, XLA hides the copies by itself: docs/design/0007 can go."""
    text, _ = compiled(INPUTS_OFFLOADED, hidden=False)
    _, to_device = copies_in_loops(text)
    assert len(to_device) == 5
    assert [copy for copy in to_device if copy.during < 3]


def test_no_copy_of_weights_queues_behind_those_to_the_host():
    """Every asynchronous copy in a loop is one to or from the host."""
    text, _ = compiled(INPUTS_OFFLOADED)
    bodies = {copy.computation for copy in hlo.host_copies(text)}
    for body in bodies:
        if f"\n%{body} (" in text:
            lines = text[text.index(f"\n%{body} (") :].split("\n}")[0].splitlines()
            starts = [line for line in lines if "-start(" in line]
            assert starts
            assert [line for line in starts if "S(5)" not in line] == []


def test_device_memory_is_that_of_not_keeping_the_tensors():
    """At most 10% above, where the same tensors on the device take more than that; what they have is on the host."""
    memory = {
        name: compiled(policy)[1]
        for name, policy in {
            "offload": INPUTS_OFFLOADED,
            "save": te.remat.policy(INPUTS),
            "remat": te.remat.policy(),
        }.items()
    }
    temp = {name: m.temp_size_in_bytes for name, m in memory.items()}
    kv = WIDTH // HEADS * 2 * 2
    tensors = LAYERS * BATCH * SEQ * (2 * (WIDTH + kv) + 2 * WIDTH)  # query, key, value; FP8 inputs of two linears
    assert memory["offload"].host_temp_size_in_bytes == pytest.approx(tensors, rel=0.01)
    assert temp["offload"] <= 1.1 * temp["remat"]
    assert temp["save"] - temp["offload"] > 0.5 * tensors


def test_policies_don_t_change_what_is_run():
    """The custom calls of a layer are those of the same policy on the device; XLA takes one layer out of the loop."""
    offloaded, saved = (hlo.count_custom_calls(compiled(p)[0]) for p in (INPUTS_OFFLOADED, te.remat.policy(INPUTS)))
    fprop, again = 4, 2  # of the forward pass; run again: all but qkv_linear and the last
    assert saved["te_jax_gemm"] == fprop + again + 8
    assert offloaded["te_jax_gemm"] == fprop + 2 * (again + 8)


def test_a_stack_of_nnx_layers():
    policy = te.remat.policy(offload=("context", "fc1"), min_bytes=1 << 18)

    def make(rngs):
        return te.nnx.TransformerLayer(WIDTH, HEADS, HIDDEN, num_kv_heads=2, recipe=RECIPE, dtype=BF16, rngs=rngs)

    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: te.nnx.LayerStack(make, LAYERS, policy=policy, rngs=nnx.Rngs(0)))
    )

    def step(state, x):
        return te.nnx.grad(lambda model: total(model(x)))(nnx.merge(graphdef, state))

    pure = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    text = aot.compile_for_h200(step, (pure, X), options=HIDDEN_COPIES).as_text()
    to_host, to_device = copies_in_loops(text)
    assert len(to_host) == len(to_device) >= 2
    for copy in to_device:
        assert copy.during >= kernels_of(text, copy.computation) - 2


def test_a_plain_scan_whose_carry_is_offloaded():
    """The layer's matmuls accumulate into the carry in place: it is copied on the device first, and leaves then."""
    policy = te.remat.policy(offload=("decoder_layer_input",), min_bytes=0)

    def layer(x, w):
        x = te.remat.name(x, "decoder_layer_input")
        return x + jnp.tanh(x @ w[0]) @ w[1], None

    def loss(weights, x):
        return total(te.remat.scan(layer, x, weights, policy=policy)[0])

    args = jax.ShapeDtypeStruct((LAYERS, 2, 1024, 1024), BF16), jax.ShapeDtypeStruct((1024, 1024), BF16)
    options = te.remat.compiler_options(carry=True)
    text = aot.compile_for_h200(jax.value_and_grad(loss), args, options=options).as_text()
    to_host, to_device = copies_in_loops(text)
    assert len(to_host) == len(to_device) == 1
    assert to_host[0].during >= 3  # both matmuls and tanh
    assert to_device[0].during >= kernels_of(text, to_device[0].computation) - 2


def test_offloaded_residuals_are_read_from_the_last_layer_on():
    """The address of a reload goes down from layer to layer. Older compilers read upwards: wrong gradients."""
    text, _ = compiled(INPUTS_OFFLOADED)
    strides = []
    for copy in copies_in_loops(text)[1]:
        body = text[text.index(f"\n%{copy.computation} (") :].split("\n}")[0]
        called = {line.split("calls=%")[1].split(",")[0] for line in body.splitlines() if "-start(" in line}
        for name in called:
            fusion = text[text.index(f"\n%{name} (") :].split("\n}")[0]
            strides += [int(part.split('"')[2]) for part in fusion.split("byte_stride")[1:]]
    assert strides
    assert all(stride < 0 for stride in strides), strides
