"""Collective matmuls between CPU devices: the handler (threads, schedule, flags) and the plain pair, against fp64."""

import dataclasses
import functools
import pathlib
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax import config, primitives
from te_jax.primitives import CollectiveGemmSpec, QuantizeSpec, collective_gemm, support
from te_jax.primitives.collective_schedule import Schedule, arena_bytes, schedule, slot_bytes
from te_jax.quant.block_reference import dequantize_block, from_gemm_layout
from te_jax.testing import hlo, oracle, tolerance
from te_jax.testing.compare import assert_trees_identical, assert_within
from te_jax.testing.processes import run_pair

SCATTER, GATHER = "matmul_reduce_scatter", "all_gather_matmul"
KINDS = pytest.mark.parametrize("kind", [SCATTER, GATHER])
RUNTIME_ERRORS = (jax.errors.JaxRuntimeError, ValueError)  # jax has either, by where it waits for the program
M, K, N = 48, 128, 128  # of all ranks together, for 2, 4 and 8 of them


def mesh_of(ranks, *, data=0, axis_types=AxisType.Auto):
    shape, names = ((data, ranks), ("data", "tp")) if data else ((ranks,), ("tp",))
    devices = np.array(jax.devices()[: max(data, 1) * ranks]).reshape(shape)
    return Mesh(devices, names, axis_types=(axis_types,) * len(names))


def random(shape, dtype, seed):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def problem(kind, ranks, fp8, *, lead=(), dtype=jnp.float32, rows=M):
    """Whole operands, and the specs that split them. Scales and the bias's values all differ."""
    dtype = jnp.float8_e4m3fn if fp8 else dtype
    gathers = kind == GATHER
    operands = {"lhs": random((*lead, rows, K), dtype, 1), "rhs": random((N, K), dtype, 2)}
    row = (None,) * len(lead)
    specs = {
        "lhs": P(*row, "tp") if gathers else P(*row, None, "tp"),
        "rhs": P("tp") if gathers else P(None, "tp"),
    }
    operands["bias"] = random((N,), jnp.bfloat16 if fp8 else dtype, 3)
    specs["bias"] = P("tp") if gathers else P()
    if fp8:
        operands["lhs_scale_inv"] = 2.0 ** jnp.arange(ranks) / 4
        operands["rhs_scale_inv"] = 3.0 / (1 + jnp.arange(ranks, dtype=jnp.float32))
        specs |= {"lhs_scale_inv": P("tp"), "rhs_scale_inv": P("tp")}
    return operands, specs


