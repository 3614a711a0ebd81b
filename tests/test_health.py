"""What quantizing does to tensors: measured against NumPy, flagged before a loss shows it, and nothing in the step."""

import functools
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
from te_jax import ops
from te_jax.quant.state import COLLECTION

DELAYED = te.DelayedScaling(amax_history_len=4)
RECIPES = {"delayed": DELAYED, "current": te.CurrentScaling(), "block": te.BlockScaling()}
ROWS, K, N = 32, 64, 48
FORMATS = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0, 464.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0, 61440.0)}


def mean_square(module):
    return lambda variables, x: jnp.mean(module.apply(variables, x).astype(jnp.float32) ** 2)


def weighted_sum(module, weights):
    """A loss whose dy is ``weights``."""
    return lambda variables, x: jnp.sum(module.apply(variables, x) * weights)


def measured(loss_fn, module, variables, *batch):
    probe = te.health.instrument(module, variables, batch[0])
    return jax.jit(functools.partial(te.health.measure, loss_fn))({**variables, **probe}, *batch)


def want(x, scale, fmt):
    """(amax, saturated, flushed, nonfinite) by float64 NumPy, of a tensor in float32."""
    x = np.asarray(x, np.float64)
    dtype, largest, limit = FORMATS[fmt]
    finite = np.isfinite(x)
    scaled = np.clip(np.where(finite, x, 0.0) * scale, -largest, largest)
    saturated = finite & (np.abs(x * scale) > limit)
    flushed = finite & (x != 0) & (scaled.astype(dtype).astype(np.float64) == 0)
    return np.abs(x[finite]).max(), saturated.mean(), flushed.mean(), (~finite).mean()


def heavy_tailed(key, shape, octaves=20):
    return jax.random.normal(key, shape) * 2.0 ** jax.random.uniform(key, shape, minval=-octaves, maxval=0)


# ------------------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_amax_scale_and_fractions(recipe):
    module = te.flax.Dense(N, use_bias=False, recipe=RECIPES[recipe])
    keys = jax.random.split(jax.random.key(0), 3)
    x, weights = heavy_tailed(keys[0], (ROWS, K)), heavy_tailed(keys[1], (ROWS, N), 40)
    variables = module.init(keys[2], x)
    if recipe == "delayed":  # scales that come from tensors 16 times smaller: now some saturate
        grads = jax.jit(jax.grad(weighted_sum(module, weights / 16)))(variables, x / 16)
        variables = te.state.merge({"params": variables["params"]}, te.state.split(grads)[1])
    x = x.at[3, :5].set(jnp.inf).at[4, 0].set(jnp.nan)
    report = te.state.report(measured(weighted_sum(module, weights), module, variables, x))
    tensors = {"x": (x, "e4m3"), "kernel": (variables["params"]["kernel"], "e4m3"), "dy": (weights, "e5m2")}
    assert set(report) == set(tensors)
    for role, (tensor, fmt) in tensors.items():
        got, largest = report[role], FORMATS[fmt][1]
        factor = 16 if recipe == "delayed" and role != "kernel" else 1
        amax, *fractions = want(tensor, got.scale, fmt)
        assert got.amax == amax
        if role != "x" or recipe == "delayed":
            np.testing.assert_allclose(got.scale, factor * largest / amax, rtol=1e-6)
        np.testing.assert_allclose((got.saturated, got.flushed, got.nonfinite), fractions, rtol=1e-6, err_msg=role)
        np.testing.assert_allclose(got.utilization, got.scale * amax / largest, rtol=1e-6)
    if recipe == "delayed":
        assert 0.01 < report["x"].saturated < 0.5
        assert report["dy"].saturated > 0
    assert report["x"].nonfinite == 6 / (ROWS * K)
    assert report["dy"].flushed > 0.05


