"""Extra values of a chain, by order and by channel; lists, chains and shared ops inside of one; and what is wrong."""

import dataclasses
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import te_jax as te
from te_jax import ops
from te_jax.quant.state import COLLECTION

F32, BF16 = jnp.float32, jnp.bfloat16
RECIPES = {
    "none": None,
    "delayed": te.DelayedScaling(amax_history_len=2),
    "current": te.CurrentScaling(),
    "block": te.BlockScaling(),
}


def random(seed, *shape, dtype=F32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def gradients_of(module):
    """The compiled function of variables and inputs: (results, gradients of a weighted sum of all of them)."""

    def loss(arguments):
        results = module.apply(*arguments)
        weighted = [jnp.sum(y.astype(F32) * random(9 + i, *y.shape)) for i, y in enumerate(jax.tree.leaves(results))]
        return sum(weighted), results

    grad = jax.jit(jax.grad(loss, has_aux=True))
    return lambda *arguments: grad(arguments)[::-1]


def gradients(module, variables, *inputs):
    return gradients_of(module)(variables, *inputs)


def assert_close(got, want, rtol):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= rtol * max(np.linalg.norm(b), 1e-30), jax.tree_util.keystr(path)


def dense(features, name):
    return ops.Linear(features, use_bias=False, name=name)


# By channel


def test_one_producer_and_several_consumers_against_plain_jax():
    chain = [ops.RMSNorm(name="norm"), ops.MakeExtraOutput(channel="h"), dense(32, "a"), ops.AddExtraInput(channel="h")]
    chain += [ops.GELU(), dense(32, "b"), ops.AddExtraInput(channel="h"), ops.ConstantScale(3.0)]
    chain += [ops.AddExtraInput(channel="h", in_place=False)]
    module, x = te.Sequential(chain), random(0, 5, 32)

    def plain(variables, x):
        p = variables["params"]
        h = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["norm"]["scale"]
        return 3 * (jax.nn.gelu(h @ p["a"]["kernel"] + h) @ p["b"]["kernel"] + h) + h

    variables = jax.jit(module.init)(jax.random.key(1), x)
    got = gradients(module, variables, x)
    want_y, pullback = jax.vjp(plain, variables, x)
    assert_close(got, (want_y, pullback(random(9, 5, 32))), 1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_channel_is_an_extra_output_that_goes_back_in(recipe):
    """One chain with a channel, against two chains with extra outputs and inputs by order: bit for bit, with state."""
    before = [ops.RMSNorm(name="n"), ops.MakeExtraOutput(channel="r"), dense(64, "a")]
    after = [ops.SiLU(), dense(32, "b"), ops.AddExtraInput(channel="r")]
    x = random(0, 32, 32, dtype=BF16)
    inside = te.Sequential([*before, *after], recipe=RECIPES[recipe], dtype=BF16)
    by_order = [dataclasses.replace(op, channel=None) if hasattr(op, "channel") else op for op in (*before, *after)]
    outside = te.Sequential(by_order, recipe=RECIPES[recipe], dtype=BF16)
    variables = jax.jit(inside.init)(jax.random.key(1), x)
    y, grads = gradients(inside, variables, x)

    # The call's own extra output is fed back as the extra input; its cotangent comes from there.
    norm = te.Sequential([ops.RMSNorm(name="n")], recipe=RECIPES[recipe], dtype=BF16)
    (y2, extra), pullback = jax.vjp(
        jax.jit(outside.apply), variables, x, norm.apply({"params": {"n": variables["params"]["n"]}}, x)
    )
    np.testing.assert_array_equal(y, y2)
    dy = random(9, 32, 32).astype(BF16)
    *want, _ = jax.jit(pullback)((dy, dy))  # y = r + ..., so that r's cotangent is dy
    if recipe == "none":  # XLA fuses the sum of cotangents with other things in either program
        assert_close(grads, tuple(want), 1e-4)
    else:
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(tuple(want)), strict=True):
            np.testing.assert_array_equal(a, b)
    assert extra.shape == x.shape


def test_channels_across_functions_and_modules():
    """A value that leaves a run for a later one: JAX adds its cotangents."""
    take = ops.AddExtraInput(channel="r")
    chain = [ops.MakeExtraOutput(channel="r"), dense(32, "a"), take, jnp.tanh, take]
    chain += [nn.Dense(32), take, ops.StartResidual(), jnp.sin, ops.AddResidual()]
    module, x = te.Sequential(chain, recipe=te.CurrentScaling()), random(0, 16, 32)

    def plain(variables, x):
        p = variables["params"]
        a = te.Sequential([dense(32, "a")], recipe=te.CurrentScaling())
        h = jnp.tanh(a.apply({"params": {"a": p["a"]}}, x) + x) + x
        h = h @ p["ops_5"]["kernel"] + p["ops_5"]["bias"] + x
        return h + jnp.sin(h)

    variables = jax.jit(module.init)(jax.random.key(1), x)
    want_y, pullback = jax.vjp(plain, variables, x)
    assert_close(gradients(module, variables, x), (want_y, pullback(random(9, 16, 32))), 1e-5)
    assert [step.name for step in module.plan(x).forward].count("as it is; ends a run") == 3


def test_order_and_channels_together():
    chain = [ops.AddExtraInput(), ops.MakeExtraOutput(channel="r"), ops.ConstantScale(2.0), ops.MakeExtraOutput()]
    chain += [ops.AddExtraInput(channel="r"), ops.AddExtraInput(), ops.MakeExtraOutput(), ops.ConstantScale(5.0)]
    module = te.Sequential(chain)
    x, a, b = random(0, 4, 8), random(1, 4, 8), random(2, 4, 8)
    y, first, second = module.apply({}, x, a, b)
    np.testing.assert_allclose(first, 2 * (x + a), rtol=1e-6)
    np.testing.assert_allclose(second, 3 * (x + a) + b, rtol=1e-5)
    np.testing.assert_allclose(y, 5 * (3 * (x + a) + b), rtol=1e-5)


def test_a_block_with_a_channel_may_be_repeated_and_sees_those_around_it():
    def block(i):
        h = ops.MakeExtraOutput(channel="h")
        return [h, ops.ConstantScale(i), ops.AddExtraInput(channel="h"), ops.AddExtraInput(channel="x")]

    module, x = te.Sequential([ops.MakeExtraOutput(channel="x"), block(2.0), [block(3.0)]]), random(0, 4, 8)
    np.testing.assert_allclose(module.apply({}, x), 4 * (3 * x + x) + x, rtol=1e-6)


@dataclasses.dataclass(frozen=True)
class Select(ops.Op):
    """y = x[:, index], an op whose extra input [C] is int32."""

    num_extra_inputs = 1

    def extra_input_types(self, x):
        return (jax.ShapeDtypeStruct((x.shape[-1],), jnp.int32),)

    def check_extra_inputs(self, x, inputs):
        seen = isinstance(inputs[0], jax.Array) and not isinstance(inputs[0], jax.core.Tracer)
        if seen and np.asarray(inputs[0]).min() < 0:
            raise ValueError("Select: index: expected no negative number")

    def forward(self, ctx, x):
        ctx.saved = ctx.extra_inputs[0]
        return x[:, ctx.saved]

    def backward(self, ctx, dy):
        ctx.extra_input_grads = (None,)
        return jnp.zeros_like(dy).at[:, ctx.saved].add(dy)


def test_extra_inputs_of_integers_have_no_cotangent():
    module = te.Sequential([ops.RMSNorm(), Select(), ops.Linear(16)], recipe=te.CurrentScaling())
    x, index = random(0, 16, 32), jnp.arange(32, dtype=jnp.int32)[::-1]
    variables = jax.jit(module.init)(jax.random.key(1), x, index)
    flipped = te.Sequential([ops.RMSNorm(), lambda x: x[:, ::-1], ops.Linear(16)], recipe=te.CurrentScaling())
    grad = lambda m, *e: jax.jit(jax.grad(lambda v, x: m.apply(v, x, *e).sum(), argnums=(0, 1)))(variables, x)  # noqa: E731
    assert_close(grad(module, index.astype(jnp.int16)), grad(flipped), 1e-6)
    assert module.extra_input_types(x) == (jax.ShapeDtypeStruct((32,), jnp.int32),)
    assert "Select" in str(module.plan(x, index))
    with pytest.raises(TypeError, match=r"extra input 0, for ops\[1\] \(Select\): expected integers, got float32"):
        module.apply(variables, x, index.astype(F32))
    with pytest.raises(
        ValueError, match=r"extra input 0, for ops\[1\] \(Select\): expected shape \(32,\), got \(16,\)"
    ):
        module.apply(variables, x, index[:16])
    with pytest.raises(ValueError, match="Select: index: expected no negative number"):
        module.apply(variables, x, -index)


# Chains inside of chains


def test_a_list_inside_of_a_chain_is_part_of_it():
    """The same plan, values and state as the flat list; only default names show the place."""
    flat = [ops.RMSNorm(name="n"), dense(64, "a"), ops.SwiGLU(name="s"), dense(32, "b"), ops.GELU(name="g")]
    nested = [flat[:1], [flat[1:3], (flat[3],)], flat[4]]
    x = random(0, 32, 32, dtype=BF16)

    def modules(recipe):
        return [te.Sequential(chain, recipe=RECIPES[recipe], dtype=BF16) for chain in (flat, nested)]

    for recipe in RECIPES:
        plan, other = (module.plan(x) for module in modules(recipe))
        assert plan == other
    variables = [jax.jit(module.init)(jax.random.key(1), x) for module in modules("delayed")]
    rename = lambda v: {**v, COLLECTION: {"fp8_0_0_a_b": v[COLLECTION]["fp8_0_a_b"]}}  # noqa: E731
    assert jax.tree.structure(variables[1]) == jax.tree.structure(rename(variables[0]))
    kernels = te.quantize_kernels(modules("delayed")[1], variables[1], x)["fp8_kernels"]["fp8_0_0_a_b"]
    assert set(kernels) == {"linear_1_0_0", "linear_1_1_0"}
    (want_y, (want, want_dx)), got = map(gradients, modules("delayed"), variables, (x, x))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves((want_y, (rename(want), want_dx))), strict=True):
        np.testing.assert_array_equal(a, b)


