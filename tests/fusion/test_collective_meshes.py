"""Windows with a collective under Auto and Explicit axes, beside a data axis, against NumPy in fp64.

``tests/fusion/test_collective_windows.py`` has Manual axes; tests/aot/test_collective_meshes.py what a GPU gets.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import te_jax as te
from te_jax import ops
from te_jax.quant import state as quant_state
from te_jax.testing import hlo, tolerance

P = PartitionSpec
DATA, TP = 2, 4
KINDS = (AxisType.Explicit, AxisType.Auto)
# Without a recipe all sums are exact; an FP8 GEMM adds a bias in bfloat16.
RECIPES = {
    "none": (None, jnp.float32),
    "delayed": (te.DelayedScaling(amax_history_len=2), jnp.bfloat16),
    "current": (te.CurrentScaling(), jnp.bfloat16),
}
FORMS = {  # op, features of x and y, and how x, kernel, bias and y are split
    "column": (ops.AllGather, (64, 192), P("data", "tp"), P(None, "tp"), P("tp"), P("data", None, "tp")),
    "scatter": (ops.ReduceScatter, (192, 64), P("data", None, "tp"), P("tp"), P(), P("data", "tp")),
    "reduce": (ops.AllReduce, (192, 64), P("data", None, "tp"), P("tp"), P(), P("data")),
}
LEAD = (4, 16)


def make_mesh(kind):
    return jax.make_mesh((DATA, TP), ("data", "tp"), axis_types=(kind, kind))


def chain(form, recipe, dtype, **options):
    collective = FORMS[form][0]("tp", **({"overlap": "overlapped"} | options))
    # A Bias of a row-parallel linear is between it and the collective here.
    linear = ops.Linear(FORMS[form][1][1], name="linear")
    elements = [collective, linear] if form == "column" else [linear, collective]
    return te.Sequential(elements, recipe=recipe, dtype=dtype)


@functools.cache
def operands(form):
    """x, kernel, bias and dy: integers that FP8 holds; the largest of each is on one device only."""
    rng = np.random.default_rng(len(form))
    features = FORMS[form][1]
    shapes = {"x": (*LEAD, features[0]), "kernel": features, "bias": features[1:], "dy": (*LEAD, features[1])}
    arrays = {name: rng.integers(-3, 3, shape, endpoint=True).astype(np.float32) for name, shape in shapes.items()}
    for array in arrays.values():
        array.flat[-1] = 7
    return arrays


def step_of(form, recipe, dtype, **options):
    """A function of variables, x and dy: y and the gradients of sum(y * dy)."""

    def step(variables, x, dy):
        def loss(variables, x):
            y = chain(form, recipe, dtype, **options).apply(variables, x)
            return jnp.sum(y.astype(jnp.float32) * dy), y

        (_, y), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(variables, x)
        return y, *grads

    return step


def arguments(form, mesh, recipe, dtype):
    """Variables, x and dy on the mesh."""
    _, _, x_spec, kernel_spec, bias_spec, y_spec = FORMS[form]
    data = operands(form)
    put = lambda name, spec, dtype=np.float32: jax.device_put(  # noqa: E731
        data[name].astype(dtype), NamedSharding(mesh, spec)
    )
    variables = {"params": {"linear": {"kernel": put("kernel", kernel_spec), "bias": put("bias", bias_spec)}}}
    if recipe is not None and recipe.stateful:
        state = te.state.split(chain(form, recipe, dtype).init(jax.random.key(0), jnp.ones((16, FORMS[form][1][0]))))[1]
        variables = te.state.merge(variables, jax.device_put(state, NamedSharding(mesh, P())))
    return variables, put("x", x_spec, dtype), put("dy", y_spec)


def wanted(form, dtype):
    """{name: (value, bound of the error)} in fp64; what travels is rounded once, and so is a result."""
    x, kernel, bias, dy = (operands(form)[name].astype(np.float64) for name in ("x", "kernel", "bias", "dy"))
    unit = 0.0 if dtype == jnp.float32 else tolerance.unit_roundoff(dtype) * (1 + 2.0**-6)

    def product(a, b, summed, bias=0.0):
        a = a.reshape(*a.shape[:-1], TP if summed else 1, -1)
        parts = np.einsum("btrk,rkn->rbtn", a, b.reshape(a.shape[-2], -1, b.shape[-1]))
        y = parts.sum(0) + bias
        return y, unit * (np.abs(y) + (np.abs(parts).sum(0) if summed else 0.0))

    forward, backward = product(x, kernel, form != "column", bias), product(dy, kernel.T, form == "column")
    return {
        "y": forward,
        "x": backward,
        "kernel": (np.einsum("btk,btn->kn", x, dy), 0.0),
        "bias": (dy.sum((0, 1)), 0.0),
    }


def check_values(form, y, variables, dx, dtype):
    """Checks what ``step_of`` gives against ``wanted``; returns it by name."""
    found = {"y": y, "x": dx} | variables["params"]["linear"]
    for name, (want, bound) in wanted(form, dtype).items():
        error = np.abs(np.asarray(found[name], np.float64) - want)
        assert np.all(error <= bound), (form, name, error.max())
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("recipe", RECIPES)
def test_values_gradients_and_state(recipe, kind):
    recipe, dtype = RECIPES[recipe]
    mesh = make_mesh(kind)
    args = {form: arguments(form, mesh, recipe, dtype) for form in FORMS}
    with jax.set_mesh(mesh):
        program = jax.jit(lambda args: {form: step_of(form, recipe, dtype)(*args[form]) for form in FORMS})
        compiled = program.lower(args).compile()
        got = compiled(args)
    for form, (y, variables, dx) in got.items():
        found = check_values(form, y, variables, dx, dtype)
        given = {"y": args[form][2], "x": args[form][1]} | args[form][0]["params"]["linear"]
        for name, array in given.items():
            assert found[name].sharding.is_equivalent_to(array.sharding, array.ndim), (form, name)
        if recipe is not None and recipe.stateful:
            state = te.state.split(variables)[1]
            leaves = {path[-1].key: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
            for number, (role, largest) in enumerate((("x", 448), ("kernel", 448), ("dy", 57344))):
                read = quant_state.read(leaves, jnp.full(3, largest, jnp.float32), recipe)
                # Of x, kernel and dy in that order: the amax is 7, and the scale a power of two.
                assert read.history[number, 0] == 7, role
                assert read.scale[number] == largest / 7, role
    text = compiled.as_text()
    # Forward and backward of each form; the backward of an AllReduce is that of a linear.
    assert hlo.count_custom_calls(text)["te_jax_collective_gemm"] == 5
    assert set(hlo.count_collectives(text)) <= {"all-reduce", "all-gather"}
    assert hlo.count_collectives(text)["all-gather"] <= 1  # of what the AllReduce form gives


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_ways_of_a_gather_behind_a_norm(kind):
    """The norm writes FP8, which XLA, the one call (which keeps its own part) or the ring gathers; as on one device."""
    ways = {"plain": {}, "overlapped": {"keep_gathered": False}, "ring": {}}
    data, mesh = operands("column"), make_mesh(kind)
    x, dy = jnp.asarray(data["x"]), jnp.asarray(data["dy"])
    params = {"linear": {"kernel": data["kernel"]}, "norm": {"scale": np.linspace(0.5, 2, 64, dtype=np.float32)}}

    def gradients(way):
        gather = ops.AllGather("tp", overlap=way, **ways[way])
        linear = ops.Linear(192, use_bias=False, name="linear")
        module = te.Sequential([ops.RMSNorm(name="norm"), gather, linear], recipe=te.CurrentScaling())
        return jax.value_and_grad(lambda params, x, dy: jnp.sum(module.apply({"params": params}, x) * dy), (0, 1))

    want = jax.jit(gradients("plain"))(params, x, dy)
    with jax.set_mesh(mesh):
        specs = {"linear": {"kernel": P(None, "tp")}, "norm": {"scale": P()}}
        place = functools.partial(jax.tree.map, lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)))
        args = place(params, specs), place(x, P("data", "tp")), place(dy, P("data", None, "tp"))
        compiled = jax.jit(lambda *args: {way: gradients(way)(*args) for way in ways}).lower(*args).compile()
        got = compiled(*args)
    for way in ways:
        for a, b in zip(jax.tree.leaves(got[way]), jax.tree.leaves(want), strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            assert np.linalg.norm(a - b) <= 2e-6 * np.linalg.norm(b), way
    # XLA's gathers are of bytes: of the plain way, and of the part that is gathered again for wgrad.
    gathers = re.findall(r"= (\w+)\[[\d,]*\]\S* all-gather\(", compiled.as_text())
    assert set(gathers) == {"u8"}, gathers


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_the_plan_says(kind):
    x = jax.ShapeDtypeStruct((8, 8192, 8192), jnp.bfloat16)

    def plan(*elements, recipe=te.CurrentScaling()):  # noqa: B008
        return str(te.Sequential(elements, recipe=recipe, dtype=jnp.bfloat16).plan(x, platform="cuda"))

    with jax.set_mesh(make_mesh(kind)):
        large = plan(ops.RMSNorm(), ops.AllGather("tp"), ops.Linear(8192))
        small = plan(ops.AllGather("tp"), ops.Linear(64))
        ragged = plan(ops.Linear(64), ops.ReduceScatter("tp", dimension=0, overlap="overlapped"))
        narrow = plan(ops.AllGather("tp", overlap="overlapped"), ops.Linear(30))
        block = plan(ops.AllGather("tp", overlap="overlapped"), ops.Linear(256), recipe=te.BlockScaling())
    assert "RMSNorm(ops_0): quantizes for the linear behind the gather, writes FP8" in large
    assert "overlapped: copy, 1 piece; 1.1e+03 GFLOP a device, of tokens that all other mesh axes split" in large
    assert large.count(" 1 te_jax_collective_gemm,") + large.count(" 2 te_jax_collective_gemm,") == 1  # in the sum
    assert "GFLOP a device, overlap is known to pay from 34, of tokens that all other mesh axes split" in small
    assert "te_jax_collective_gemm" in ragged
    assert "30 features are not a multiple of 4 devices" in narrow
    assert "block scales" in block
    unset = plan(ops.AllGather("tp"), ops.Linear(8192))
    assert "no mesh with an axis 'tp' is set here" in unset


def test_axes_of_several_kinds():
    mesh = jax.make_mesh((DATA, TP), ("data", "tp"), axis_types=(AxisType.Explicit, AxisType.Auto))
    x = jax.ShapeDtypeStruct((4, 8192, 8192), jnp.bfloat16)
    with jax.set_mesh(mesh):
        plan = str(te.Sequential([ops.AllGather("tp"), ops.Linear(8192)], dtype=jnp.bfloat16).plan(x))
    assert "mesh axes beside 'tp' are not Auto" in plan


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_arrays_on_a_mesh_that_is_not_set(recipe, form, kind):
    """Nothing overlaps, as plans are made without it; collectives change the sharding on the arrays' mesh."""
    recipe, dtype = RECIPES[recipe]
    y, variables, dx = jax.jit(step_of(form, recipe, dtype))(*arguments(form, make_mesh(kind), recipe, dtype))
    check_values(form, y, variables, dx, dtype)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_a_mesh_of_one_device(recipe, form, kind):
    """Types of Explicit axes of size 1 have to agree too: a contraction that one "splits" says what its result is."""
    recipe, dtype = RECIPES[recipe]
    mesh = jax.make_mesh((1, 1), ("data", "tp"), axis_types=(kind, kind), devices=jax.devices()[:1])
    args = arguments(form, mesh, recipe, dtype)
    with jax.set_mesh(mesh):
        y, variables, dx = jax.jit(step_of(form, recipe, dtype))(*args)
    check_values(form, y, variables, dx, dtype)
    if kind == AxisType.Explicit:
        for got, given in zip(jax.tree.leaves((variables, dx)), jax.tree.leaves(args[:2]), strict=True):
            assert jax.typeof(got).sharding == jax.typeof(given).sharding
