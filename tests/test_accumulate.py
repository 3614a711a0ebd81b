"""Kernels quantized once per step, and gradients accumulated over microbatches."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
from te_jax import ops
from te_jax.quant.state import COLLECTION, KERNELS
from te_jax.testing import hlo

DELAYED = te.DelayedScaling(amax_history_len=4)
RECIPES = {"delayed": DELAYED, "current": te.CurrentScaling(), "block": te.BlockScaling()}
BF16 = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
ROWS, WIDTH, N = 128, 64, 4
MICRO = jax.ShapeDtypeStruct((ROWS // N, WIDTH), jnp.bfloat16)


def mlp(recipe, **kwargs):
    chain = [ops.RMSNorm(), ops.Linear(128), ops.SwiGLU(), ops.Linear(WIDTH)]
    return te.Sequential(chain, recipe=recipe, **(BF16 | kwargs))


def data(seed=0):
    x, y = jax.random.normal(jax.random.key(seed), (2, ROWS, WIDTH), jnp.bfloat16)
    return x, y


def loss_of(module):
    def loss(variables, batch):
        x, y = batch
        return jnp.mean((module.apply(variables, x).astype(jnp.float32) - y.astype(jnp.float32)) ** 2)

    return loss


@functools.cache
def trained(recipe):
    """(module, variables with history in their FP8 state)."""
    module = mlp(RECIPES[recipe])
    variables = module.init(jax.random.key(1), data()[0])
    step = jax.jit(functools.partial(te.accumulate_gradients, loss_of(module), num_microbatches=N))
    for seed in range(2):
        _, grads = step(variables, data(seed))
        params, _ = te.state.split(variables)
        variables = te.state.merge(params, te.state.split(grads)[1])
    return module, variables


def leaves(tree):
    return [(jax.tree_util.keystr(path), np.asarray(x)) for path, x in jax.tree.leaves_with_path(tree)]


def assert_same(got, want):
    for (path, a), (_, b) in zip(leaves(got), leaves(want), strict=True):
        assert a.dtype == b.dtype, path
        np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64), err_msg=path)


# ------------------------------------------------------------------------------------------- kernels quantized once


@pytest.mark.parametrize("recipe", RECIPES)
def test_values_are_those_of_quantizing_in_every_call(recipe):
    module, variables = trained(recipe)
    value_and_grad = jax.jit(jax.value_and_grad(lambda v, k, b: loss_of(module)({**v, **k}, b)))
    quantized = te.quantize_kernels(module, variables, MICRO)
    assert set(quantized) == {*variables, KERNELS}
    kernels = {KERNELS: quantized[KERNELS]}
    assert_same(value_and_grad(variables, kernels, data(5)), value_and_grad(variables, {}, data(5)))


def test_what_the_collection_holds():
    module, variables = trained("delayed")
    made = te.quantize_kernels(module, variables, MICRO)[KERNELS]["fp8_0"]
    assert set(made) == {"linear_1", "linear_3"}
    kernel = variables["params"]["ops_1"]["kernel"]
    entry = made["linear_1"]
    assert {n: (a.shape, a.dtype) for n, a in entry.items()} == {
        "data": ((WIDTH, 128), jnp.float8_e4m3fn),
        "data_t": ((128, WIDTH), jnp.float8_e4m3fn),
        **dict.fromkeys(("scale", "scale_inv", "amax"), ((), jnp.float32)),
    }
    np.testing.assert_array_equal(entry["data"].astype(jnp.float32).T, entry["data_t"].astype(jnp.float32))
    want = np.asarray(kernel.astype(jnp.float32) * entry["scale"]).astype(jnp.float8_e4m3fn)
    np.testing.assert_array_equal(entry["data"].astype(jnp.float32), want.astype(np.float32))
    assert entry["amax"] == jnp.abs(kernel.astype(jnp.float32)).max()


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_forward_pass_that_finds_the_linears_disappears(recipe):
    module, variables = trained(recipe)
    make = jax.jit(lambda v, x: te.quantize_kernels(module, v, x))
    counts = hlo.count_custom_calls(make.lower(variables, data()[0]).compile().as_text())
    assert counts == {"te_jax_quantize": 2, **({"te_jax_scale_read": 1} if recipe == "delayed" else {})}


def test_stale_kernels_do_not_get_into_the_next_step():
    module, variables = trained("delayed")
    quantized = te.quantize_kernels(module, variables, MICRO)
    params, fp8 = te.state.split(quantized)
    assert set(te.state.merge(params, fp8)) == set(variables)
    # One that is there already is replaced, not used.
    doubled = {**quantized, "params": jax.tree.map(lambda p: 2 * p, quantized["params"])}
    assert_same(
        te.quantize_kernels(module, doubled, MICRO),
        te.quantize_kernels(module, {**variables, "params": doubled["params"]}, MICRO),
    )
    # Nor does a model that may write all collections return them.
    assert KERNELS not in module.apply(variables, data()[0], mutable=True)[1]
    assert KERNELS not in module.init(jax.random.key(0), data()[0])


class Scanned(nn.Module):
    axes: tuple[str, ...]
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return mlp(DELAYED, name="mlp")(x), None

        layer = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        layers = nn.scan(layer, length=3, variable_axes=dict.fromkeys(self.axes, 0), split_rngs={"params": True})
        x, _ = layers(name="layers")(x, None)
        return te.flax.DenseGeneral((4, 16), recipe=DELAYED, **BF16, name="head")(x).reshape(x.shape)


@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_layers(remat):
    module = Scanned(("params", COLLECTION, KERNELS), remat)
    variables = module.init(jax.random.key(0), data()[0])
    quantized = te.quantize_kernels(module, variables, MICRO)
    assert quantized[KERNELS]["layers"]["mlp"]["fp8_0"]["linear_1"]["data"].shape == (3, WIDTH, 128)
    assert "linear_0" in quantized[KERNELS]["head"]["fp8_0"]
    accumulate = jax.jit(functools.partial(te.accumulate_gradients, loss_of(module), num_microbatches=N))
    assert_same(accumulate(quantized, data()), accumulate(variables, data()))


def test_shared_ops_have_a_kernel_for_each_use():
    linear = ops.Linear(WIDTH)
    module = te.Sequential([linear, ops.GELU(), linear], recipe=DELAYED, **BF16)
    variables = module.init(jax.random.key(0), data()[0])
    quantized = te.quantize_kernels(module, variables, MICRO)
    assert set(quantized[KERNELS]["fp8_0"]) == {"linear_0", "linear_2"}
    grad = jax.jit(jax.grad(lambda v, k, b: loss_of(module)({**v, **k}, b)))
    assert_same(grad(variables, {KERNELS: quantized[KERNELS]}, data()), grad(variables, {}, data()))


def test_a_transformer_layer():
    module = te.flax.TransformerLayer(num_heads=2, hidden_features=128, recipe=DELAYED, **BF16)
    x = jax.random.normal(jax.random.key(0), (4, 32, WIDTH), jnp.bfloat16)
    variables = module.init(jax.random.key(1), x)
    quantized = te.quantize_kernels(module, variables, x[:1], deterministic=True)
    assert len(jax.tree.leaves(quantized[KERNELS])) == 4 * 5  # linears, fields of each
    loss = lambda v, x: jnp.mean(module.apply(v, x).astype(jnp.float32) ** 2)  # noqa: E731
    accumulate = jax.jit(functools.partial(te.accumulate_gradients, loss, num_microbatches=2))
    assert_same(accumulate(quantized, x), accumulate(variables, x))


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_within_what_is_differentiated(recipe):
    module, variables = trained(recipe)
    loss = loss_of(module)
    got = jax.jit(jax.value_and_grad(lambda v, b: loss(te.quantize_kernels(module, v, MICRO), b)))
    assert_same(got(variables, data(5)), jax.jit(jax.value_and_grad(loss))(variables, data(5)))


def test_a_module_that_writes_to_other_collections():
    class Normalized(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return mlp(DELAYED, name="mlp")(nn.BatchNorm(use_running_average=not train, **BF16)(x))

    module = Normalized()
    variables = module.init(jax.random.key(0), data()[0], True)
    quantized = te.quantize_kernels(module, variables, MICRO, True, mutable=["batch_stats"])
    assert set(quantized) == {*variables, KERNELS}
    assert_same(quantized["batch_stats"], variables["batch_stats"])
    call = functools.partial(module.apply, x=data()[0], train=True, mutable=["batch_stats"])
    assert_same(call(quantized), call(variables))


def test_errors_of_quantize_kernels():
    module, variables = trained("delayed")
    with pytest.raises(TypeError, match=r"quantize_kernels: module: expected a flax.linen module, got function"):
        te.quantize_kernels(loss_of(module), variables, MICRO)
    with pytest.raises(TypeError, match=r"quantize_kernels: variables: expected a dict of collections, got ArrayImpl"):
        te.quantize_kernels(module, jnp.ones(3), MICRO)
    plain = mlp(None)
    with pytest.raises(ValueError, match=r"quantize_kernels: module: expected a module with linears that are quant"):
        te.quantize_kernels(plain, plain.init(jax.random.key(0), data()[0]), MICRO)
    odd = jax.ShapeDtypeStruct((10, WIDTH), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"one without .*: .*Linear\(ops_1\): tokens: 10 is not a multiple of 16; "):
        te.quantize_kernels(module, variables, odd)
    scanned = Scanned(("params", COLLECTION))
    variables = scanned.init(jax.random.key(0), data()[0])
    with pytest.raises(ValueError, match=r"fp8_kernels: expected a collection that can be written: nn.scan and nn.vm"):
        te.quantize_kernels(scanned, variables, MICRO)


def test_kernels_of_another_model_are_refused():
    module, variables = trained("delayed")
    quantized = te.quantize_kernels(module, variables, MICRO)
    x = data()[0]

    def change(linear, **fields):
        run = quantized[KERNELS]["fp8_0"]
        entry = {n: a for n, a in {**run[linear], **fields}.items() if a is not None}
        return {**quantized, KERNELS: {"fp8_0": {**run, linear: entry}}}

    for wrong, message in (
        (
            change("linear_1", data=jnp.zeros((WIDTH, 64), jnp.float8_e4m3fn)),
            r"n\[64, 128\], got fl.*4, 64",
        ),
        (change("linear_3", data_t=jnp.zeros((64, 64), jnp.float8_e5m2)), r"float8_e4m3fn\[64, 64\], got float8_e5m2"),
        (change("linear_3", amax=None), r"3/amax: expected float32\[\], got none"),
        ({**quantized, KERNELS: {"fp8_0": {"linear_1": quantized[KERNELS]["fp8_0"]["linear_1"]}}}, r"got none"),
    ):
        with pytest.raises(ValueError, match=rf"Sequential: fp8_kernels/fp8_0/linear_.*{message}"):
            module.apply(wrong, x)


# ------------------------------------------------------------------------------------------------- microbatches


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_mean_over_microbatches(recipe):
    """Equal to a Python loop over the same microbatches, its gradients summed in fp32, its state accumulated."""
    module, variables = trained(recipe)
    batch = data(7)
    one = jax.jit(jax.value_and_grad(loss_of(module)))
    parts = [one(variables, jax.tree.map(lambda x, i=i: x[i::N], batch)) for i in range(N)]
    loss, grads = jax.jit(functools.partial(te.accumulate_gradients, loss_of(module), num_microbatches=N))(
        variables, batch
    )
    np.testing.assert_allclose(loss, np.mean([float(part) for part, _ in parts]), rtol=1e-6)
    got, got_state = te.state.split(grads)
    wide = [jax.tree.map(lambda g: g.astype(jnp.float32), te.state.split(g)[0]) for _, g in parts]
    mean = jax.tree.map(lambda *g: (sum(g[1:], g[0]) / N).astype(jnp.bfloat16), *wide)
    assert_same(got, mean)
    state = functools.reduce(te.state.accumulate, [te.state.split(g)[1] for _, g in parts])
    assert_same(got_state, state)
    assert bool(got_state) == (recipe == "delayed")


def test_equal_to_the_whole_batch():
    """Without FP8 to the rounding of fp32; with it up to the scale of dy, which is a mean over fewer examples."""
    module = mlp(None, dtype=jnp.float32, param_dtype=jnp.float32)
    batch = jax.tree.map(lambda x: x.astype(jnp.float32), data())
    variables = module.init(jax.random.key(0), batch[0])
    loss, grads = te.accumulate_gradients(loss_of(module), variables, batch, num_microbatches=N)
    want_loss, want = jax.value_and_grad(loss_of(module))(variables, batch)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    for (path, a), (_, b) in zip(leaves(grads), leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * np.abs(b).max(), err_msg=path)

    module, variables = trained("delayed")
    _, grads = te.accumulate_gradients(loss_of(module), variables, data(), num_microbatches=N)
    _, whole = jax.value_and_grad(loss_of(module))(variables, data())
    run, whole_run = grads[COLLECTION]["fp8_0"], whole[COLLECTION]["fp8_0"]
    rows = np.array([0, 1, 3, 4])  # x and kernel of both linears
    for leaf in run:
        np.testing.assert_array_equal(run[leaf][rows], whole_run[leaf][rows], err_msg=leaf)
    for (path, a), (_, b) in zip(leaves(grads["params"]), leaves(whole["params"]), strict=True):
        a, b = a.astype(np.float64), b.astype(np.float64)
        assert np.sqrt(np.mean((a - b) ** 2)) <= 0.047 * np.sqrt(np.mean(b**2)), path


def test_no_kernel_is_quantized_in_the_loop():
    module, variables = trained("delayed")

    def step(variables, batch):
        return te.accumulate_gradients(loss_of(module), variables, batch, num_microbatches=N)

    def loop(variables):
        """(its custom calls, lines of te_jax_quantize) of a program that is but the loop, lowered for CUDA."""
        text = jax.jit(step).trace(variables, data()).lower(lowering_platforms=("cuda",)).as_text()
        return hlo.count_custom_calls(text), [line for line in text.splitlines() if "@te_jax_quantize" in line]

    calls, quantizes = loop(variables)
    assert calls["te_jax_quantize"] == len(quantizes) == 3
    calls_once, (dy,) = loop(te.quantize_kernels(module, variables, MICRO))
    assert calls - calls_once == {"te_jax_quantize": 2}
    assert f"tensor<{ROWS // N}x{WIDTH}xbf16>" in dy


REGIMES = ("auto", "explicit", "manual")


@pytest.mark.parametrize("regime", REGIMES)
def test_data_parallel(regime):
    """On 4 devices: equal state, no collective but sums and maxima, each microbatch on all devices."""
    module, variables = trained("delayed")
    kind = AxisType.Auto if regime == "auto" else AxisType.Explicit
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])
    micro = jax.ShapeDtypeStruct((ROWS // 2 // (4 if regime == "manual" else 1), WIDTH), jnp.bfloat16)

    def loss(variables, batch):
        value = loss_of(module)(variables, batch)
        return jax.lax.pmean(value, "data") if regime == "manual" else value

    def step(variables, batch):
        variables = te.quantize_kernels(module, variables, micro)
        return te.accumulate_gradients(loss, variables, batch, num_microbatches=2)

    want_loss, want = jax.jit(
        functools.partial(te.accumulate_gradients, loss_of(module), num_microbatches=2)
    )(variables, data())  # fmt: skip
    if regime == "manual":
        step = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    with jax.set_mesh(mesh):
        batch = jax.device_put(data(), NamedSharding(mesh, P("data")))
        everywhere = jax.device_put(variables, NamedSharding(mesh, P()))
        compiled = jax.jit(step).lower(everywhere, batch).compile()
        got_loss, got = compiled(everywhere, batch)
    assert set(hlo.count_collectives(compiled.as_text())) == {"all-reduce"}
    rows = {call.operands[0][1][0] for call in hlo.custom_calls(compiled.as_text()) if "norm" in call.target}
    assert rows == {ROWS // 2 // 4}
    np.testing.assert_allclose(got_loss, want_loss, rtol=1e-5)
    assert_same(got[COLLECTION], want[COLLECTION])
    for (path, a), (_, b) in zip(leaves(got["params"]), leaves(want["params"]), strict=True):
        a, b = a.astype(np.float64), b.astype(np.float64)
        np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02 * np.abs(b).max(), err_msg=path)


@pytest.mark.parametrize(
    ("loss_fn", "error", "got"),
    [
        (lambda v, b: (jnp.sum(v["params"]), b), TypeError, "tuple"),
        (lambda v, b: v["params"], ValueError, r"shape \(3,\)"),
        (lambda v, b: jnp.int32(1), TypeError, "int32"),
    ],
)
def test_a_loss_that_is_no_scalar(loss_fn, error, got):
    with pytest.raises(error, match=f"te_jax.accumulate_gradients: loss_fn: expected to return a scalar .*, got {got}"):
        te.accumulate_gradients(loss_fn, {"params": jnp.ones(3)}, jnp.ones((4, 2)), num_microbatches=2)


def test_dropout_with_keys_in_the_batch():
    """Each microbatch is dropped with the key of its first row."""
    module = nn.Dropout(0.5, deterministic=False)
    batch = {"x": jnp.ones((8, 64)), "keys": jax.random.split(jax.random.key(0), 8)}

    def loss(variables, part):
        return jnp.sum(module.apply({}, part["x"] * variables["params"], rngs={"dropout": part["keys"][0]}))

    variables = {"params": jnp.ones(64)}
    _, grads = jax.jit(functools.partial(te.accumulate_gradients, loss, num_microbatches=2))(variables, batch)
    one, other = (jax.grad(loss)(variables, jax.tree.map(lambda x, i=i: x[i::2], batch))["params"] for i in range(2))
    assert not np.array_equal(one, other)
    np.testing.assert_array_equal(grads["params"], (one + other) / 2)


@pytest.mark.parametrize(
    ("variables", "batch", "n", "message"),
    [
        (jnp.ones(2), jnp.ones((4, 2)), 2, "variables: expected a dict of collections"),
        ({}, jnp.ones((4, 2)), 0, "num_microbatches: expected a positive int, got 0"),
        ({}, jnp.ones((4, 2)), 2.0, "num_microbatches: expected a positive int, got 2.0"),
        ({}, {}, 2, "batch: expected at least one array, got none"),
        ({}, {"x": jnp.ones((4, 2)), "t": 3.0}, 2, r"batch\['t'\]: expected an array \[B, ...\], got shape \(\)"),
        ({}, (jnp.ones((4, 2)), jnp.ones(6)), 2, r"batch\[1\]: expected 4 rows, as the others, got 6"),
        ({}, [jnp.ones((6, 2))], 4, r"batch\[0\]: expected a multiple of num_microbatches=4 rows, got 6"),
    ],
)
def test_errors_of_accumulate_gradients(variables, batch, n, message):
    with pytest.raises((ValueError, TypeError), match=f"accumulate_gradients: {message}"):
        te.accumulate_gradients(lambda v, b: 0.0, variables, batch, num_microbatches=n)


def test_variables_that_cannot_be_differentiated_are_named():
    message = r"variables\['params'\]\['n'\]: expected a floating point dtype, as it is differentiated, got int32"
    with pytest.raises(TypeError, match=f"accumulate_gradients: {message}"):
        te.accumulate_gradients(
            lambda v, b: 0.0, {"params": {"n": jnp.arange(2)}}, jnp.ones((4, 2)), num_microbatches=2
        )


def test_a_microbatch_that_explicit_axes_cannot_split():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((16, 2)), NamedSharding(mesh, P("data")))
        with pytest.raises(ValueError, match=r"batch: expected a multiple of num_microbatches=8 times its 4 shards ro"):
            te.accumulate_gradients(lambda v, x: x.sum(), {}, x, num_microbatches=8)
        loss, _ = te.accumulate_gradients(lambda v, x: x.sum(), {}, x, num_microbatches=4)
        assert loss == 8