def test_blocks_flush_what_is_small_beside_their_own_largest():
    module = te.flax.Dense(128, use_bias=False, recipe=te.BlockScaling())
    x = jnp.ones((16, 256)).at[:, 0].set(2.0**20)  # flushes the other 127 of the first block of each row
    variables = module.init(jax.random.key(0), x)
    report = te.state.report(measured(mean_square(module), module, variables, x))
    assert report["x"].amax == 2.0**20
    assert report["x"].flushed == 127 / 256
    assert report["x"].saturated == 0
    assert report["x"].scale == 2.0**8 / 2.0**20  # 448 / 2^20, floored to a power of two


def test_kernels_that_come_quantized_are_measured_too():
    module = te.flax.Dense(N, recipe=te.CurrentScaling())
    x = jax.random.normal(jax.random.key(0), (ROWS, K))
    variables = module.init(jax.random.key(1), x)
    given = te.quantize_kernels(module, variables, x)
    assert "kernel" in te.state.report(measured(mean_square(module), module, given, x))


def test_the_measurement_is_of_the_step_as_it_is():
    """Loss and gradients of the unfused pass are those of the fused one: what is measured is what is trained."""
    module = te.flax.LayerNormMLP(K, 96, recipe=DELAYED, residual=True, dtype=jnp.bfloat16)
    x = jax.random.normal(jax.random.key(0), (ROWS, K), jnp.bfloat16)
    variables = module.init(jax.random.key(1), x)
    probe = te.health.instrument(module, variables, x)
    value_and_grad = jax.jit(jax.value_and_grad(lambda v, p: mean_square(module)({**v, **p}, x)))
    (loss, grads), (with_loss, with_grads) = value_and_grad(variables, {}), value_and_grad(variables, probe)
    np.testing.assert_allclose(with_loss, loss, rtol=1e-2)
    state, with_state = (te.state.report({COLLECTION: te.state.split(g)[1]}) for g in (grads, with_grads))
    for name in state:
        np.testing.assert_allclose(with_state[name].amax, state[name].amax, rtol=2e-2, err_msg=name)


def test_layers_of_a_scan_with_remat_have_their_own():
    class Layer(te.flax.LayerNormMLP):
        @nn.compact
        def __call__(self, x, _):
            return super().__call__(x), None

    axes = {"params": 0, COLLECTION: 0, te.health.COLLECTION: 0}
    scan = functools.partial(nn.scan, nn.remat(Layer), length=3, split_rngs={"params": True})
    module = scan(variable_axes=axes)(K, 96, recipe=DELAYED, residual=True)
    x = jax.random.normal(jax.random.key(0), (ROWS, K))
    variables = module.init(jax.random.key(1), x, None)
    probe = te.health.instrument(module, variables, x, None)

    def loss(v, x):
        return jnp.mean(module.apply(v, x, None)[0] ** 2)

    report = te.state.report(jax.jit(functools.partial(te.health.measure, loss))({**variables, **probe}, x))
    names = {f"{fc}/{role}/{layer}" for fc in ("fc1", "fc2") for role in ("x", "kernel", "dy") for layer in range(3)}
    assert set(report) == names
    for fc in ("fc1", "fc2"):
        for layer, kernel in enumerate(variables["params"][fc]["kernel"]):
            assert report[f"{fc}/kernel/{layer}"].amax == np.abs(kernel).max()

    unaware = scan(variable_axes={"params": 0, COLLECTION: 0})(K, 96, recipe=DELAYED, residual=True)
    with pytest.raises(ValueError, match="variable_axes"):
        te.health.instrument(unaware, variables, x, None)


