"""AllGather, ReduceScatter and AllReduce on Manual, Explicit and Auto axes: values, gradients, and what is compiled."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import te_jax as te
from te_jax import compat, ops
from te_jax.testing import hlo

P = PartitionSpec
DATA, MODEL = 2, 4
BATCH, TOKENS, WIDTH, HIDDEN = 4, 32, 64, 192
RECIPES = {"none": None, "current": te.CurrentScaling(power_of_two=True)}


def normal_init(key, shape, dtype):
    return jax.random.normal(key, shape, dtype) / 4


def mlp(recipe, hidden, *, first, last):
    """A tensor-parallel MLP: kernels column- and row-parallel, tokens gathered before it and scattered after it."""
    linears = [
        ops.Linear(hidden, bias_init=normal_init, name="fc1"),
        ops.GELU(),
        ops.Linear(WIDTH, bias_init=normal_init, name="fc2"),
    ]
    return te.Sequential([*first, *linears, *last], recipe=recipe, dtype=jnp.float32)


FORMS = {  # what is around the linears, and the specs of x and y
    "sequence": ([ops.AllGather("model")], [ops.ReduceScatter("model")], P("data", "model")),
    "replicated": ([], [ops.AllReduce("model")], P("data")),
}
SPECS = {"fc1": {"kernel": P(None, "model"), "bias": P("model")}, "fc2": {"kernel": P("model", None), "bias": P()}}


def loss_of(module, weights):
    return lambda variables, x: jnp.sum(module.apply(variables, x).astype(jnp.float32) * weights)


@functools.cache
def on_one_device(recipe):
    """(variables, x, weights, the loss and its gradients)"""
    module = mlp(recipe, HIDDEN, first=[], last=[])
    x = jax.random.normal(jax.random.key(0), (BATCH, TOKENS, WIDTH))
    weights = jax.random.normal(jax.random.key(2), x.shape)
    variables = module.init(jax.random.key(1), x)
    return variables, x, weights, jax.jit(jax.value_and_grad(loss_of(module, weights), argnums=(0, 1)))(variables, x)


def compiled(form, recipe, regime, variables, x, weights):
    """The compiled gradients of the loss, on (data, model), and its arguments on that mesh."""
    first, last, spec = FORMS[form]
    kind = AxisType.Auto if regime == "auto" else AxisType.Explicit
    mesh = jax.make_mesh((DATA, MODEL), ("data", "model"), axis_types=(kind, kind))
    specs = {"params": SPECS}
    if regime == "manual":
        module = mlp(recipe, HIDDEN // MODEL, first=first, last=last)

        def shard(variables, x, weights):
            def loss(variables, x):
                return jax.lax.psum(loss_of(module, weights)(variables, x), tuple(spec))

            return jax.value_and_grad(loss, argnums=(0, 1))(variables, x)

        step = jax.shard_map(shard, in_specs=(specs, spec, spec), out_specs=(P(), (specs, spec)), mesh=mesh)
    else:
        module = mlp(recipe, HIDDEN, first=first, last=last)

        def step(variables, x, weights):
            return jax.value_and_grad(loss_of(module, weights), argnums=(0, 1))(variables, x)

    place = lambda tree, specs: jax.device_put(tree, jax.tree.map(lambda s: NamedSharding(mesh, s), specs))  # noqa: E731
    with jax.set_mesh(mesh):
        args = place(variables, specs), place(x, spec), place(weights, spec)
        return jax.jit(step).lower(*args).compile(), args


def close(got, want, tolerance):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error <= tolerance, (jax.tree_util.keystr(path), error)


@pytest.mark.parametrize("regime", ["manual", "explicit", "auto"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", FORMS)
def test_tensor_parallel_mlp_equals_one_device(form, recipe, regime):
    variables, x, weights, want = on_one_device(RECIPES[recipe])
    program, args = compiled(form, RECIPES[recipe], regime, variables, x, weights)
    got = program(*args)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4)  # a sum that cancels
    close(got[1], want[1], 1e-5)
    for a, given in zip(jax.tree.leaves(got[1]), jax.tree.leaves(args[:2]), strict=True):
        assert a.sharding.is_equivalent_to(given.sharding, a.ndim), (a.sharding, given.sharding)
    text = program.as_text()
    counts = hlo.count_collectives(text)
    # Once forward and once backward. Where the compiler sees the sum, on a CPU, it is an all-reduce and a slice.
    gathers = re.findall(r"= f32\[([\d,]*)\]\S* all-gather\(", text)
    assert gathers == ["2,32,64"] * 2 * (form == "sequence")
    assert counts["reduce-scatter"] == 2 * (form == "sequence" and regime == "manual")
    assert set(counts) <= {"all-gather", "reduce-scatter", "all-reduce"}
    calls = hlo.custom_calls(text)
    assert bool(calls) == (recipe != "none")
    assert all(HIDDEN not in dims and BATCH not in dims for call in calls for _, dims in call.operands)  # local


def on_model(function, mesh, in_specs, out_specs, **options):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options))


def model_mesh():
    return jax.make_mesh((MODEL,), ("model",), axis_types=(AxisType.Auto,))


# As written with jax.lax alone: what the ops, and their derivatives, have to be.
PLAIN = {
    "all_gather": (ops.AllGather("model"), lambda x: jax.lax.all_gather(x, "model", axis=0, tiled=True)),
    "reduce_scatter": (ops.ReduceScatter("model"), lambda x: jax.lax.psum_scatter(x, "model", tiled=True)),
    "all_reduce": (ops.AllReduce("model"), lambda x: jax.lax.psum(x, "model")),
    "features": (
        ops.AllGather("model", dimension=-1),
        lambda x: jax.lax.all_gather(x, "model", axis=1, tiled=True),
    ),
}


@pytest.mark.parametrize(
    ("same", "check_vma"), [(False, True), (False, False), (True, True)], ids=["sharded", "no checks", "replicated"]
)
@pytest.mark.parametrize("name", PLAIN)
def test_derivatives_are_those_of_jax(name, same, check_vma):
    """With sharded and with replicated x, before a function that varies and one that doesn't."""
    op, plain = PLAIN[name]
    chain = te.Sequential([op])
    x = jax.random.normal(jax.random.key(0), (4 if same else 16, 8))
    weights = jax.random.normal(jax.random.key(1), (MODEL, 16, 32))

    def gradients(collective):
        def shard(x, weights):
            def loss(x):
                y = collective(x)
                return jnp.sum(jnp.sin(y) * weights[0, : y.shape[0], : y.shape[1]]) + jnp.sum(y * y) / 7

            return jax.grad(lambda x: jax.lax.psum(loss(x), "model"))(x)

        spec = P() if same else P("model")
        return on_model(shard, model_mesh(), (spec, P("model")), spec if check_vma else P("model"), check_vma=check_vma)

    got, want = (gradients(f)(x, weights) for f in (lambda x: chain.apply({}, x), lambda x: plain(varying(x))))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def varying(x):
    """psum_scatter and all_gather want that said of a value that is the same on all devices."""
    return compat.pvary(x, ("model",)) if compat.checks_varying_axes() else x