def oracle_of(kind, ranks, operands):
    """(out, magnitude) in fp64, out [*B, M, N] of all ranks."""
    lhs, rhs = oracle.f64(operands["lhs"]), oracle.f64(operands["rhs"])
    if "lhs_scale_inv" in operands:
        scales = [oracle.f64(operands[name]) for name in ("lhs_scale_inv", "rhs_scale_inv")]
        if kind == GATHER:
            lhs = lhs * np.repeat(scales[0], lhs.shape[-2] // ranks)[:, None]
            rhs = rhs * np.repeat(scales[1], N // ranks)[:, None]
        else:
            lhs = lhs * np.repeat(scales[0] * scales[1], K // ranks)
    bias = oracle.f64(operands["bias"])
    return lhs @ rhs.T + bias, np.abs(lhs) @ np.abs(rhs).T + np.abs(bias)


def build(kind, mesh, operands, specs, *, check_vma=True, results=("out",), **fields):
    """The jitted function of the operands, in their order, that gives those results."""
    lead = (None,) * (operands["lhs"].ndim - 2)
    spec = CollectiveGemmSpec(kind=kind, axis_name="tp", fp8="lhs_scale_inv" in operands, bias=True, **fields)
    gathers = kind == GATHER
    out_specs = {
        "out": P(*lead, None, "tp") if gathers else P(*lead, "tp"),
        "gathered": P("tp"),  # of every rank, one after the other
        "gathered_scale_inv": P("tp"),
        "amax": P(),
    }

    def local(*args):
        given = dict(zip(operands, args, strict=True))
        given = {name: x[0] if name.endswith("_inv") else x for name, x in given.items()}
        found = collective_gemm(given.pop("lhs"), given.pop("rhs"), spec, **given)
        parts = {name: getattr(found, name) for name in results}
        return {name: x[None] if name == "gathered" else x for name, x in parts.items()}

    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=tuple(specs.values()),
            out_specs={name: out_specs[name] for name in results},
            check_vma=check_vma,
        )
    )


def error_bound(kind, ranks, out, magnitude, out_dtype):
    """What a GEMM may be off by, and half a unit for each partial result that was rounded on its way."""
    bound = tolerance.gemm_error(magnitude, K, out, out_dtype)
    if kind == SCATTER:
        # Rounded values are no larger than the magnitudes they come from; all ranks' together those of the sum.
        bound = bound + magnitude * (tolerance.unit_roundoff(out_dtype) + ranks * tolerance.FP32_UNIT)
    return bound


SCHEDULES = {
    SCATTER: [(1, False), (3, False), (1, True), (4, True)],
    GATHER: [(1, False), (3, False)],
}


@pytest.mark.parametrize(
    ("ranks", "fp8"), [(2, True), (4, True), (8, True), (8, False)], ids=["2-fp8", "4-fp8", "8-fp8", "8-float32"]
)
@KINDS
def test_values(kind, ranks, fp8):
    """Every schedule, with results as a rank's bias and scales are its own."""
    operands, specs = problem(kind, ranks, fp8, lead=(3,) if ranks == 4 else ())
    out_dtype = "bfloat16" if fp8 else "float32"
    expected, magnitude = oracle_of(kind, ranks, operands)
    bound = error_bound(kind, ranks, expected, magnitude, out_dtype)
    mesh = mesh_of(ranks)
    outs = []
    for chunks, direct in SCHEDULES[kind]:
        run = build(kind, mesh, operands, specs, out_dtype=out_dtype, chunks=chunks, direct=direct)
        assert hlo.count_custom_calls(run.lower(*operands.values()).as_text()) == {"te_jax_collective_gemm": 1}
        outs.append(run(*operands.values())["out"])
        assert_within(outs[-1], expected, bound, f"chunks={chunks} direct={direct}")
        # The order of sums is that of ranks whatever the schedule and whoever comes first.
        assert_trees_identical(run(*operands.values())["out"], outs[-1])
    with config.custom_calls(False):
        plain = build(kind, mesh, operands, specs, out_dtype=out_dtype)(*operands.values())["out"]
    assert_within(plain, expected, bound, "plain pair")


@KINDS
def test_pieces_of_different_heights_across_a_batch(kind):
    """Blocks of 2 x 320 rows in pieces of 256, 256 and 128: one of them has rows of both examples."""
    operands, specs = problem(kind, 4, True, lead=(2,), rows=1280)
    expected, magnitude = oracle_of(kind, 4, operands)
    bound = error_bound(kind, 4, expected, magnitude, "bfloat16")
    gathers = kind == GATHER
    results = ("out", "gathered") if gathers else ("out",)
    fields = {"chunks": 3, "keep_gathered": gathers, "results": results}
    found = build(kind, mesh_of(4), operands, specs, **fields)(*operands.values())
    assert_within(found["out"], expected, bound)
    if gathers:
        for kept in found["gathered"]:
            np.testing.assert_array_equal(oracle.f64(kept), oracle.f64(operands["lhs"]))


@pytest.mark.parametrize(("ranks", "chunks", "direct"), [(2, 2, False), (2, 2, True), (4, 3, False), (4, 1, True)])
@KINDS
def test_block_scaled(kind, ranks, chunks, direct):
    """lhs in 1x128 blocks, rhs in 128x128: every row has scales of its own, which travel with it."""
    gathers = kind == GATHER
    rows, k = ranks * 264, 256 * ranks  # not in pieces of one height
    x, w = random((rows, k), jnp.float32, 1) * jnp.exp2(jnp.arange(rows) % 7)[:, None], random((128, k), jnp.float32, 2)
    lhs = primitives.quantize(x, None, QuantizeSpec(format="e4m3", scaling="block_1x128"))
    rhs = primitives.quantize(w, None, QuantizeSpec(format="e4m3", scaling="block_128x128"))
    wide = [
        oracle.f64(dequantize_block(q.data, from_gemm_layout(q.scale_inv, block), block, jnp.float32))
        for q, block in ((lhs, (1, 128)), (rhs, (128, 128)))
    ]
    spec = CollectiveGemmSpec(
        kind=kind,
        axis_name="tp",
        lhs_scaling="block_1x128",
        rhs_scaling="block_128x128",
        chunks=1 if gathers else chunks,
        direct=direct and not gathers,
        keep_gathered=gathers,
    )

    def local(lhs, rhs, lhs_scale_inv, rhs_scale_inv):
        found = collective_gemm(lhs, rhs, spec, lhs_scale_inv=lhs_scale_inv, rhs_scale_inv=rhs_scale_inv)
        return (found.out, found.gathered[None], found.gathered_scale_inv[None]) if gathers else (found.out,)

    # rhs is whole on every rank of a gather: 128 of its rows are one block.
    specs = (P("tp"), P(), P(None, "tp"), P()) if gathers else (P(None, "tp"), P(None, "tp"), P("tp"), P(None, "tp"))
    outs = (P("tp"),) * (3 if gathers else 1)
    run = jax.jit(jax.shard_map(local, mesh=mesh_of(ranks), in_specs=specs, out_specs=outs))
    operands = lhs.data, rhs.data, lhs.scale_inv, rhs.scale_inv
    assert hlo.count_custom_calls(run.lower(*operands).as_text()) == {"te_jax_collective_gemm": 1}
    out, *kept = run(*operands)
    expected, magnitude = wide[0] @ wide[1].T, np.abs(wide[0]) @ np.abs(wide[1]).T
    bound = tolerance.gemm_error(magnitude, k, expected, "bfloat16")
    if not gathers:
        assert_within(out, expected, bound + magnitude * tolerance.unit_roundoff("bfloat16"))
        return
    for rank in range(ranks):
        assert_within(out[rank * rows : (rank + 1) * rows], expected, bound)
        np.testing.assert_array_equal(oracle.f64(kept[0][rank]), oracle.f64(lhs.data))
        np.testing.assert_array_equal(kept[1][rank], lhs.scale_inv)


@pytest.mark.parametrize("check_vma", [True, False])
def test_bfloat16_and_an_rhs_that_is_contracted_first(check_vma):
    operands, specs = problem(SCATTER, 4, False, dtype=jnp.bfloat16)
    expected, magnitude = oracle_of(SCATTER, 4, operands)
    operands["rhs"], specs["rhs"] = operands["rhs"].T, P("tp", None)
    fields = {"chunks": 2, "rhs_contract_first": True, "check_vma": check_vma}
    run = build(SCATTER, mesh_of(4), operands, specs, **fields)
    bound = error_bound(SCATTER, 4, expected, magnitude, "bfloat16")
    assert_within(run(*operands.values())["out"], expected, bound)


@pytest.mark.parametrize("ranks", [2, 4])
@KINDS
def test_fp8_out(kind, ranks):
    """amax is that of all ranks' sums before out_scale, with and without the handler."""
    operands, specs = problem(kind, ranks, True)
    operands["out_scale"], specs["out_scale"] = jnp.float32(3.0), P()
    expected, magnitude = oracle_of(kind, ranks, operands)
    bound = error_bound(kind, ranks, expected, magnitude, "bfloat16")
    fields = {"out_dtype": "float8_e4m3fn", "amax": True, "results": ("out", "amax")}
    for custom_calls in (True, False):
        with config.custom_calls(custom_calls):
            found = build(kind, mesh_of(ranks), operands, specs, chunks=2, **fields)(*operands.values())
        error = 3.0 * bound + tolerance.quantization_error(3.0 * expected, "e4m3", 1.0)
        assert found["out"].dtype == jnp.float8_e4m3fn
        assert_within(found["out"], np.clip(3.0 * expected, -448, 448), error)
        assert_within(found["amax"], np.abs(expected).max(), bound.max(), "amax")


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "float32"])
def test_keep_gathered(fp8):
    """Every rank gets the whole operand, and every rank's scale."""
    operands, specs = problem(GATHER, 4, fp8, lead=(2,))
    results = ("out", "gathered") + (("gathered_scale_inv",) if fp8 else ())
    out_dtype = "bfloat16" if fp8 else "float32"
    for custom_calls in (True, False):
        fields = {"keep_gathered": True, "results": results, "chunks": 2, "out_dtype": out_dtype}
        with config.custom_calls(custom_calls):
            found = build(GATHER, mesh_of(4), operands, specs, **fields)(*operands.values())
        want = np.broadcast_to(oracle.f64(operands["lhs"]), (4, 2, M, K))
        np.testing.assert_array_equal(oracle.f64(found["gathered"]), want)
        if fp8:
            np.testing.assert_array_equal(found["gathered_scale_inv"], np.tile(operands["lhs_scale_inv"], 4))


