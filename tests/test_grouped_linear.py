"""GroupedLinear and GroupedDense: values and gradients against fp64 NumPy, transformations, errors, state, meshes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
from te_jax import ops
from te_jax.quant import state as state_lib
from te_jax.quant.state import COLLECTION
from te_jax.testing import grouped, hlo, oracle, tolerance

G, K, N, ROWS = 4, 32, 48, grouped.ROWS
RECIPES = {
    "delayed": te.DelayedScaling(amax_history_len=3),
    "current": te.CurrentScaling(),
    "block": te.BlockScaling(),
    "none": None,
}
# Experts whose tokens differ by powers of two: one scale for all of them would cost most of them their bits.
LOUDNESS = np.exp2(4.0 * np.arange(G))


def sizes_of(name="ragged"):
    return jnp.array(grouped.SIZES[name], jnp.int32)


def tokens(dtype=jnp.bfloat16, seed=0, loud=LOUDNESS):
    x = np.random.default_rng(seed).normal(size=(ROWS, K))
    for g, rows in enumerate(grouped.rows_of(grouped.SIZES["ragged"])):
        x[rows] *= loud[g]
    return jnp.asarray(x, dtype)


def setup(recipe, dtype=jnp.bfloat16, **fields):
    module = te.flax.GroupedDense(G, N, recipe=recipe, dtype=dtype, bias_init=nn.initializers.normal(1.0), **fields)
    x, sizes = tokens(dtype), sizes_of()
    return module, module.init(jax.random.key(1), x, sizes), x, sizes


def loss_of(module, weights):
    def loss(variables, x, sizes):
        y = module.apply(variables, x, sizes)
        return jnp.sum(y.astype(jnp.float32) * weights), y

    return loss


def relative_errors(got, want):
    """Of each group's rows (or of each group): the norm of the difference over the norm."""
    got, want = oracle.f64(got), oracle.f64(want)
    parts = grouped.rows_of(grouped.SIZES["ragged"]) if len(want) == ROWS else range(G)
    for part in parts:
        norm = np.linalg.norm(want[part])
        yield np.linalg.norm(got[part] - want[part]) / norm if norm else np.abs(got[part]).max(initial=0)


CASES = [(name, jnp.bfloat16) for name in RECIPES] + [("current", jnp.float16), ("current", jnp.float32)]


@pytest.mark.parametrize(("recipe", "dtype"), CASES, ids=lambda x: x if isinstance(x, str) else jnp.dtype(x).name)
def test_values_and_gradients_against_fp64(recipe, dtype):
    recipe = RECIPES[recipe]
    module, variables, x, sizes = setup(recipe, dtype)
    weights = tokens(jnp.float32, 5, 1 / LOUDNESS) @ np.ones((K, N)) / K + tokens(jnp.float32, 6)[:, :1]
    step = jax.jit(jax.value_and_grad(loss_of(module, weights), argnums=(0, 1), has_aux=True))
    (_, y), (grads, dx) = step(variables, x, sizes)

    kernel, bias = variables["params"]["kernel"], oracle.f64(variables["params"]["bias"])
    dy = oracle.f64(jnp.asarray(weights, dtype))
    want_y = grouped.rows_product(x, kernel, sizes)
    for g, rows in enumerate(grouped.rows_of(sizes)):
        want_y[rows] += bias[g]
    want = {
        "y": (y, want_y, ("e4m3", "e4m3")),
        "dx": (dx, grouped.rows_product(dy, np.swapaxes(kernel, 1, 2), sizes), ("e5m2", "e4m3")),
        "dw": (grads["params"]["kernel"], grouped.contracted_product(x, dy, sizes), ("e4m3", "e5m2")),
        "dbias": (grads["params"]["bias"], np.stack([dy[rows].sum(0) for rows in grouped.rows_of(sizes)]), ()),
    }
    for name, (got, expected, formats) in want.items():
        formats = ("e4m3", "e4m3") if formats and recipe == te.BlockScaling() else formats
        quantized = 1.5 * tolerance.relative_rms_error(*formats) if recipe is not None and formats else 0
        allowed = quantized + 4 * tolerance.unit_roundoff(dtype) * (1 if dtype != jnp.float32 else 8)
        assert max(relative_errors(got, expected)) <= allowed, name
        if len(expected) == ROWS:
            assert not np.asarray(got[sum(grouped.SIZES["ragged"]) :]).any(), name  # rows of no group


