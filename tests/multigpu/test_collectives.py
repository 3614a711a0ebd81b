"""Collective matmuls between two devices of one process: gradients, schedules, repeated and random calls, reports."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
from te_jax import doctor, ops
from te_jax.primitives import CollectiveGemmSpec, collective_gemm, support
from te_jax.testing import cases, hlo, oracle, tolerance

SCATTER, GATHER = "matmul_reduce_scatter", "all_gather_matmul"
KINDS = pytest.mark.parametrize("kind", [SCATTER, GATHER])
RECIPES = {"none": None, "delayed": te.DelayedScaling(), "current": te.CurrentScaling()}
SPECS = {  # how x, kernel, bias and y are split
    SCATTER: (P(None, None, "tp"), P("tp"), P(), P(None, "tp")),
    GATHER: (P(None, "tp"), P(None, "tp"), P("tp"), P(None, None, "tp")),
}


def put(mesh, arrays, specs):
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]


# Forward and backward


def step_of(kind, recipe, mesh):
    """(x, kernel, bias, dy, state) -> (y, (dx, dw, db), next state)."""
    function, (*specs, y_spec) = getattr(te.collective, kind), SPECS[kind]
    stateful = recipe is not None and recipe.stateful

    def local(x, kernel, bias, dy, *state):
        def loss(x, kernel, bias, *state):
            given = {"state": state[0]} if state else {}
            y = function(x, kernel, "tp", bias=bias, recipe=recipe, overlap="overlapped", **given)
            return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32)), y

        (_, y), grads = jax.value_and_grad(loss, tuple(range(3 + len(state))), has_aux=True)(x, kernel, bias, *state)
        return y, grads[:3], grads[3:]

    in_specs = (*specs, y_spec, *([P()] if stateful else []))
    out_specs = (y_spec, tuple(specs), (P(),) if stateful else ())
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def gradients_in_fp64(x, kernel, bias, dy):
    x, kernel, bias, dy = (oracle.f64(a) for a in (x, kernel, bias, dy))
    return x @ kernel + bias, (dy @ kernel.T, np.einsum("btk,btn->kn", x, dy), dy.sum((0, 1)))


@pytest.mark.parametrize("recipe", RECIPES)
@KINDS
def test_values_and_gradients_are_exact(kind, recipe, mesh, platform):
    """Integers that no quantization changes, and sums of them that any accumulation holds; two sequences.

    With delayed scaling both from the first step on, whose scales are those of its own tensors, and the next.
    """
    rng = np.random.default_rng(0)
    shapes = ((2, 48, 64), (64, 96), (96,), (2, 48, 96))
    arrays = [cases.exact(rng, shape) for shape in shapes]
    want = gradients_in_fp64(*arrays)
    operands = put(mesh, arrays, (*SPECS[kind][:3], SPECS[kind][3]))
    step = step_of(kind, RECIPES[recipe], mesh)
    state = [te.state.init(3, RECIPES[recipe])] if recipe == "delayed" else []
    calls = hlo.count_custom_calls(step.lower(*operands, *state).as_text())
    assert calls["te_jax_collective_gemm"] == 2, calls  # forward, and dgrad
    for _ in range(3):
        y, grads, state = step(*operands, *state)
        np.testing.assert_array_equal(y, want[0])
        for name, got, expected in zip(("dx", "dw", "db"), grads, want[1], strict=True):
            np.testing.assert_array_equal(got, expected, err_msg=name)
    for leaf in jax.tree.leaves(state):
        pieces = [np.asarray(piece.data) for piece in leaf.addressable_shards]
        np.testing.assert_array_equal(pieces[0], pieces[1], err_msg="state differs between devices")


@KINDS
def test_bfloat16(kind, mesh, platform):
    """Without a recipe; larger on GPUs, so that blocks travel in pieces."""
    tokens, k, n = (48, 64, 96) if platform == "cpu" else (4096, 1024, 2048)
    rng = np.random.default_rng(1)
    shapes = ((2, tokens, k), (k, n), (n,), (2, tokens, n))
    arrays = [
        cases.normal(rng, shape, jnp.bfloat16, 1 / math.sqrt(k) if i == 1 else 1) for i, shape in enumerate(shapes)
    ]
    y, grads, _ = step_of(kind, None, mesh)(*put(mesh, arrays, (*SPECS[kind][:3], SPECS[kind][3])))
    want_y, want_grads = gradients_in_fp64(*arrays)
    for name, got, want in zip(("y", "dx", "dw", "db"), (y, *grads), (want_y, *want_grads), strict=True):
        error = np.linalg.norm(oracle.f64(got) - want) / np.linalg.norm(want)
        # A partial sum and the sum are rounded: 2.2e-3 of random values; db is one rounded sum.
        assert error < 3e-3, (name, error)


# Schedules, with rows that their pieces don't divide, scales of each rank's own and a bias that differs by feature

ROWS, FEATURES = 2 * 333, {"cpu": (64, 96), "cuda": (1024, 1536)}
SCHEDULES = {SCATTER: [(1, False), (3, False), (4, False), (1, True), (4, True)], GATHER: [(1, False), (3, False)]}


def problem(kind, mesh, k, n, *, rows=ROWS, seed=0):
    """(operands on the mesh, the result in fp64)."""
    rng = np.random.default_rng(seed)
    gathers = kind == GATHER
    lhs, rhs = (jnp.asarray(rng.standard_normal(shape), jnp.float8_e4m3fn) for shape in ((rows, k), (n, k)))
    bias = jnp.asarray(rng.standard_normal(n) * math.sqrt(k), jnp.bfloat16)
    scales = jnp.array([0.25, 2.0]), jnp.array([3.0, 0.5])
    split = P("tp") if gathers else P(None, "tp")
    specs = (split, split, P("tp") if gathers else P(), P("tp"), P("tp"))
    wide = oracle.f64(lhs), oracle.f64(rhs)
    if gathers:
        wide = wide[0] * np.repeat(oracle.f64(scales[0]), rows // 2)[:, None], wide[1]
        wide = wide[0], wide[1] * np.repeat(oracle.f64(scales[1]), n // 2)[:, None]
    else:
        wide = wide[0] * np.repeat(oracle.f64(scales[0] * scales[1]), k // 2), wide[1]
    return put(mesh, (lhs, rhs, bias, *scales), specs), wide[0] @ wide[1].T + oracle.f64(bias)


@functools.cache
def call_of(kind, mesh, chunks, direct):
    gathers = kind == GATHER
    fields = {"chunks": chunks, "direct": direct, "fast_accumulation": True}
    spec = CollectiveGemmSpec(kind=kind, axis_name="tp", bias=True, **fields)

    def local(lhs, rhs, bias, lhs_scale, rhs_scale):
        return collective_gemm(lhs, rhs, spec, bias=bias, lhs_scale_inv=lhs_scale[0], rhs_scale_inv=rhs_scale[0]).out

    split = P("tp") if gathers else P(None, "tp")
    specs = (split, split, P("tp") if gathers else P(), P("tp"), P("tp"))
    out = P(None, "tp") if gathers else P("tp")
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out))


@KINDS
def test_schedules(kind, mesh, platform):
    k, n = FEATURES[platform]
    operands, want = problem(kind, mesh, k, n)
    for chunks, direct in SCHEDULES[kind]:
        run = call_of(kind, mesh, chunks, direct)
        assert hlo.count_custom_calls(run.lower(*operands).as_text()) == {"te_jax_collective_gemm": 1}
        first = np.asarray(run(*operands))
        error = np.linalg.norm(oracle.f64(first) - want) / np.linalg.norm(want)
        allowed = 3e-3 + tolerance.gemm_error_norm(k, hopper="fast" if platform == "cuda" else "")
        assert error < allowed, (chunks, direct, error)
        for again in [run(*operands) for _ in range(20)]:
            assert np.asarray(again).tobytes() == first.tobytes(), f"chunks={chunks} direct={direct}: other bits"


def test_these_calls_are_for_cuda_too():
    """Here they run on CPU devices; on GPUs they are to be the same custom calls."""
    for platform in ("cpu", "cuda"):
        k, n = FEATURES[platform]
        for kind in (SCATTER, GATHER):
            spec = CollectiveGemmSpec(kind=kind, axis_name="tp", ranks=2, bias=True, chunks=3)
            lhs, rhs = ((ROWS, k // 2), (n, k // 2)) if kind == SCATTER else ((ROWS // 2, k), (n // 2, k))
            operands = [jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn) for shape in (lhs, rhs)]
            rest = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((), (), (rhs[0],), (2,))]
            assert support.why_not(spec, *operands, *rest, platform="cuda") is None


def test_random_calls(mesh, platform):
    """Programs of other shapes, schedules and arenas, in any order and many in flight: no call changes another's."""
    count = 40 if platform == "cpu" else 10_000
    rng = np.random.default_rng(2)
    differs = jax.jit(lambda bad, a, b: bad + jnp.any(a != b))
    programs = []
    for i in range(4 if platform == "cpu" else 12):
        kind = (SCATTER, GATHER)[i % 2]
        k, n = (int(16 * size) for size in rng.integers(2, 9 if platform == "cpu" else 65, 2) * 2)
        operands, want = problem(kind, mesh, k, n, rows=2 * int(rng.integers(1, 400)), seed=i)
        schedules = SCHEDULES[kind]
        run = call_of(kind, mesh, *schedules[rng.integers(len(schedules))])
        first = run(*operands)
        error = np.linalg.norm(oracle.f64(first) - want) / np.linalg.norm(want)
        assert error < 3e-3 + tolerance.gemm_error_norm(k, hopper="fast" if platform == "cuda" else ""), error
        programs.append((run, operands, first))
    bad = jax.device_put(jnp.int32(0), NamedSharding(mesh, P()))
    for number, which in enumerate(rng.integers(len(programs), size=count)):
        run, operands, first = programs[which]
        bad = differs(bad, run(*operands), first)
        if number % 200 == 199:
            bad.block_until_ready()
    assert int(bad) == 0


# What is said about it


def test_plan_and_doctor(mesh, platform):
    """A window that is large enough overlaps, says how, and what memory that takes; doctor has what is in use."""
    chain = te.Sequential(
        [ops.AllGather("tp"), ops.Linear(4096), ops.Linear(8192), ops.ReduceScatter("tp")],
        recipe=te.DelayedScaling(), dtype=jnp.bfloat16,
    )  # fmt: skip
    plans = []

    def local(x):
        plans.append(str(chain.plan(x, platform="cuda")))
        return x

    x = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
    jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")), x)
    assert "overlapped: copy, 1 piece" in plans[0]
    assert "overlapped: copy, 2 pieces" in plans[0]
    assert "has an arena of" in plans[0]
    operands, _ = problem(SCATTER, mesh, 64, 96)
    jax.block_until_ready(call_of(SCATTER, mesh, 1, False)(*operands))
    report = doctor.report()
    for rank in range(2 if platform == "cuda" else 0):
        assert f"rank {rank} of tp=2: tp" in report
    assert "collective matmuls" in report