@KINDS
def test_groups_of_a_larger_mesh(kind):
    """Each group works on its own rows; results don't vary over an axis that no operand varies over."""
    operands, specs = problem(kind, 4, True)
    expected, magnitude = oracle_of(kind, 4, operands)
    bound = error_bound(kind, 4, expected, magnitude, "bfloat16")
    run = build(kind, mesh_of(4, data=2), operands, specs, chunks=1)
    assert_within(run(*operands.values())["out"], expected, bound)
    both, split = dict(operands), dict(specs)
    both["lhs"] = jnp.stack([operands["lhs"], random((M, K), jnp.float8_e4m3fn, 9)])
    split["lhs"] = P("data", *specs["lhs"])
    out = P("data", None, "tp") if kind == GATHER else P("data", "tp")

    def local(*args):
        given = dict(zip(both, args, strict=True))
        given = {name: x[0] if name.endswith("_inv") else x for name, x in given.items()}
        spec = CollectiveGemmSpec(kind=kind, axis_name="tp", bias=True)
        return collective_gemm(given.pop("lhs"), given.pop("rhs"), spec, **given).out

    found = jax.jit(jax.shard_map(local, mesh=mesh_of(4, data=2), in_specs=tuple(split.values()), out_specs=out))(
        *both.values()
    )
    assert_within(found[0], expected, bound)
    expected, magnitude = oracle_of(kind, 4, {**operands, "lhs": both["lhs"][1]})
    assert_within(found[1], expected, error_bound(kind, 4, expected, magnitude, "bfloat16"))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_beside_an_axis_that_is_not_manual_the_plain_pair_runs(axis_type):
    """A device can't tell there which group it belongs to."""
    operands, specs = problem(SCATTER, 4, False)
    mesh = mesh_of(4, data=2, axis_types=axis_type)
    reasons = []

    def local(lhs, rhs, bias):
        spec = CollectiveGemmSpec(
            kind=SCATTER, axis_name="tp", ranks=4, fp8=False, out_dtype="float32", bias=True, chunks=1
        )
        reasons.append(support.why_not(spec, lhs, rhs, bias, jnp.zeros(2, jnp.int32)))
        return collective_gemm(lhs, rhs, spec, bias=bias).out

    mapped = jax.shard_map(local, mesh=mesh, in_specs=tuple(specs.values()), out_specs=P("tp"), axis_names={"tp"})
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(operands.values(), specs.values(), strict=True)
    ]
    run = jax.jit(mapped)
    assert hlo.count_custom_calls(run.lower(*placed).as_text())["te_jax_collective_gemm"] == 0
    kind = "Auto" if axis_type == AxisType.Auto else "not Manual"
    assert reasons[0] == f"mesh axes ('data',) are {kind} inside a shard_map over ('tp',)"
    expected, magnitude = oracle_of(SCATTER, 4, operands)
    assert_within(run(*placed), expected, error_bound(SCATTER, 4, expected, magnitude, "float32"))