def test_high_precision_has_second_derivatives():
    module, variables, x, sizes = setup(None, jnp.float32)

    def loss(params, x):
        return jnp.sum(jnp.tanh(module.apply({"params": params}, x / LOUDNESS[-1], sizes)))

    def reference(params, x):
        group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(ROWS), side="right")
        y = jnp.einsum("tk,tkn->tn", x / LOUDNESS[-1], jnp.append(params["kernel"], jnp.zeros((1, K, N)), 0)[group])
        y += jnp.append(params["bias"], jnp.zeros((1, N)), 0)[group]
        return jnp.sum(jnp.tanh(y))

    params = variables["params"]
    for function in (loss, reference):
        grad = jax.grad(lambda p, x, f=function: sum(map(jnp.vdot, *map(jax.tree.leaves, (jax.grad(f)(p, x), p)))))
        results = jax.jit(grad)(params, x)
        if function is loss:
            got = results
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(results), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("recipe", [RECIPES["delayed"], None], ids=["delayed", "none"])
def test_other_sizes_are_the_same_program(recipe):
    module, variables, x, _ = setup(recipe)
    traces = []

    @jax.jit
    def step(variables, x, sizes):
        traces.append(sizes)
        return jax.grad(lambda v: module.apply(v, x, sizes).astype(jnp.float32).sum())(variables)

    for name in grouped.SIZES:
        grads = step(variables, x, sizes_of(name))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
        empty = np.flatnonzero(sizes_of(name) == 0)
        assert not np.asarray(grads["params"]["kernel"])[empty].any()
    assert len(traces) == 1


def test_state_is_that_of_each_expert():
    """An expert without tokens keeps its history; te.state's rules hold for [groups, quantizers, ...] too."""
    recipe = te.DelayedScaling(amax_history_len=3)
    module, variables, x, _ = setup(recipe)
    state = variables[COLLECTION]["fp8_0_grouped"]
    assert {name: leaf.shape for name, leaf in state.items()} == {
        "amax_history": (G, 3, 3),
        "scale": (G, 3),
        "uses": (G, 3, 66),
    }
    step = jax.jit(jax.grad(lambda v, x, s: module.apply(v, x, s).astype(jnp.float32).sum()))
    for name in ("all rows", "ragged", "ragged"):
        _, before = te.state.split(variables)
        _, after = te.state.split(step(variables, x, sizes_of(name)))
        te.state.check(before, after)
        variables = te.state.merge({"params": variables["params"]}, te.state.apply(before, after))
    view = state_lib.read(variables[COLLECTION]["fp8_0_grouped"], np.array([448, 448, 57344], np.float32), recipe)
    assert not view.bad.any()
    xs = np.abs(oracle.f64(x))
    amaxes = [[xs[rows].max(initial=0) for rows in grouped.rows_of(grouped.SIZES[name])] for name in
              ("ragged", "ragged", "all rows")]  # newest first  # fmt: skip
    history = np.array(amaxes).T
    history[1] = [amaxes[2][1], 0, 0]  # had tokens in the first step alone, and nothing since
    np.testing.assert_allclose(view.history[:, 0], history, rtol=1e-6)
    np.testing.assert_allclose(view.scale[:, 0], 448 / history.max(1), rtol=1e-6)


