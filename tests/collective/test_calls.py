"""te.collective in every mesh regime: values and gradients against NumPy in fp64, what is compiled, and errors."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import te_jax as te
from te_jax.collective import plan
from te_jax.parallel import mesh as mesh_lib
from te_jax.testing import cases, hlo, oracle, tolerance
from te_jax.testing.compare import assert_within
from te_jax.testing.processes import run_pair

P = PartitionSpec
DEVICES = 8
RECIPES = {
    "none": None,
    "delayed": te.DelayedScaling(amax_history_len=2),
    "current": te.CurrentScaling(),
    "block": te.BlockScaling(),
}
CALLS = {  # the function, and how x, kernel, bias and y are split over (data, tp)
    "rs": (te.collective.matmul_reduce_scatter, P("data", None, "tp"), P("tp"), P(), P("data", "tp")),
    "ag": (te.collective.all_gather_matmul, P("data", "tp"), P(None, "tp"), P("tp"), P("data", None, "tp")),
}
NAMES = ("x", "kernel", "bias", "dy")


def make_mesh(ranks, kind=AxisType.Auto):
    return jax.make_mesh((DEVICES // ranks, ranks), ("data", "tp"), axis_types=(kind, kind))


@functools.cache
def operands(call, ranks, dtype=np.float32):
    """x, kernel, bias and dy, integers that no quantization changes: every sum of products is exact in float32.

    24 / ranks rows a rank and sequence; features that are odd multiples of 16 a rank.
    """
    rng = np.random.default_rng([ranks, len(call)])
    features = (48 * ranks, 48) if call == "rs" else (48, 48 * ranks)
    batch = 2 * DEVICES // ranks
    shapes = {"x": (batch, 24, features[0]), "kernel": features, "bias": features[1:], "dy": (batch, 24, features[1])}
    return {name: cases.exact(rng, shape, dtype) for name, shape in shapes.items()}


def exact(call, ranks):
    """y, and the gradients of sum(y * dy), in fp64."""
    x, kernel, bias, dy = (operands(call, ranks)[name].astype(np.float64) for name in NAMES)
    dw = np.einsum("btk,btn->kn", x, dy)
    return {"y": x @ kernel + bias, "x": dy @ kernel.T, "kernel": dw, "bias": dy.sum((0, 1))}


def gradients(function, recipe, *args, **options):
    """{y, x, kernel, bias, state} of this function of te.collective."""
    state = te.state.init(3, recipe) if recipe is not None and recipe.stateful else None

    def loss(x, kernel, bias, state, dy):
        y = function(x, kernel, "tp", bias=bias, recipe=recipe, state=state, **options)
        return jnp.sum(y * dy), y

    x, kernel, bias, dy = args
    argnums = (0, 1, 2) if state is None else (0, 1, 2, 3)
    (_, y), grads = jax.value_and_grad(loss, argnums, has_aux=True)(x, kernel, bias, state, dy)
    return dict(zip(("y", "x", "kernel", "bias", "state"), (y, *grads), strict=False))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("recipe", RECIPES)
def test_values_and_gradients_are_exact(recipe, ranks):
    """Both functions, every way they run, in one program; beside a data axis."""
    recipe, mesh = RECIPES[recipe], make_mesh(ranks)
    ways = {"overlapped": {}, "ring": {}}
    if ranks == 2:
        ways |= {"plain": {}, "again": {"overlap": "overlapped", "keep_gathered": False}}

    def shard(args):
        out = {}
        for call, (function, *_) in CALLS.items():
            for way, options in ways.items():
                if call == "rs" and way == "again":
                    continue
                options = {"overlap": way} | options
                found = gradients(function, recipe, *(args[call][name] for name in NAMES), **options)
                found.pop("state", None)
                out[call, way] = found
        return out

    specs, out_specs = {}, {}
    for call, (_, x, kernel, bias, y) in CALLS.items():
        specs[call] = {"x": x, "kernel": kernel, "bias": bias, "dy": y}
        for way in ways:
            if (call, way) != ("rs", "again"):
                out_specs[call, way] = {"y": y, "x": x, "kernel": kernel, "bias": bias}
    args = {call: operands(call, ranks) for call in CALLS}
    got = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=(specs,), out_specs=out_specs))(args)
    for (call, way), found in got.items():
        for name, want in exact(call, ranks).items():
            np.testing.assert_array_equal(found[name], want, err_msg=f"{call}, {way}, {name}")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_outside_of_shard_map(call, kind):
    """Whole arrays; the results are split as said, the custom calls are local, and the next state is there."""
    function, x_spec, kernel_spec, bias_spec, y_spec = CALLS[call]
    recipe, mesh = RECIPES["delayed"], make_mesh(4, kind)
    specs = {"x": x_spec, "kernel": kernel_spec, "bias": bias_spec, "dy": y_spec}
    given = operands(call, 4)
    options = {"overlap": "overlapped"} | ({"x_spec": x_spec} if kind == AxisType.Auto else {})
    with jax.set_mesh(mesh):
        args = [jax.device_put(given[name], NamedSharding(mesh, spec)) for name, spec in specs.items()]
        compiled = jax.jit(functools.partial(gradients, function, recipe, **options)).lower(*args).compile()
        got = compiled(*args)
    for name, want in exact(call, 4).items():
        np.testing.assert_array_equal(got[name], want, err_msg=name)
        spec = specs["dy" if name == "y" else name]
        assert got[name].sharding.is_equivalent_to(NamedSharding(mesh, spec), got[name].ndim), name
    scales = te.state.accumulate(got["state"], got["state"])["scale"]
    assert np.all(np.asarray(scales) > 0)
    whole = {given["x"].size, given["kernel"].size}
    calls = hlo.custom_calls(compiled.as_text())
    assert calls
    assert all(np.prod(dims) not in whole for call in calls for _, dims in call.operands)


def test_bfloat16_rounds_partial_sums_once():
    """Against fp64: partial sums and results in bfloat16, whose errors add up to one of each at most.

    The two don't agree to the bit: the overlapped call keeps a rank's own partial sum in float32.
    """
    ranks, mesh = 8, make_mesh(8)
    function, x_spec, kernel_spec, bias_spec, y_spec = CALLS["rs"]
    rng = np.random.default_rng(3)
    shapes = {name: a.shape for name, a in operands("rs", ranks).items()}
    args = [rng.standard_normal(shapes[name]).astype(jnp.bfloat16) for name in NAMES]

    def shard(*args):
        return [gradients(function, None, *args, overlap=way)["y"] for way in ("overlapped", "ring")]

    in_specs = (x_spec, kernel_spec, bias_spec, y_spec)
    results = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=in_specs, out_specs=[y_spec] * 2))(*args)
    x, kernel, bias, _ = (np.asarray(a, np.float64) for a in args)
    parts = np.einsum("btrk,rkn->rbtn", x.reshape(*x.shape[:2], ranks, -1), kernel.reshape(ranks, -1, 48))
    want = parts.sum(0) + bias
    rounded = tolerance.unit_roundoff(jnp.bfloat16) * (np.abs(parts).sum(0) + np.abs(want))
    bound = rounded * (1 + 2.0**-6) + tolerance.FP32_UNIT * np.abs(parts).sum(0) * np.sqrt(x.shape[-1])
    for y in results:
        assert y.dtype == jnp.bfloat16
        assert np.all(np.abs(np.asarray(y, np.float64) - want) <= bound)


@pytest.mark.parametrize("call", CALLS)
def test_a_result_in_fp8(call):
    """Times a scale that saturates some of it, rounded once; of what is scattered, partial sums are in bfloat16."""
    function, *in_specs, y_spec = CALLS[call]
    data = operands(call, 4)
    x, kernel, bias = (jnp.asarray(data[name]) for name in NAMES[:3])

    def shard(x, kernel, bias):
        for name, recipe in RECIPES.items():
            if name in ("delayed", "current"):
                state = te.state.init(3, recipe) if recipe.stateful else None
                options = {"recipe": recipe, "state": state, "out_dtype": jnp.float8_e4m3fn, "out_scale": 0.25}
                yield function(x, kernel, "tp", bias=bias, overlap="overlapped", **options)

    mapped = jax.shard_map(
        lambda *args: list(shard(*args)), mesh=make_mesh(4), in_specs=tuple(in_specs), out_specs=[y_spec] * 2
    )
    for y in jax.jit(mapped)(x, kernel, bias):
        assert y.dtype == jnp.float8_e4m3fn
        want = exact(call, 4)["y"]
        if call == "ag":
            np.testing.assert_array_equal(oracle.codes(y), oracle.cast(want, 0.25, "e4m3"))
            continue
        parts = np.split(data["x"].astype(np.float64), 4, -1), np.split(data["kernel"].astype(np.float64), 4)
        travelled = sum(np.abs(a @ b) for a, b in zip(*parts, strict=True)) * tolerance.unit_roundoff(jnp.bfloat16)
        want = np.clip(want, -4 * 448.0, 4 * 448.0)
        assert_within(4 * oracle.f64(y), want, travelled + tolerance.quantization_error(want + travelled, "e4m3", 0.25))


def test_time_first_arrays():
    """x [T, B, K], its first dimension gathered or scattered."""
    mesh, data = make_mesh(4), operands("ag", 4)
    x, dy = (np.swapaxes(data[name], 0, 1) for name in ("x", "dy"))

    def shard(x, kernel, bias, dy):
        function = te.collective.all_gather_matmul
        return gradients(function, RECIPES["current"], x, kernel, bias, dy, dimension=0, overlap="overlapped")

    specs = {"x": P("tp", "data"), "kernel": P(None, "tp"), "bias": P("tp"), "y": P(None, "data", "tp")}
    program = jax.jit(
        jax.shard_map(shard, mesh=mesh, in_specs=(*list(specs.values())[:3], specs["y"]), out_specs=specs)
    )
    got = program(x, data["kernel"], data["bias"], dy)
    for name, want in exact("ag", 4).items():
        want = np.swapaxes(want, 0, 1) if name in ("x", "y") else want
        np.testing.assert_array_equal(got[name], want, err_msg=name)


# Which way


def product(**changes):
    fields = {"kind": "matmul_reduce_scatter", "ranks": 2, "rows": 8192, "contracted": 4096, "columns": 8192}
    return plan.Product(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "overlap", "want"),
    [
        ({}, "auto", "overlapped: copy, 2 pieces; 5.5e+02 GFLOP a device"),
        ({"kind": "all_gather_matmul"}, "auto", "overlapped: copy, 1 piece; 5.5e+02 GFLOP a device"),
        ({}, "ring", "ring: asked for"),
        ({}, "plain", "plain: asked for"),
        ({"rows": 64}, "auto", "plain: 4.3 GFLOP a device, overlap is known to pay from 34"),
        ({"rows": 64}, "overlapped", "overlapped: direct, 1 piece; 4.3 GFLOP a device, asked for"),
        ({"ranks": 32}, "auto", "ring: 32 devices, the custom call is for 16 at most"),
        ({"rows": 8191}, "ring", "plain: 8191 tokens are not a multiple of 2 devices"),
        ({"columns": 8200}, "overlapped", "plain: 8200 output features are not a multiple of 16"),
        ({"ranks": 1}, "auto", "plain: one device"),
    ],
)
def test_choices(changes, overlap, want):
    assert str(plan.choose(product(**changes), overlap)) == want


def test_devices_that_do_not_reach_each_other_take_the_ring():
    want = "ring: 2 devices, of which 1 at most reach each other's memory"
    assert str(plan.choose(product(), host=1)) == want
    assert plan.choose(product(), host=2).path == "overlapped"
    assert mesh_lib.devices_of_a_host() is None


def test_two_processes():
    """CPU devices of two processes: the ring, forward and backward."""
    run_pair(pathlib.Path(__file__).with_name("two_processes.py"), devices=2, timeout_s=200)


# Errors


def in_shard_map(call="rs", **options):
    def shard(x):
        given = {"kernel": jnp.ones((32, 16)), "axis_name": "tp"} | options
        return CALLS[call][0](x, given.pop("kernel"), given.pop("axis_name"), **given)

    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,))
    return jax.eval_shape(jax.shard_map(shard, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")), jnp.ones((8, 3, 32)))


def on_whole(call="rs", x=(8, 32), kernel=(32, 64), **options):
    options = {"mesh": make_mesh(4), "x_spec": P()} | options
    return CALLS[call][0](jnp.ones(x), jnp.ones(kernel), "tp", **options)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: in_shard_map(kernel=jnp.ones((16, 16))), ValueError, r"kernel: expected shape \[32, features\], x is"),
        (lambda: in_shard_map(bias=jnp.ones(8)), ValueError, r"bias: expected shape \(16,\), got shape \(8,\)"),
        (
            lambda: in_shard_map(axis_name=("tp",)),
            TypeError,
            r"axis_name: expected the name of a mesh axis, got \('tp'",
        ),
        (
            lambda: in_shard_map(axis_name="data"),
            ValueError,
            r"axis_name: expected one of the mesh's \('tp',\), got ",
        ),
        (lambda: in_shard_map(dimension=-1), ValueError, "dimension: expected one of x's, which is not its last"),
        (lambda: in_shard_map(dimension="-2"), TypeError, "dimension: expected an int, got '-2'"),
        (lambda: in_shard_map(overlap="always"), ValueError, r"overlap: expected one of \('auto', 'overlapped'"),
        (lambda: in_shard_map(overlap=["auto"]), ValueError, r"overlap: expected one of .*, got \['auto'\]"),
        (lambda: in_shard_map("ag", keep_gathered="no"), TypeError, "keep_gathered: expected True or False, got 'no'"),
        (lambda: in_shard_map(recipe="delayed"), TypeError, "recipe: expected None or a recipe object"),
        (lambda: in_shard_map(recipe=te.DelayedScaling()), ValueError, "state: expected the leaves of te.state.init"),
        (lambda: in_shard_map(state={}), ValueError, "state: expected None: the recipe keeps no state"),
        (
            lambda: in_shard_map(recipe=te.DelayedScaling(), state=te.state.init(2, te.DelayedScaling())),
            ValueError,
            r"state: expected the leaves of te.state.init\(3, recipe\), shapes .*: \(3,\).*got .*'scale': \(2,\)",
        ),
        (
            lambda: in_shard_map(recipe=te.DelayedScaling(), state=[jnp.ones(3)]),
            TypeError,
            r"state: expected the leaves of te.state.init\(3, recipe\), got list",
        ),
        (lambda: in_shard_map(out_dtype=jnp.int32), TypeError, "out_dtype: expected bfloat16, float16, float32"),
        (lambda: in_shard_map(out_dtype="fp8"), TypeError, "out_dtype: expected bfloat16, .*, got 'fp8'"),
        (lambda: in_shard_map(out_dtype=jnp.float8_e5m2), ValueError, "out_dtype: expected FP8 with DelayedScaling"),
        (lambda: in_shard_map(out_scale=2.0), ValueError, "out_scale: expected None without an FP8 out_dtype"),
        (
            lambda: in_shard_map(recipe=te.CurrentScaling(), out_dtype=jnp.float8_e4m3fn, out_scale="1"),
            TypeError,
            r"out_scale: expected float32\[\], got '1'",
        ),
        (lambda: in_shard_map(kernel=jnp.ones((32, 16), jnp.int8)), TypeError, "kernel: expected an array of bfloat16"),
        (lambda: in_shard_map(), ValueError, r"x: expected a multiple of 4 \(axis 'tp'\) in dimension 1"),
        (lambda: in_shard_map("ag", x_spec=P()), ValueError, "x_spec: expected None inside of shard_map"),
        (
            lambda: in_shard_map("ag", recipe=te.CurrentScaling(strict=True)),
            ValueError,
            r"recipe: expected sizes that can be quantized \(strict=True\), got tokens: 24 is not a multiple of 16",
        ),
        (lambda: on_whole(mesh=None), ValueError, "mesh: expected one with an axis 'tp'"),
        (lambda: on_whole(mesh=("tp",)), TypeError, r"mesh: expected None or a jax.sharding.Mesh, got \('tp',\)"),
        (lambda: on_whole(x_spec=None), ValueError, "x_spec: expected a PartitionSpec, as the axis is not Explicit"),
        (lambda: on_whole(x_spec=("tp",)), TypeError, r"x_spec: expected None or a jax.sharding.PartitionSpec, got \("),
        (lambda: on_whole(x_spec=P("a")), ValueError, r"x_spec: expected at most 2 entries, of axes \('data', 'tp'\)"),
        (
            lambda: on_whole("ag", x_spec=P(("tp", "data"))),
            ValueError,
            "x: expected a dimension 0 that 'tp' splits last",
        ),
        (
            lambda: on_whole("ag", x=(6, 32)),
            ValueError,
            r"x: expected a multiple of 4 in dimension 0, which",
        ),
        (lambda: on_whole("ag", kernel=(32, 6)), ValueError, "kernel: expected a multiple of 4 in dimension 1, which"),
        (lambda: on_whole(x=(8, 30), kernel=(30, 8)), ValueError, "x: expected a multiple of 4 in dimension 1, which"),
        (lambda: on_whole(x=(6, 32)), ValueError, r"x: expected a multiple of 4 \(axis 'tp'\) in dimension 0"),
    ],
)
def test_errors(make, error, message):
    """They name the function that was called, not the op that it is made of."""
    function = "(all_gather_matmul|matmul_reduce_scatter)"
    with pytest.raises(error, match=rf"^te_jax.collective.{function}: {message}"):
        make()