def two_layers(x, up, down, **fields):
    """Column- then row-parallel, and an independent product that XLA may run before, between or after."""
    spec = functools.partial(CollectiveGemmSpec, axis_name="tp", fp8=False, out_dtype="float32", **fields)
    hidden = collective_gemm(x, up, spec(kind=GATHER)).out
    beside = collective_gemm(x, 2 * up, spec(kind=GATHER)).out
    return collective_gemm(hidden, down, spec(kind=SCATTER)).out, beside


def layers():
    x, up, down = random((M, K), jnp.float32, 1), random((64, K), jnp.float32, 2), random((K, 64), jnp.float32, 3)
    return x, up / 8, down / 8


LAYER_SPECS = (P("tp"), P("tp"), P(None, "tp"))


def test_several_calls_in_one_program_and_programs_that_overlap():
    """Devices run independent calls in any order, and several runs at a time."""
    x, up, down = layers()
    run = jax.jit(jax.shard_map(two_layers, mesh=mesh_of(8), in_specs=LAYER_SPECS, out_specs=(P("tp"), P(None, "tp"))))
    first = jax.block_until_ready(run(x, up, down))
    expected = oracle.f64(x) @ oracle.f64(up).T @ oracle.f64(down).T
    np.testing.assert_allclose(first[0], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(first[1], 2 * oracle.f64(x) @ oracle.f64(up).T, rtol=1e-4, atol=1e-4)
    for found in [run(x, up, down) for _ in range(20)]:
        assert_trees_identical(found, first)


def test_in_a_loop_and_under_vmap():
    x, up, down = layers()

    def local(x, up, down):
        return jax.lax.scan(lambda carry, _: (two_layers(carry, up, down)[0], None), x, None, length=5)[0]

    run = jax.jit(jax.shard_map(local, mesh=mesh_of(4), in_specs=LAYER_SPECS, out_specs=P("tp")))
    expected = oracle.f64(x)
    for _ in range(5):
        expected = expected @ oracle.f64(up).T @ oracle.f64(down).T
    np.testing.assert_allclose(run(x, up, down), expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())

    batched = jax.shard_map(
        jax.vmap(lambda x, up, down: two_layers(x, up, down)[0], (0, None, None)),
        mesh=mesh_of(4),
        in_specs=(P(None, "tp"), *LAYER_SPECS[1:]),
        out_specs=P(None, "tp"),
    )
    found = jax.jit(batched)(jnp.stack([x, -x]), up, down)
    expected = oracle.f64(x) @ oracle.f64(up).T @ oracle.f64(down).T
    np.testing.assert_allclose(found, np.stack([expected, -expected]), rtol=1e-4, atol=1e-4)


def test_two_meshes_at_once():
    """The same devices as one group of 8 and as four groups of 2, in one program and in programs that overlap."""
    x, up, down = layers()
    runs = [
        jax.jit(jax.shard_map(two_layers, mesh=mesh, in_specs=LAYER_SPECS, out_specs=(P("tp"), P(None, "tp"))))
        for mesh in (mesh_of(8), mesh_of(2, data=4))
    ]
    expected = oracle.f64(x) @ oracle.f64(up).T @ oracle.f64(down).T
    for found in [run(x, up, down) for _ in range(5) for run in runs]:
        np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-4)