def test_vmap_scan_and_remat():
    recipe = RECIPES["delayed"]
    module, variables, x, sizes = setup(recipe, use_bias=False)

    def loss(variables, x, sizes):
        return jnp.sum(module.apply(variables, x, sizes).astype(jnp.float32) ** 2)

    grad = jax.grad(loss)
    xs, all_sizes = jnp.stack([x, -2 * x]), jnp.stack([sizes, sizes_of("all rows")])
    want = [jax.jit(grad)(variables, *example) for example in zip(xs, all_sizes, strict=True)]
    for name, function in {
        "vmap": lambda v: jax.vmap(grad, (None, 0, 0))(v, xs, all_sizes),
        "scan": lambda v: jax.lax.scan(lambda c, e: (c, grad(v, *e)), 0, (xs, all_sizes))[1],
        "remat": lambda v: jax.lax.map(lambda e: jax.grad(jax.checkpoint(loss))(v, *e), (xs, all_sizes)),
    }.items():
        got = jax.jit(function)(variables)
        for i in range(2):
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want[i]), strict=True):
                np.testing.assert_array_equal(np.asarray(a[i]), b, err_msg=name)


def test_kernels_that_are_quantized_once():
    module, variables, x, sizes = setup(te.CurrentScaling())
    made = te.quantize_kernels(module, variables, x, sizes)
    text = jax.jit(module.apply).lower({**variables, **made}, x, sizes).as_text()
    assert hlo.count_custom_calls(text) == {"te_jax_quantize": 1, "te_jax_grouped_gemm": 1}
    with_made = jax.jit(module.apply)({**variables, **made}, x, sizes)
    np.testing.assert_array_equal(oracle.f64(with_made), oracle.f64(jax.jit(module.apply)(variables, x, sizes)))


def mlp(first, second, between):
    return [
        [ops.GroupedLinear(G, 2 * N, sizes=first)],
        between,
        ops.GroupedLinear(G, K, use_bias=False, sizes=second),
        ops.AddExtraInput(),
    ]


@pytest.mark.parametrize("between", [ops.SwiGLU(), jax.nn.relu], ids=["one run", "two runs"])
def test_linears_share_the_sizes(between):
    """What both name is passed once, where the first takes its own; plan and gradients are those of two inputs."""
    once, twice = (
        te.Sequential(mlp(*names, between), recipe=te.DelayedScaling(amax_history_len=2))
        for names in (("experts",) * 2, (None, "experts"))
    )
    x, sizes = setup(None)[2], sizes_of()
    variables = jax.jit(once.init)(jax.random.key(1), x, sizes, x)
    shapes = (jax.ShapeDtypeStruct((G,), jnp.int32), jax.ShapeDtypeStruct(x.shape, x.dtype))
    assert once.extra_input_types(x) == shapes
    assert once.plan(x, sizes, x) == twice.plan(x, sizes, sizes, x)

    def gradients(module, *extras):
        return jax.jit(jax.grad(lambda v, x: (module.apply(v, x, *extras) ** 2).sum(), argnums=(0, 1)))(variables, x)

    jax.tree.map(np.testing.assert_array_equal, gradients(once, sizes, x), gradients(twice, sizes, sizes, x))
    message = r"extra inputs: expected 2, for .*GroupedLinear.* and .*GroupedLinear.*, .*AddExtraInput.*, got 3"
    with pytest.raises(ValueError, match=message):
        once.apply(variables, x, sizes, sizes, x)
    typo = te.Sequential([ops.GroupedLinear(G, N, sizes="a"), ops.GroupedLinear(G, N, sizes="b")])
    message = r"expected 2, for ops\[0\] \(GroupedLinear\) as 'a', ops\[1\] \(GroupedLinear\) as 'b', got 1"
    with pytest.raises(ValueError, match=message):
        typo.init(jax.random.key(0), x, sizes)
    unlike = te.Sequential([ops.GroupedLinear(G, N, sizes="a"), ops.GroupedLinear(G + 1, N, sizes="a")])
    with pytest.raises(
        ValueError, match=r"extra input 0, for ops\[1\] \(GroupedLinear\): expected shape \(5,\), got \(4,\)"
    ):
        unlike.init(jax.random.key(0), x, sizes)
    with pytest.raises(TypeError, match="GroupedLinear: sizes: expected None or a name, got ''"):
        ops.GroupedLinear(G, N, sizes="")