class Twice(nn.Module):
    """A layer applied twice, one that isn't quantized and a DenseGeneral."""

    @nn.compact
    def __call__(self, x):
        shared = te.flax.Dense(K, use_bias=False, recipe=te.CurrentScaling(), name="shared")
        x = shared(shared(x) * 3.0)
        x = te.flax.DenseGeneral((4, 16), recipe=DELAYED, name="general")(x)
        return te.flax.Dense(7, recipe=DELAYED, name="odd")(x.reshape(-1, 64))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_group_of_a_grouped_linear_has_its_own(recipe):
    """Groups without tokens are left out, rows behind the last group count for none."""
    sizes, groups = jnp.asarray([5, 0, 17, 4]), 4
    module = te.flax.GroupedDense(groups, N, use_bias=False, recipe=RECIPES[recipe])
    keys = jax.random.split(jax.random.key(0), 3)
    x, weights = heavy_tailed(keys[0], (ROWS, K)), heavy_tailed(keys[1], (ROWS, N), 40)
    x = x.at[6, :5].set(jnp.inf).at[30, 0].set(1e6)  # of group 2; of none
    variables = module.init(keys[2], x, sizes)
    probe = te.health.instrument(module, variables, x, sizes)
    loss = lambda v, x, sizes: jnp.sum(module.apply(v, x, sizes) * weights)  # noqa: E731
    report = te.state.report(jax.jit(functools.partial(te.health.measure, loss))({**variables, **probe}, x, sizes))
    rows = {0: slice(0, 5), 2: slice(5, 22), 3: slice(22, 26)}
    assert set(report) == {f"{role}/{g}" for role in ("x", "dy") for g in rows} | {f"kernel/{g}" for g in range(groups)}
    kernel = variables["params"]["kernel"]
    for name, got in report.items():
        role, g = name.split("/")
        tensor = kernel[int(g)] if role == "kernel" else {"x": x, "dy": weights}[role][rows[int(g)]]
        fmt = "e5m2" if role == "dy" and recipe != "block" else "e4m3"
        amax, *fractions = want(tensor, got.scale, fmt)
        assert (got.amax, got.fp8_max) == (amax, FORMATS[fmt][1])
        if recipe == "block":  # every block flushes less than the one with the smallest scale
            assert got.saturated == 0
            assert 0 <= got.flushed <= fractions[1]
            assert got.scale <= FORMATS[fmt][1] / amax
            continue
        scale = 1.0 if name == "x/2" else FORMATS[fmt][1] / amax  # 1: what a tensor with infinities is given
        np.testing.assert_allclose(got.scale, scale, rtol=1e-6, err_msg=name)
        np.testing.assert_allclose((got.saturated, got.flushed, got.nonfinite), fractions, rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(report["x/2"].nonfinite, 5 / (17 * K), rtol=1e-6)


def test_a_mixture_of_experts_is_measured_whole():
    """Linears with and without groups and a Quantize in one chain: the rows are those of each one's own state."""
    sizes, recipe = jnp.asarray([20, 12]), DELAYED
    chain = [ops.Linear(K), ops.GroupedLinear(2, K), ops.Quantize(True, True), ops.ReLU(), ops.Linear(K)]
    module = te.Sequential(chain, recipe=recipe)
    x = jax.random.normal(jax.random.key(0), (ROWS, K))
    variables = module.init(jax.random.key(1), x, sizes)
    loss = lambda v, x: jnp.mean(module.apply(v, x, sizes) ** 2)  # noqa: E731
    measured = jax.jit(functools.partial(te.health.measure, loss))
    probe = te.health.instrument(module, variables, x, sizes)
    report = te.state.report(measured({**variables, **probe}, x))
    linears = {f"ops_{i}/{role}" for i in (0, 4) for role in ("x", "kernel", "dy")}
    experts = {f"ops_1/{role}/{g}" for role in ("x", "kernel", "dy") for g in range(2)}
    assert set(report) == linears | experts | {"ops_2/x", "ops_2/dy"}
    grads = jax.jit(jax.grad(loss))(variables, x)[COLLECTION]
    stepped = te.state.report({COLLECTION: grads})  # of the state alone, by number
    for g in range(2):
        for row, role in enumerate(("x", "kernel", "dy")):
            assert report[f"ops_1/{role}/{g}"].amax == stepped[f"fp8_1_grouped/{row}/{g}"].amax
    run = "fp8_0_ops_0_ops_2_x_dy_ops_4"
    assert report["ops_2/x"].amax == stepped[f"{run}/3"].amax
    assert report["ops_2/dy"].amax == stepped[f"{run}/4"].amax
    assert te.health.Monitor().update(0, report) == []


def test_uses_add_up_and_modules_inside_are_found():
    module, x = Twice(), jax.random.normal(jax.random.key(0), (ROWS, K))
    variables = module.init(jax.random.key(1), x)
    report = te.state.report(measured(mean_square(module), module, variables, x))
    assert set(report) == {f"{layer}/{role}" for layer in ("shared", "general") for role in ("x", "kernel", "dy")}
    kernel = np.asarray(variables["params"]["shared"]["kernel"])
    assert report["shared/kernel"].amax == np.abs(kernel).max()
    second = np.abs(3 * np.asarray(x) @ kernel).max()  # of two uses the larger, to half an octave
    assert second / 2**0.75 < report["shared/x"].amax < second * 2**0.75
    assert second > 2 * np.abs(x).max()


KINDS = {"delayed": (AxisType.Auto, AxisType.Explicit, "manual"), "block": ("manual",)}


@pytest.mark.parametrize("recipe, kind", [(recipe, kind) for recipe, kinds in KINDS.items() for kind in kinds])
def test_meshes_see_the_whole_tensor(recipe, kind):
    module = te.flax.Dense(N, recipe=RECIPES[recipe])
    x = heavy_tailed(jax.random.key(0), (64, K)).at[40, 3].set(9.0)
    variables = module.init(jax.random.key(1), x)
    variables |= te.health.instrument(module, variables, x)

    def loss(v, x):
        return jnp.sum(module.apply(v, x) ** 2) / 64

    measure = functools.partial(te.health.measure, loss)
    one = te.state.report(jax.jit(measure)(variables, x))

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto if kind == "manual" else kind,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P("data")))
        if kind == "manual":
            run = jax.shard_map(measure, in_specs=(P(), P("data")), out_specs=P())
        else:
            run = measure
        several = te.state.report(jax.jit(run)(variables, placed))
    assert set(several) == {"x", "kernel", "dy"}
    for name, tensor in several.items():
        np.testing.assert_allclose(tensor, one[name], rtol=1e-5, err_msg=name)