@pytest.mark.parametrize("rules", ["fused", "unfused"])
@pytest.mark.parametrize(
    ("reductions", "spec"),
    [
        ([ops.AllReduce("model")], P()),
        ([ops.ReduceScatter("model")], P("model")),
        ([ops.AllReduce("data"), ops.ReduceScatter("model")], P("model")),
    ],
    ids=["all_reduce", "reduce_scatter", "both"],
)
def test_a_bias_is_counted_once(reductions, spec, rules):
    """Each device has a term of the sum that has no bias in it."""
    none = {"forward_rules": (), "backward_rules": ()} if rules == "unfused" else {}
    chain = te.Sequential([ops.Linear(64, bias_init=normal_init), *reductions], recipe=te.CurrentScaling(), **none)
    mesh = jax.make_mesh((DATA, MODEL), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x, bias = jnp.zeros((64, 32)), jax.random.normal(jax.random.key(0), (64,))
    variables = {"params": {"ops_0": {"kernel": jnp.ones((32, 64)), "bias": bias}}}

    def shard(variables, x):
        y, pullback = jax.vjp(lambda variables: chain.apply(variables, x), variables)
        last = chain.plan(x).forward[-1].ops[-1]
        assert last.startswith("Bias(")
        return y, pullback(jnp.ones_like(y))[0]["params"]["ops_0"]["bias"]

    y, dbias = on_model(shard, mesh, (P(), P()), (spec, P()))(variables, x)
    np.testing.assert_array_equal(y, np.broadcast_to(bias, y.shape))
    np.testing.assert_array_equal(dbias, np.full(64, 64.0))


def test_the_plan_says_what_a_collective_does_where_it_is_traced():
    chain = te.Sequential([ops.AllGather("model"), ops.Linear(64), ops.ReduceScatter("model")])
    x = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    plan = chain.plan(x)
    assert "no mesh with an axis 'model' here: nothing to do" in str(plan)
    assert not plan.forward[0].computes
    for kind in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(jax.make_mesh((MODEL,), ("model",), axis_types=(kind,))):
            assert str(chain.plan(x)).count("changes how the full result is split over 'model'") == 4
    plans = []

    def shard(x):
        plans.append(chain.plan(x))
        return x

    on_model(shard, model_mesh(), P("model"), P("model")).lower(x)
    steps = [(step.ops[0].split("(")[0], step.notes) for step in plans[0].forward]
    assert [name for name, _ in steps] == ["AllGather[model]", "Linear", "ReduceScatter[model]", "Bias"]
    small = "6.6e-05 GFLOP a device, overlap is known to pay from 34"
    assert steps[0][1] == ("gathers over 'model' (4 devices)", f"no all-gather+linear+bias: {small}")
    assert steps[1][1] == ("not quantized: recipe None", f"no linear+reduce-scatter+bias: {small}")
    assert steps[2][1] == ("sums and scatters over 'model' (4 devices)",)


@pytest.mark.parametrize("kinds", [(AxisType.Auto, AxisType.Explicit), (AxisType.Explicit, AxisType.Auto)], ids=str)
@pytest.mark.parametrize("manual", [(), ("data",)], ids=["", "manual data"])
def test_mixed_meshes(kinds, manual):
    """Axes of several kinds in one mesh, and a shard_map over some of its axes."""
    chain = te.Sequential([ops.AllGather("model"), ops.Linear(32), ops.ReduceScatter("model")])
    x = jax.random.normal(jax.random.key(0), (8, 16, 32))
    variables = te.Sequential(chain.ops[1:2], name="chain").init(jax.random.key(1), x)["params"]["ops_0"]
    variables = {"params": {"ops_1": variables}}
    want = jnp.einsum("btk,kn->btn", x, variables["params"]["ops_1"]["kernel"])
    mesh = jax.make_mesh((DATA, MODEL), ("data", "model"), axis_types=kinds)

    def step(variables, x):
        return chain.apply(variables, x)

    if manual:
        step = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), axis_names={"data"})
    with jax.set_mesh(mesh):
        got = jax.jit(step)(variables, jax.device_put(x, NamedSharding(mesh, P("data", "model"))))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def in_shard_map(chain, x):
    return on_model(lambda x: te.Sequential(chain).apply({}, x), model_mesh(), P("model"), P("model")).lower(x)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ops.AllGather(("a", "b")), TypeError, r"AllGather: axis_name: expected the name of a mesh axis"),
        (lambda: ops.ReduceScatter("a", dimension=0.5), TypeError, "ReduceScatter: dimension: expected an int"),
        (lambda: ops.AllReduce("a", overlap="always"), ValueError, "te_jax.AllReduce: overlap: expected one of"),
        (lambda: ops.AllGather("a", keep_gathered=1), TypeError, "AllGather: keep_gathered: expected True or False"),
        (
            lambda: in_shard_map([ops.AllReduce("tensor")], jnp.ones((8, 8))),
            ValueError,
            r"AllReduce\[tensor\]: axis_name: expected one of the mesh's \('model',\), got 'tensor'",
        ),
        (
            lambda: in_shard_map([ops.ReduceScatter("model")], jnp.ones((24, 8))),
            ValueError,
            r"ReduceScatter\[model\]: x: expected a multiple of 4 \(axis 'model'\) in dimension 0, got shape \(6, 8\)",
        ),
        (
            lambda: in_shard_map([ops.AllGather("model", dimension=2)], jnp.ones((8, 8))),
            ValueError,
            r"AllGather\[model\]: dimension: expected a dimension of x, which has 2, got 2",
        ),
        (
            lambda: in_shard_map([ops.Bias(), ops.ReduceScatter("model", dimension=-1)], jnp.ones((8, 8))),
            ValueError,
            "dimension: expected not the last one directly after a Bias",
        ),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()