def test_errors():
    module, variables, x, _ = setup(te.CurrentScaling())
    for sizes, error, message in (
        (
            (5, -1, 17, 9),
            ValueError,
            r"GroupedLinear: group_sizes: expected no negative size, got group_sizes\[1\] = -1; at .*GroupedLinear",
        ),
        ((30, 0, 5, 3), ValueError, r"sizes that add up to 37 \(the tokens of x\) at most, got 38"),
        ((5, 0, 17), ValueError, r"extra input 0, for .*GroupedLinear.*: expected shape \(4,\), got \(3,\)"),
        ((5.0, 0, 17, 9), TypeError, r"extra input 0, for .*GroupedLinear.*: expected integers, got float32"),
    ):
        with pytest.raises(error, match=message):
            module.apply(variables, x, jnp.array(sizes))
    # What tracing can't see is seen when the program runs.
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"INVALID_ARGUMENT.*a sum of at most 37"):
        jax.block_until_ready(jax.jit(module.apply)(variables, x, jnp.array([30, 0, 5, 3])))
    chain = te.Sequential([ops.GroupedLinear(G, N)])
    with pytest.raises(ValueError, match=r"Sequential: extra inputs: expected 1, for .*GroupedLinear.*, got 0"):
        chain.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=r"GroupedLinear: x: expected 2 dimensions, \[tokens, features\]"):
        chain.init(jax.random.key(0), x[None], sizes_of())
    with pytest.raises(ValueError, match="GroupedLinear: num_groups: expected a positive int, got 0"):
        ops.GroupedLinear(0, 16)
    with pytest.raises(ValueError, match=r"a linear that can be quantized.*input features: 24 is not a multiple of 16"):
        te.flax.GroupedDense(G, N, recipe=te.CurrentScaling(strict=True)).init(jax.random.key(0), x[:, :24], sizes_of())


def test_plan():
    module, _, x, sizes = setup(te.DelayedScaling())
    text = str(module.plan(x, sizes))
    assert "reads the scales of 12 quantizers" in text
    assert "accumulation: dgrad precise, wgrad precise" in text
    odd = te.flax.GroupedDense(G, 24, recipe=te.CurrentScaling(), dtype=jnp.bfloat16).plan(x, sizes)
    assert "not quantized: output features: 24 is not a multiple of 16" in str(odd)
    assert "jnp reference" in str(te.flax.GroupedDense(G, N, recipe=te.BlockScaling()).plan(x, sizes))