def test_names_in_lists_are_those_of_flax():
    chain = [ops.Linear(8), [ops.Linear(8), nn.Dense(8), [ops.LayerNorm()]], te.Sequential([[ops.Linear(8)]])]
    params = te.Sequential(chain).init(jax.random.key(0), jnp.ones((4, 8)))["params"]
    paths = {"/".join(k.key for k in path[:-1]) for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    assert paths == {"ops_0", "ops_1_0", "ops_1_1", "ops_1_2_0", "ops_2/ops_0_0"}


def test_a_chain_that_is_a_module_has_its_own_settings_scope_state_and_plan():
    inner = te.Sequential([ops.RMSNorm(), ops.Linear(32)], recipe=te.CurrentScaling(), dtype=BF16)
    plain = te.Sequential([ops.Linear(32)])
    delayed = te.DelayedScaling(amax_history_len=2)
    module, x = te.Sequential([ops.Linear(32), inner, plain, ops.Linear(16)], recipe=delayed), random(0, 16, 32)
    variables = module.init(jax.random.key(0), x)
    assert set(variables[COLLECTION]) == {"fp8_0", "fp8_3"}
    assert set(variables["params"]["ops_1"]) == {"ops_0", "ops_1"}
    plan = module.plan(x)
    labels = {label for step in (*plan.forward, *plan.backward) for label in step.ops}
    assert {"ops_1/RMSNorm(ops_0)", "ops_1/Linear(ops_1)", "ops_2/Linear(ops_0)", "Linear(ops_3)"} < labels
    notes = [step.notes for step in plan.forward if step.ops[0].startswith("ops_2")]
    assert notes[0] == ("not quantized: recipe None",)
    apart = module.apply(variables, x)
    h = te.Sequential([ops.Linear(32)], recipe=delayed).apply({"params": {"ops_0": variables["params"]["ops_0"]},
        COLLECTION: {"fp8_0": variables[COLLECTION]["fp8_0"]}}, x)  # fmt: skip
    h = plain.apply({"params": variables["params"]["ops_2"]}, inner.apply({"params": variables["params"]["ops_1"]}, h))
    last = te.Sequential([ops.Linear(16, name="ops_3")], recipe=delayed)
    state = {COLLECTION: {"fp8_0": variables[COLLECTION]["fp8_3"]}}
    np.testing.assert_array_equal(apart, last.apply({"params": {"ops_3": variables["params"]["ops_3"]}, **state}, h))


def test_a_chain_that_is_a_module_takes_extra_values_by_order_and_is_as_deterministic():
    inner = te.Sequential([ops.AddExtraInput(), ops.MakeExtraOutput(), ops.Dropout(0.5)])
    module = te.Sequential([ops.AddExtraInput(), inner, ops.AddExtraInput(), te.flax.LayerNormMLP(8, 16)])
    inputs = [jnp.ones((4, 8)) * i for i in (1, 10, 100, 1000)]
    variables = module.init(jax.random.key(0), *inputs)
    _, extra = module.apply(variables, *inputs)
    np.testing.assert_array_equal(extra, jnp.full((4, 8), 111.0))
    dropped = module.apply(variables, *inputs, deterministic=False, rngs={"dropout": jax.random.key(1)})
    assert not np.array_equal(dropped[0], module.apply(variables, *inputs)[0])
    assert [t.shape for t in module.extra_input_types(inputs[0])] == [(4, 8)] * 3
    assert len(module.plan(*inputs).forward) == 1 + 3 + 1 + 4
    with pytest.raises(ValueError, match=r"extra inputs: expected 3, for .*ops\[1\] \(Sequential\), .*, got 0"):
        module.apply(variables, inputs[0])


# Shared ops


@pytest.mark.parametrize(
    ("twice", "recipe"),
    [*(("one run", recipe) for recipe in RECIPES), ("two runs", "delayed"), ("a list", "delayed")],
)
def test_a_shared_op_is_two_ops_with_equal_parameters(twice, recipe):
    """Gradients are summed; each place has FP8 state of its own: two steps, bit for bit those of two ops."""

    def make(first, second):
        between = jnp.tanh if twice == "two runs" else ops.SiLU()
        return te.Sequential([first, between, [second] if twice == "a list" else second], recipe=RECIPES[recipe])

    linear = dense(32, "l")
    shared, apart = make(linear, linear), make(dense(32, "l"), dense(32, "m"))
    x = random(0, 32, 32)
    rest, state = te.state.split(jax.jit(shared.init)(jax.random.key(1), x))
    kernel = rest["params"].pop("l")
    assert rest == {"params": {}}
    of_shared, of_apart = gradients_of(shared), gradients_of(apart)
    names = jax.eval_shape(apart.init, jax.random.key(1), x).get(COLLECTION, {})  # those of the state say m for one l
    for _ in range(2):
        y, (grads, dx) = of_shared(te.state.merge({"params": {"l": kernel}}, state), x)
        same = dict(zip(sorted(names), (state[name] for name in sorted(state)), strict=True))
        want_y, (want, want_dx) = of_apart(te.state.merge({"params": {"l": kernel, "m": kernel}}, same), x)
        (grads, new_state), (want, want_state) = te.state.split(grads), te.state.split(want)
        total = np.float32(want["params"]["l"]["kernel"]) + np.float32(want["params"]["m"]["kernel"])
        np.testing.assert_allclose(grads["params"]["l"]["kernel"], total, rtol=1e-6, atol=1e-6)
        got, want = (y, dx, new_state), (want_y, want_dx, want_state)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(a, b)
        if recipe == "delayed":
            uses = jnp.concatenate([leaf["uses"] for leaf in jax.tree.leaves(new_state, is_leaf=lambda n: "uses" in n)])
            # A quantizer for each role in each place, each used once.
            np.testing.assert_array_equal(jnp.sum(uses[:, :64] != 0, axis=1), np.ones(6))
        state = te.state.apply(state, new_state)


# Errors


def make(**kwargs):
    return ops.MakeExtraOutput(**kwargs)


def take(**kwargs):
    return ops.AddExtraInput(**kwargs)


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (
            [take(channel="r")],
            "ops[0] (AddExtraInput): channel 'r': expected an op before it that makes it, such as Make",
        ),
        (
            [take(channel="r"), make(channel="r")],
            "in the same list or one around it, got ops[1] (MakeExtraOutput), after it",
        ),
        (
            [[make(channel="r"), take(channel="r")], take(channel="r")],
            "got ops[0][0] (MakeExtraOutput), in a list of its",
        ),
        (
            [make(channel="r"), make(channel="r"), take(channel="r")],
            "ops[1] (MakeExtraOutput): channel: expected a channel of its own in this list, got 'r', which ops[0]",
        ),
        (
            [make(channel="r")],
            "ops[0] (MakeExtraOutput): channel 'r': expected an op after it that takes it, such as Add",
        ),
        (
            [make(channel="r"), ops.Linear(16), take(channel="r")],
            "of ops[2] (AddExtraInput), made by ops[0] (MakeExtraOutput): expected shape (4, 16), got (4, 32)",
        ),
        (
            [make(channel="r"), jnp.sin, ops.Linear(16), take(channel="r")],
            "ops[0] (MakeExtraOutput), for ops[3] (AddExtraInput): expected shape (4, 16), got (4, 32)",
        ),
        ([take()], "extra inputs: expected 1, for ops[0] (AddExtraInput), got 0"),
        (
            [ops.Linear(15), ops.SwiGLU()],
            "expected an even last dimension (gate and value), got shape (4, 15); at ops[1] (SwiGLU), whose input "
            "float32[4, 15] is the result of ops[0] (Bias)",
        ),
        (
            [ops.Linear(16), [ops.Reshape((7, -1))]],
            "got shape (4, 16); at ops[1][0] (Reshape), whose input float32[4, 16] is the result of ops[0] (Bias)",
        ),
    ],
)
def test_errors_name_ops_and_places(chain, message):
    module, x = te.Sequential(chain), jnp.ones((4, 32))
    with pytest.raises(ValueError, match=re.escape(message)):
        module.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=re.escape(message)):
        module.plan(x)