@KINDS
def test_a_rank_that_does_not_come_is_an_error_on_all_others(kind):
    """In bounded time, typed, and naming who waited for whom. Later calls, of all ranks, work."""
    operands, specs = problem(kind, 4, False)

    def local(missing, lhs, rhs, bias):
        rank = jax.lax.axis_index("tp")
        # A rank that is told of another group waits there: nobody hears of it here.
        place = jnp.where(np.arange(2) == 0, rank, jnp.where(rank == missing, 1, 0))
        spec = CollectiveGemmSpec(kind=kind, axis_name="tp", fp8=False, out_dtype="float32", bias=True, timeout_ms=500)
        return collective_gemm(lhs, rhs, spec, bias=bias, place=place).out

    out = P(None, "tp") if kind == GATHER else P("tp")
    run = jax.jit(jax.shard_map(local, mesh=mesh_of(4), in_specs=(P(), *specs.values()), out_specs=out))
    run(-1, *operands.values()).block_until_ready()
    start = time.monotonic()
    with pytest.raises(RUNTIME_ERRORS) as error:
        run(2, *operands.values()).block_until_ready()
    assert time.monotonic() - start < 10
    pattern = (
        r"(DEADLINE_EXCEEDED|ABORTED): te_jax collective_gemm, rank \d: rank \d waited 5\d\d ms for chunk 0 of rank"
    )
    assert re.search(pattern, str(error.value)), str(error.value)
    expected, magnitude = oracle_of(kind, 4, operands)
    assert_within(run(-1, *operands.values()), expected, error_bound(kind, 4, expected, magnitude, "float32"))