# -------------------------------------------------------------------------------------- reports of the FP8 state alone


def test_a_report_of_the_state_alone():
    module = te.flax.Dense(N, recipe=DELAYED)
    x = jax.random.normal(jax.random.key(0), (ROWS, K))
    variables = module.init(jax.random.key(1), x)
    assert te.state.report(variables) == {}  # nothing has run yet
    for factor in (1.0, 2.0):
        grads = jax.grad(mean_square(module))(variables, factor * x)
        variables = te.state.merge({"params": variables["params"]}, te.state.split(grads)[1])
    report = te.state.report(variables)
    assert set(report) == {"fp8_0/0", "fp8_0/1", "fp8_0/2"}
    assert report["fp8_0/0"].amax == 2 * np.abs(x).max()
    np.testing.assert_allclose(report["fp8_0/0"].scale, 448 / np.abs(x).max(), rtol=1e-6)
    assert report["fp8_0/1"].amax == np.abs(variables["params"]["kernel"]).max()
    assert np.isnan(report["fp8_0/0"].saturated)
    assert set(te.health.scalars(report)) == {f"fp8/fp8_0/{q}/{tag}" for q in range(3) for tag in ("amax", "scale")}


# ------------------------------------------------------------------------------------------------------------ a run


def chain(recipe):
    return te.Sequential([ops.Linear(64, name="fc1"), ops.ReLU(), ops.Linear(32, name="fc2")], recipe=recipe)


def make_step(recipe):
    """(module, loss, step(variables, growth) -> (variables, loss), variables, batch)"""
    module = chain(recipe)
    x = jax.random.normal(jax.random.key(0), (64, 32))
    y = jnp.tanh(x @ jax.random.normal(jax.random.key(5), (32, 32)))

    def loss_fn(v, batch):
        return jnp.mean((module.apply(v, batch[0]) - batch[1]) ** 2)

    def step(variables, growth):
        loss, grads = jax.value_and_grad(loss_fn)(variables, (x, y))
        (rest, state), (grads, new_state) = te.state.split(variables), te.state.split(grads)
        p = jax.tree.map(lambda p, g: p - 0.1 * g, rest["params"], grads["params"])
        for leaf, scale in (("kernel", (slice(None), 0)), ("bias", (0,))):
            p["fc1"][leaf] = p["fc1"][leaf].at[scale].multiply(growth)
        p["fc2"]["kernel"] = p["fc2"]["kernel"].at[0].divide(growth)
        return te.state.merge({"params": p}, te.state.apply(state, new_state)), loss

    return module, loss_fn, step, module.init(jax.random.key(1), x), (x, y)


