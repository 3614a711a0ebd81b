"""One of two processes that multiply together, each with a CPU device or a GPU, which may be the same one.

python collective_processes.py PORT PROCESS
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax import compat, primitives
from te_jax.primitives import CollectiveGemmSpec, QuantizeSpec, collective_gemm
from te_jax.quant.block_reference import BLOCK_1X128, BLOCK_128X128, dequantize_block, from_gemm_layout
from te_jax.testing import hlo, oracle

SCATTER, GATHER = "matmul_reduce_scatter", "all_gather_matmul"


def whole(shape, dtype, seed):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def place(mesh, x, spec):
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def build(mesh, kind, fp8, **fields):
    gathers = kind == GATHER
    spec = CollectiveGemmSpec(kind=kind, axis_name="tp", fp8=fp8, bias=True, **fields)

    def local(lhs, rhs, bias, lhs_scale_inv, rhs_scale_inv):
        scales = {"lhs_scale_inv": lhs_scale_inv[0], "rhs_scale_inv": rhs_scale_inv[0]} if fp8 else {}
        return collective_gemm(lhs, rhs, spec, bias=bias, **scales).out

    operand = P("tp") if gathers else P(None, "tp")
    specs = (operand, operand, P("tp") if gathers else P(), P("tp"), P("tp"))
    out = P(None, "tp") if gathers else P("tp")
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out)), specs


def problem(mesh, kind, m, k, n, *, fp8, **fields):
    """(function, operands on the mesh, the whole result in fp64)."""
    dtype = jnp.float8_e4m3fn if fp8 else jnp.bfloat16
    lhs, rhs, bias = whole((m, k), dtype, 1), whole((n, k), dtype, 2), whole((n,), jnp.bfloat16, 3)
    scales = jnp.array([0.5, 2.0]), jnp.array([4.0, 1.0])
    run, specs = build(mesh, kind, fp8, **fields)
    operands = [place(mesh, x, spec) for x, spec in zip((lhs, rhs, bias, *scales), specs, strict=True)]
    lhs, rhs = oracle.f64(lhs), oracle.f64(rhs)
    if fp8 and kind == GATHER:
        lhs = lhs * np.repeat(oracle.f64(scales[0]), m // 2)[:, None]
        rhs = rhs * np.repeat(oracle.f64(scales[1]), n // 2)[:, None]
    elif fp8:
        lhs = lhs * np.repeat(oracle.f64(scales[0]) * oracle.f64(scales[1]), k // 2)
    return run, operands, lhs @ rhs.T + oracle.f64(bias)


def block_problem(mesh, kind, m, k, n, **fields):
    """The same with a scale for each 1x128 and 128x128 block, which travel too."""
    gathers = kind == GATHER
    lhs = primitives.quantize(whole((m, k), jnp.float32, 4), None, QuantizeSpec(format="e4m3", scaling="block_1x128"))
    rhs = primitives.quantize(whole((n, k), jnp.float32, 5), None, QuantizeSpec(format="e4m3", scaling="block_128x128"))
    spec = CollectiveGemmSpec(
        kind=kind, axis_name="tp", lhs_scaling="block_1x128", rhs_scaling="block_128x128", **fields
    )

    def local(lhs, rhs, lhs_scale_inv, rhs_scale_inv):
        return collective_gemm(lhs, rhs, spec, lhs_scale_inv=lhs_scale_inv, rhs_scale_inv=rhs_scale_inv).out

    if gathers:
        specs, out = (P("tp"), P("tp"), P(None, "tp"), P("tp")), P(None, "tp")
    else:
        specs, out = (P(None, "tp"), P(None, "tp"), P("tp"), P(None, "tp")), P("tp")
    operands = [
        place(mesh, x, spec) for x, spec in zip((lhs.data, rhs.data, lhs.scale_inv, rhs.scale_inv), specs, strict=True)
    ]
    wide = [
        oracle.f64(dequantize_block(q.data, from_gemm_layout(q.scale_inv, block), block))
        for q, block in ((lhs, BLOCK_1X128), (rhs, BLOCK_128X128))
    ]
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out)), operands, wide[0] @ wide[1].T


def check(out, expected):
    (shard,) = out.addressable_shards
    got, want = oracle.f64(shard.data), expected[shard.index]
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    # Fast accumulation is off. A partial result and the sum are rounded once each: 2.2e-3 of random values.
    assert error < 3e-3, error
    return np.asarray(shard.data).tobytes()


PROBLEMS = {
    "fp8": functools.partial(problem, fp8=True),
    "bfloat16": functools.partial(problem, fp8=False),
    "blocks": block_problem,
}


def main():
    port, process = sys.argv[1], int(sys.argv[2])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"localhost:{port}", num_processes=2, process_id=process, local_device_ids=[0], initialization_timeout=60
    )
    assert jax.device_count() == 2
    assert jax.local_device_count() == 1
    mesh = Mesh(np.array(jax.devices()), ("tp",))

    on_gpu = jax.default_backend() == "gpu"

    # Schedules, and an arena that grows with what comes.
    cases = [(512, 512, 512, {"chunks": 2}), (512, 512, 512, {"chunks": 1}), (2048, 1024, 1024, {"chunks": 3})]
    for m, k, n, fields in cases if on_gpu else [(64, 256, 256, {"chunks": 1})]:
        for kind in (SCATTER, GATHER):
            for name, make in PROBLEMS.items():
                if name == "blocks":
                    fields = fields | {"chunks": 1} if kind == GATHER else fields
                run, operands, expected = make(mesh, kind, m, k, n, **fields)
                calls = hlo.count_custom_calls(run.lower(*operands).as_text())
                assert ("te_jax_collective_gemm" in calls) == on_gpu, calls
                first = check(run(*operands), expected)
                for out in [run(*operands) for _ in range(5)]:
                    assert check(out, expected) == first
                print(f"{kind} {m}x{k}x{n} {name} {fields}: right", flush=True)
    if on_gpu:
        late_peer(mesh, process)
    print("done", flush=True)


def late_peer(mesh, process):
    """A peer that doesn't come: NaN, then an error, in the time that was given."""
    run, operands, expected = problem(mesh, SCATTER, 512, 512, 512, fp8=True, chunks=2, direct=True)
    check(run(*operands), expected)
    run, operands, expected = problem(mesh, SCATTER, 512, 512, 512, fp8=True, chunks=1, timeout_ms=3000)
    check(run(*operands), expected)
    store = compat.key_value_store()
    if process == 0:
        out = np.asarray(run(*operands).addressable_shards[0].data).astype(np.float32)
        assert np.isnan(out).all()
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"ABORTED.*rank 0 of tp=2: tp, group 0 waited in vain"):
            jax.block_until_ready(run(*operands))
        store.key_value_set("over", "yes")
    else:
        store.blocking_key_value_get("over", 60_000)


if __name__ == "__main__":
    main()