def test_two_processes():
    """CPU devices of several processes share no memory: the plain pair runs."""
    run_pair(pathlib.Path(__file__).with_name("collective_processes.py"), devices=1, timeout_s=120)


# What is refused, and what runs as the plain pair


def in_tp(function, *operands, ranks=4):
    """Traces ``function`` of whole operands, each device having them all, inside shard_map."""
    mapped = jax.shard_map(function, mesh=mesh_of(ranks), in_specs=P(), out_specs=P(), check_vma=False)
    return jax.eval_shape(mapped, *operands)


X, W = jax.ShapeDtypeStruct((M, K), jnp.bfloat16), jax.ShapeDtypeStruct((N, K), jnp.bfloat16)
SPEC = CollectiveGemmSpec(kind=SCATTER, axis_name="tp", fp8=False)


@pytest.mark.parametrize(
    ("fields", "shape", "text"),
    [
        ({"kind": "matmul"}, (M, K), "kind: expected matmul_reduce_scatter or all_gather_matmul, got 'matmul'"),
        ({"axis_name": "model"}, (M, K), r"axis_name: expected one of the mesh's \('tp',\), got 'model'"),
        ({"ranks": 2}, (M, K), "ranks: expected 4, the size of the axis, got 2"),
        ({}, (M + 2, K), "lhs: expected rows that 4 ranks divide, at least one for each, got 50 rows"),
        ({}, (0, K), "lhs: expected rows that 4 ranks divide, at least one for each, got 0 rows"),
        ({}, (K,), r"lhs: expected rank at least 2 \(\[\*B, M, K\]\), got shape \(128,\)"),
        ({"keep_gathered": True}, (M, K), "keep_gathered: expected False for a reduce-scatter"),
        ({"kind": GATHER, "direct": True, "chunks": 1}, (M, K), "direct: expected False for an all-gather"),
        ({"direct": True}, (M, K), "direct: expected False where chunks is 0"),
        ({"chunks": 17}, (M, K), "chunks: expected 0 to 16, got 17"),
        ({"timeout_ms": 0}, (M, K), "timeout_ms: expected at least 1, got 0"),
        ({"bias": True}, (M, K), "bias: expected an array for this spec, got None"),
        ({}, (M, K + 16), "rhs: expected contracted dimensions"),
    ],
)
def test_what_no_platform_takes(fields, shape, text):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    with pytest.raises(ValueError, match=text):
        in_tp(lambda x, w: collective_gemm(x, w, dataclasses.replace(SPEC, **fields)).out, x, W)


def test_outside_shard_map_and_gradients_are_refused():
    x, w = (jnp.zeros(s.shape, s.dtype) for s in (X, W))
    with jax.set_mesh(mesh_of(4)), pytest.raises(ValueError, match="axis_name: expected an axis of the surrounding"):
        jax.jit(lambda x, w: collective_gemm(x, w, SPEC).out)(x, w)
    with pytest.raises(ValueError, match="axis_name: expected an axis of the surrounding shard_map"):
        collective_gemm(x, w, SPEC)
    with pytest.raises(NotImplementedError, match="a derivative of a quantized primitive"):
        in_tp(lambda x, w: jax.grad(lambda x: collective_gemm(x, w, SPEC).out.sum())(x), X, W)