def test_what_diverges_is_flagged_before_its_loss_moves():
    """From step 16 on the activations of one hidden unit grow by a quarter a step, and what reads them shrinks: but for
    rounding the function, and the loss, are unchanged by that, and stay so until FP8 can't hold both."""
    module, loss_fn, step, start, batch = make_step(te.DelayedScaling(amax_history_len=16))
    step = jax.jit(step)
    probe = te.health.instrument(module, start, batch[0])
    flags, losses = {}, {}
    watch = te.health.Callback(loss_fn, probe, every=4)
    for growth in (1.0, 1.25):
        flags[growth], losses[growth], variables = [], [], start
        watch.monitor, watch.on_flags = te.health.Monitor(), flags[growth].extend
        for i in range(60):
            watch(i, variables, batch)
            variables, loss = step(variables, 1.0 if i < 16 else growth)
            losses[growth].append(float(loss))
    healthy, diverging = (np.asarray(losses[growth]) for growth in (1.0, 1.25))
    assert flags[1.0] == []
    moved = np.argmax(~(diverging < 1.05 * healthy))
    assert moved > 16
    assert diverging[-1] > 2 * healthy[-1]
    first = flags[1.25][0]
    assert first.step < moved
    assert first.criterion == "growth"
    assert {flag.name for flag in flags[1.25] if flag.step == first.step} <= {"fc1/kernel", "fc2/x"}  # where it grows
    assert "growth" in str(first)


def test_the_step_is_the_same_program_and_gives_the_same_bits():
    module, loss_fn, step, start, batch = make_step(DELAYED)
    programs, ends = [], []
    for watched in (False, True, False):
        compiled = jax.jit(lambda variables, growth: step(variables, growth))  # traced anew each time
        programs.append(compiled.lower(start, 1.0).as_text())
        watch = te.health.Callback(loss_fn, te.health.instrument(module, start, batch[0]), every=2)
        variables = start
        for i in range(5):
            if watched:
                assert (watch(i, variables, batch) is None) == (i % 2 == 1)
            variables, _ = compiled(variables, 1.0)
        ends.append(variables)
    assert programs[0] == programs[1] == programs[2]
    jax.tree.map(np.testing.assert_array_equal, ends[0], ends[1])


def test_criteria():
    healthy = te.health.TensorHealth(1.0, 448.0, 0.0, 0.0, 0.0, 448.0)
    for changed, criterion in (
        ({"nonfinite": 1e-6}, "nonfinite"),
        ({"saturated": 0.02}, "saturated"),
        ({"flushed": 0.6}, "flushed"),
        ({"amax": 5.0}, "overshoot"),
        ({"scale": 448 * 2.0**-8}, "stale"),
        ({"amax": 9.0, "scale": 448 / 9}, "growth"),
    ):
        monitor = te.health.Monitor()
        assert monitor.update(0, {"a/x": healthy}) == []
        (flag,) = monitor.update(100, {"a/x": healthy._replace(**changed)})
        assert (flag.step, flag.name, flag.criterion) == (100, "a/x", criterion)
        off = te.health.Monitor(te.health.Limits(**{criterion: None}))
        off.update(0, {"a/x": healthy})
        assert off.update(100, {"a/x": healthy._replace(**changed)}) == []
    spike = te.health.Monitor()
    spike.update(0, {"a/dy": healthy})
    assert spike.update(1, {"a/dy": healthy._replace(amax=100.0, scale=4.48)}) == []