def test_lowered_for_cuda():
    """The custom calls of a whole step, and what is given to them where sizes can't be."""
    module, variables, x, sizes = setup(te.DelayedScaling(amax_history_len=3), use_bias=False)
    step = jax.jit(jax.grad(lambda v, x: module.apply(v, x, sizes).astype(jnp.float32).var(), argnums=(0, 1)))
    text = step.trace(variables, x).lower(lowering_platforms=("cuda",)).as_text()
    assert hlo.count_custom_calls(text) == {
        "te_jax_scale_read": 1,
        "te_jax_quantize": 3,
        "te_jax_grouped_gemm": 2,
        "te_jax_grouped_wgrad": 1,
        "te_jax_scale_write": 1,
    }


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [(AxisType.Auto, RECIPES["delayed"]), (AxisType.Explicit, RECIPES["delayed"]), (AxisType.Explicit, None)],
    ids=["auto-delayed", "explicit-delayed", "explicit-none"],
)
def test_features_over_a_mesh(kind, recipe):
    module = te.flax.GroupedDense(G, 64, recipe=recipe, dtype=jnp.bfloat16)
    x, sizes = tokens(), sizes_of()
    variables = module.init(jax.random.key(1), x, sizes)
    mesh = jax.make_mesh((2,), ("model",), axis_types=(kind,))

    def step(variables, x, sizes):
        return jax.value_and_grad(lambda v, x: jnp.sum(module.apply(v, x, sizes).astype(jnp.float32) ** 2), (0, 1))(
            variables, x
        )

    want = jax.jit(step)(variables, x, sizes)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    params = {"kernel": put(variables["params"]["kernel"], None, None, "model"),
              "bias": put(variables["params"]["bias"], None, "model")}  # fmt: skip
    sharded = jax.tree.map(put, {**variables, "params": {}}) | {"params": params}
    with jax.set_mesh(mesh):
        compiled = jax.jit(step).lower(sharded, put(x), put(sizes)).compile()
        got = compiled(sharded, put(x), put(sizes))
    text = compiled.as_text()
    assert set(hlo.count_collectives(text)) <= {"all-reduce"}
    gemms = [call for call in hlo.custom_calls(text) if call.target == "te_jax_grouped_gemm"]
    assert sorted(call.operands[1][1] for call in gemms) == sorted(
        [(G, K, K)] * 2  # K is half of the features, too
    )
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = oracle.f64(a), oracle.f64(b)
        assert np.linalg.norm(a - b) <= 2.0**-7 * np.linalg.norm(b), jax.tree_util.keystr(path)


@pytest.mark.parametrize("recipe", [RECIPES["delayed"], RECIPES["current"], None], ids=["delayed", "current", "none"])
def test_experts_over_a_mesh(recipe):
    """Expert parallelism inside of shard_map: a device has one expert, its scales and its state."""
    module, variables, x, sizes = setup(recipe)
    rows = [x[where] for where in grouped.rows_of(sizes)]
    capacity = 20
    shards = jnp.stack([jnp.pad(part, ((0, capacity - len(part)), (0, 0))) for part in rows])  # [G, capacity, K]
    local = te.flax.GroupedDense(1, N, recipe=recipe, dtype=jnp.bfloat16)
    mesh = jax.make_mesh((G,), ("expert",), axis_types=(AxisType.Explicit,))

    def loss(variables, x, sizes):
        y = local.apply(variables, x[0], sizes)[None]
        return jax.lax.psum(jnp.sum(y.astype(jnp.float32) ** 2), "expert"), y

    def shard(variables, x, sizes):
        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(variables, x, sizes)

    by_expert = P("expert")
    out = ((P(), by_expert), (by_expert, by_expert))
    step = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=(by_expert,) * 3, out_specs=out))
    arguments = jax.device_put((variables, shards, sizes), NamedSharding(mesh, by_expert))
    compiled = step.lower(*arguments).compile()
    assert set(hlo.count_collectives(compiled.as_text())) == {"all-reduce"}  # of the loss: no scale is agreed on
    (_, y), (grads, dx) = compiled(*arguments)

    def whole(variables, x):
        y = module.apply(variables, x, sizes)
        return jnp.sum(y.astype(jnp.float32) ** 2), y

    (_, want_y), (want_grads, want_dx) = jax.jit(jax.value_and_grad(whole, argnums=(0, 1), has_aux=True))(variables, x)
    exact = recipe is not None
    for g, where in enumerate(grouped.rows_of(sizes)):
        for a, b in ((y, want_y), (dx, want_dx)):
            pair = oracle.f64(a)[g, : len(rows[g])], oracle.f64(b)[where]
            np.testing.assert_allclose(*pair, rtol=0 if exact else 2.0**-7, atol=0 if exact else 0.1)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(oracle.f64(a), oracle.f64(b), rtol=1e-3, atol=1e-3 * np.abs(oracle.f64(b)).max())