def test_why_the_plain_pair_runs():
    """By platform where that is what decides; a schedule that is asked for is not second-guessed."""
    place = jax.ShapeDtypeStruct((2,), jnp.int32)
    spec = dataclasses.replace(SPEC, ranks=4)

    def why(spec, x=X, w=W, platform="cpu", rest=()):
        return support.why_not(spec, x, w, *rest, place, platform=platform)

    assert why(spec) is None
    assert "below 17179869184, where overlap is known to pay" in why(spec, platform="cuda")
    assert why(dataclasses.replace(spec, chunks=2), platform="cuda") is None
    large = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
    assert why(spec, *large, platform="cuda") is None
    assert why(dataclasses.replace(spec, ranks=1)) == "1 ranks along 'tp': the overlapped call is for 2 to 16"
    assert "not a multiple of 16" in why(spec, w=jax.ShapeDtypeStruct((40, K), jnp.bfloat16))
    assert why(spec, platform="tpu") == "there are no custom calls for platform tpu"
    blocks = dataclasses.replace(spec, fp8=True, lhs_scaling="block_1x128", rhs_scaling="block_128x128")
    assert why(blocks, x=jax.ShapeDtypeStruct((64, K), jnp.float8_e4m3fn), rest=(place, place)) is None
    for x, text in (((3, 64, K), "has a batch dimension"), ((M, K), "12 rows of a rank are not a multiple of 8")):
        assert text in why(blocks, x=jax.ShapeDtypeStruct(x, jnp.float8_e4m3fn), rest=(place, place))
    pieces = dataclasses.replace(blocks, kind=GATHER, chunks=2)
    assert "an all-gather in pieces" in why(
        pieces, x=jax.ShapeDtypeStruct((64, K), jnp.float8_e4m3fn), rest=(place,) * 2
    )


def test_one_rank_is_a_gemm():
    operands, specs = problem(SCATTER, 1, True)
    run = build(SCATTER, mesh_of(1), operands, specs)
    text = run.lower(*operands.values()).as_text()
    assert hlo.count_custom_calls(text) == {"te_jax_gemm": 1}
    expected, magnitude = oracle_of(SCATTER, 1, operands)
    assert_within(run(*operands.values())["out"], expected, error_bound(SCATTER, 1, expected, magnitude, "bfloat16"))


# The schedule and the arena


@pytest.mark.parametrize(
    ("kind", "ranks", "m", "n", "k", "expected"),
    [
        (SCATTER, 2, 8192, 8192, 8192, Schedule(2, False)),
        (SCATTER, 2, 8192, 4096, 4096, Schedule(4, False)),
        (SCATTER, 2, 2048, 4096, 4096, Schedule(1, True)),
        (SCATTER, 8, 16384, 8192, 32768, Schedule(1, False)),
        (GATHER, 2, 8192, 8192, 8192, Schedule(1, False)),
    ],
)
def test_the_schedule_follows_the_shape(kind, ranks, m, n, k, expected):
    spec = CollectiveGemmSpec(kind=kind, axis_name="tp", ranks=ranks)
    scatters = kind == SCATTER
    lhs = jax.ShapeDtypeStruct((m, k // ranks) if scatters else (m // ranks, k), jnp.float8_e4m3fn)
    rhs = jax.ShapeDtypeStruct((n, k // ranks) if scatters else (n // ranks, k), jnp.float8_e4m3fn)
    assert schedule(spec, lhs, rhs) == expected
    chosen = dataclasses.replace(spec, chunks=3)
    assert schedule(chosen, lhs, rhs) == Schedule(3, False)
    assert str(expected) in ("copy, 1 piece", "copy, 2 pieces", "copy, 4 pieces", "direct, 1 piece")


def test_bytes_of_the_arena():
    spec = CollectiveGemmSpec(kind=SCATTER, axis_name="tp", ranks=2)
    lhs, rhs = (jax.ShapeDtypeStruct((8192, 4096), jnp.float8_e4m3fn) for _ in range(2))
    assert slot_bytes(spec, lhs, rhs) == 4096 * 8192 * 2
    assert slot_bytes(dataclasses.replace(spec, kind=GATHER), lhs, rhs) == 8192 * 4096
    # flags and scratch, two slots with their heads, staging of a block, a block in float32: a bit above 5 slots
    assert arena_bytes(2, 1 << 26) == (5 << 26) + (2 << 20)