def test_a_part_of_the_batch_stands_for_the_whole():
    """dy of a mean over fewer rows is larger: the callback undoes that."""
    module = te.flax.Dense(N, use_bias=False, recipe=te.CurrentScaling())
    x = jnp.tile(jax.random.normal(jax.random.key(0), (16, K)), (4, 1))
    variables = module.init(jax.random.key(1), x)
    probe = te.health.instrument(module, variables, x)
    reports = [te.health.Callback(mean_square(module), probe, rows=r).sample(0, variables, x) for r in (None, 16)]
    for name, tensor in reports[0].items():
        np.testing.assert_allclose(reports[1][name], tensor, rtol=1e-5, err_msg=name)


def test_cost_is_below_a_hundredth_of_a_step_every_hundred_steps():
    module = te.flax.LayerNormMLP(256, 512, recipe=DELAYED, residual=True, dtype=jnp.bfloat16)
    x = jax.random.normal(jax.random.key(0), (512, 256), jnp.bfloat16)
    variables = module.init(jax.random.key(1), x)
    callback = te.health.Callback(mean_square(module), te.health.instrument(module, variables, x), rows=128)
    step = jax.jit(jax.value_and_grad(mean_square(module)))

    def seconds(function):
        function()
        times = []
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready(function())
            times.append(time.perf_counter() - start)
        return min(times)

    ratio = seconds(lambda: callback.sample(0, variables, x)) / seconds(lambda: step(variables, x))
    print(f"a measurement takes {ratio:.2f} of a step, {ratio:.2f}% of a hundred")
    assert ratio < 1.0


# ------------------------------------------------------------------------------------------------------------ errors


def test_errors():
    module = te.flax.Dense(N, recipe=te.CurrentScaling())
    x = jax.random.normal(jax.random.key(0), (ROWS, K))
    variables = module.init(jax.random.key(1), x)
    probe = te.health.instrument(module, variables, x)
    with pytest.raises(ValueError, match=r"variables: expected a collection 'fp8_health'"):
        te.health.measure(mean_square(module), variables, x)

    def forgets(v, x):
        return mean_square(module)({"params": v["params"]}, x)

    with pytest.raises(ValueError, match="gives every collection to the model"):
        te.state.report(te.health.measure(forgets, {**variables, **probe}, x))
    with pytest.raises(ValueError, match="linears that are quantized"):
        te.health.instrument(te.flax.Dense(N), variables, x)
    with pytest.raises(TypeError, match=r"flax\.linen module"):
        te.health.instrument(mean_square, variables, x)
    with pytest.raises(ValueError, match="every: expected a positive int, got 0"):
        te.health.Callback(mean_square(module), probe, every=0)
    with pytest.raises(ValueError, match="same number of rows"):
        te.health.Callback(lambda v, b: 0.0, probe, rows=2).sample(0, variables, (x, x[:3]))
    state = te.TrainState.create(apply_fn=module.apply, params=variables, tx=optax.sgd(1.0))
    for call in (lambda: te.health.Callback(mean_square(module), probe)(0, state, x), lambda: te.state.report(state)):
        with pytest.raises(
            TypeError, match=r"expected a dict of collections, got TrainState, whose \.params are to be"
        ):
            call()
    model = te.nnx.Dense(K, N, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"got Dense \(te\.nnx\.to_variables makes one of an nnx model\)"):
        te.state.report(model)


def test_a_warning_points_at_the_line_of_the_user():
    module = te.flax.Dense(N, recipe=te.CurrentScaling())
    x = jax.random.normal(jax.random.key(0), (ROWS, K))
    variables = module.init(jax.random.key(1), x)
    probe = te.health.instrument(module, variables, x)
    monitor = te.health.Monitor(te.health.Limits(growth=0.5))
    callback = te.health.Callback(mean_square(module), probe, monitor=monitor)
    callback(0, variables, x)
    for call in (callback.sample, callback):
        with pytest.warns(UserWarning, match="step 0: kernel: growth 1, limit 0.5") as warned:
            call(0, variables, x)
        assert {each.filename for each in warned} == {__file__}