def test_an_op_that_breaks_its_promise_of_extra_values():
    @dataclasses.dataclass(frozen=True)
    class Half(ops.MakeExtraOutput):
        makes: int = 1

        def forward(self, ctx, x):
            ctx.extra_outputs = (x[..., :16],) * self.makes
            return x

        def backward(self, ctx, dy):
            return dy

    @dataclasses.dataclass(frozen=True)
    class Forgets(ops.AddExtraInput):
        def backward(self, ctx, dy):
            return dy

    x = jnp.ones((4, 32))
    with pytest.raises(
        ValueError, match=r"Half\(ops_0\): ctx.extra_outputs\[0\] after forward: expected shape \(4, 32\)"
    ):
        te.Sequential([Half(channel="r"), take(channel="r")]).apply({}, x)
    with pytest.raises(ValueError, match=r"Half\(ops_0\): ctx.extra_outputs after forward: expected 1 values, got 2"):
        te.Sequential([Half(makes=2)]).apply({}, x)
    with pytest.raises(
        ValueError, match=r"Forgets\(ops_0\): ctx.extra_input_grads after backward: expected 1 cotangents"
    ):
        jax.grad(lambda x: te.Sequential([Forgets()]).apply({}, x, x).sum())(x)


def test_errors_of_types():
    with pytest.raises(TypeError, match=r"MakeExtraOutput: channel: expected None or a name, got 3"):
        make(channel=3)
    with pytest.raises(TypeError, match=r"ops\[0\]\[1\]: expected an op, a Flax module or a function"):
        te.Sequential([[ops.Identity(), 3]]).init(jax.random.key(0), jnp.ones((4, 32)))
    with pytest.raises(TypeError, match=r"ops\[1\]: expected .* no nnx module \(te.nnx.Sequential takes those\)"):
        te.Sequential([ops.Identity(), nnx.Linear(32, 32, rngs=nnx.Rngs(0))]).init(jax.random.key(0), jnp.ones((4, 32)))
    with pytest.raises(TypeError, match=r"extra input 0, for ops\[0\] \(AddExtraInput\): expected dtype bfloat16"):
        te.Sequential([take()]).init(jax.random.key(0), jnp.ones((4, 32)), jnp.ones((4, 32), jnp.int32))


def test_what_fails_inside_of_a_module_says_in_which():
    def multiply(x):
        return x @ jnp.ones((7, 7))

    with pytest.raises(TypeError) as caught:
        te.Sequential([ops.Linear(16), multiply]).init(jax.random.key(0), jnp.ones((4, 32)))
    assert (
        caught.value.__notes__[0] == "in ops[1] (multiply), whose input float32[4, 16] is the result of ops[0] (Bias)"
    )
