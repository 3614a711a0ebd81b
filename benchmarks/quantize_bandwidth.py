"""Times the custom calls on a GPU: TB/s of the quantizing passes, TFLOP/s of the GEMMs.

A pass is called on several sets of operands, with results of their own, in a loop on the device (one program, so no
dispatch from Python in between): nothing is in the L2 cache when its turn comes, and launches follow each other as they
do in a training step. A GEMM is a program of its own, many in flight. Medians over several runs. Bytes are those that
have to move: each operand read once (twice where the scale comes from the tensor's own amax), each result written once;
"of copy" compares with a device copy that moves as many, timed in the same run. GEMM operands are random: zeros run
faster.

    python benchmarks/quantize_bandwidth.py --commit $(git rev-parse HEAD) --out benchmarks/results/h200.jsonl
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import report

from te_jax import primitives as P
from te_jax.primitives import library

F8 = jnp.float8_e4m3fn
SETS = 8  # of operands: 256 MB at least for the shapes below, four times the L2 cache of an H200
SHAPES = ((8192, 8192), (8192, 4096), (2048, 4096))


def seconds(call, scale, sets, repeats: int = 5) -> float:
    """Median seconds of one ``call(scale, *operands)``, of which the last result is f32[]."""
    abstract = jax.eval_shape(call, jnp.float32(scale), *sets[0])
    blank = jax.jit(lambda: [jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract) for _ in sets])

    # The results are carried so that each call has memory of its own for them; the scale, so that no call leaves the
    # loop.
    def body(_, carry, sets):
        carried_scale, _ = carry
        outs = [call(carried_scale, *operands) for operands in sets]
        return scale + 0 * outs[-1][-1], outs

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def run(count, outs, sets):
        return jax.lax.fori_loop(0, count, lambda i, c: body(i, c, sets), (jnp.float32(scale), outs))

    outs = blank()

    def once(count):
        nonlocal outs
        start = time.perf_counter()
        carried_scale, outs = run(count, outs, sets)
        carried_scale.block_until_ready()
        return time.perf_counter() - start

    once(2), once(2)
    count = max(4, min(500, int(0.02 / once(2) * 2)))
    once(count), once(2 * count)
    # The difference of two lengths leaves out the launch of the program.
    return statistics.median((once(2 * count) - once(count)) / (count * len(sets)) for _ in range(repeats))


@functools.cache
def copy_bandwidth(moved: int) -> float:
    """Bytes per second of device copies that read and write ``moved`` bytes together, one after the other."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def check(status):
        if status:
            raise RuntimeError(f"libcuda: error {status}")

    context, stream = ctypes.c_void_p(), ctypes.c_void_p()
    check(cuda.cuInit(0))
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    check(cuda.cuCtxSetCurrent(context))
    check(cuda.cuStreamCreate(ctypes.byref(stream), 1))
    events = [ctypes.c_void_p() for _ in range(2)]
    for event in events:
        check(cuda.cuEventCreate(ctypes.byref(event), 0))
    arrays = [jnp.zeros(moved // 2, jnp.uint8) for _ in range(2 * SETS)]
    places = [ctypes.c_uint64(x.block_until_ready().unsafe_buffer_pointer()) for x in arrays]
    times = []
    for _ in range(6):
        check(cuda.cuEventRecord(events[0], stream))
        for i in range(4 * SETS):
            source, target = places[2 * (i % SETS)], places[2 * (i % SETS) + 1]
            check(cuda.cuMemcpyDtoDAsync_v2(target, source, ctypes.c_size_t(moved // 2), stream))
        check(cuda.cuEventRecord(events[1], stream))
        check(cuda.cuEventSynchronize(events[1]))
        ms = ctypes.c_float()
        check(cuda.cuEventElapsedTime(ctypes.byref(ms), *events))
        times.append(ms.value / 1e3 / (4 * SETS))
    return moved / statistics.median(times[1:])


@functools.partial(jax.jit, static_argnums=(0, 1))
def random(shape, dtype, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def passes(rows, cols):
    """(name, call, scale, operands, bytes) of every quantizing pass on [rows, cols]."""
    x = ((rows, cols), jnp.bfloat16)
    wide = ((rows, 2 * cols), jnp.bfloat16)
    gamma = ((cols,), jnp.float32)
    n = rows * cols
    both = {"format": "e4m3", "data_t": True, "amax": True}

    def results(out):
        return [value for value in (*out[:3], out.dbias, out.rstd, out.amax) if value is not None]

    def quantize(scale, x, **spec):
        return results(P.quantize(x, scale, P.QuantizeSpec(**both | spec)))

    for name, scale, reads in (("delayed", 1.0, 1), ("current", 0.0, 2)):
        yield (f"quantize row copy, {name}", functools.partial(quantize, data_t=False), scale, (x,),
               (2 * reads + 1) * n)  # fmt: skip
        yield f"quantize both copies, {name}", quantize, scale, (x,), (2 * reads + 2) * n
        yield (f"quantize both copies + dbias, {name}", functools.partial(quantize, dbias=True), scale, (x,),
               (2 * reads + 2) * n)  # fmt: skip

        for kind, params in (("rmsnorm", (gamma,)), ("layernorm", (gamma, gamma))):

            def norm(scale, x, gamma, beta=None, kind=kind):
                return results(P.norm(x, gamma, beta, scale, P.NormSpec(kind=kind, stats=True, **both)))

            yield f"{kind}, {name}", norm, scale, (x, *params), (2 * reads + 2) * n
        for kind, operand in (("gelu", x), ("swiglu", wide), ("squared_relu", x), ("clamped_swiglu", wide)):

            def activation(scale, x, kind=kind):
                return results(P.activation(x, scale, P.ActivationSpec(kind=kind, **both)))

            def grad(scale, dy, x, kind=kind):
                return results(P.activation_grad(dy, x, scale, P.ActivationGradSpec(kind=kind, **both)))

            width = operand[0][1] // cols
            yield f"{kind}, {name}", activation, scale, (operand,), (2 * reads * width + 2) * n
            yield f"d{kind}, {name}", grad, scale, (x, operand), (2 * reads * (1 + width) + 2 * width) * n


def measure_passes(rows, cols, only):
    def dequantize(scale, data):
        return P.dequantize(data, scale, P.DequantizeSpec()), scale

    cases = [*passes(rows, cols), ("dequantize", dequantize, 1.0, (((rows, cols), F8),), 3 * rows * cols)]
    for name, call, scale, types, moved in cases:
        if only not in name:
            continue
        sets = [tuple(random(*t, seed=i) for i, t in enumerate(types)) for _ in range(SETS)]
        t = seconds(call, scale, sets)
        yield {"kernel": name, "shape": (rows, cols), "dtype": "bfloat16", "us": t * 1e6, "TB/s": moved / t / 1e12,
               "of copy": moved / t / copy_bandwidth(moved)}  # fmt: skip


def measure_gemms(m, n, k):
    for name, dtype, spec in (
        ("gemm bf16", jnp.bfloat16, P.GemmSpec(fp8=False)),
        ("gemm fp8 fast", F8, P.GemmSpec(fast_accumulation=True)),
        ("gemm fp8 precise", F8, P.GemmSpec()),
    ):
        lhs, rhs = random((m, k), dtype), random((n, k), dtype, 1)

        scales = {"lhs_scale_inv": jnp.float32(1), "rhs_scale_inv": jnp.float32(1)} if spec.fp8 else {}
        t = seconds_of_calls(lambda lhs, rhs, spec=spec, scales=scales: P.gemm(lhs, rhs, spec, **scales)[0], lhs, rhs)
        yield {"kernel": name, "shape": (m, n, k), "us": t * 1e6, "TFLOP/s": 2 * m * n * k / t / 1e12}


def seconds_of_calls(function, *operands, count: int = 30) -> float:
    """Median seconds of a program, many in flight: for kernels that take longer than a dispatch."""
    run = jax.jit(function)

    def batch():
        start = time.perf_counter()
        for _ in range(count):
            out = run(*operands)
        out.block_until_ready()
        return (time.perf_counter() - start) / count

    batch()
    return statistics.median(batch() for _ in range(5))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines are added to this file")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--no-gemm", action="store_true")
    parser.add_argument("--no-passes", action="store_true")
    parser.add_argument("--only", default="", help="passes with this in their names")
    parser.add_argument("--shapes", nargs="*", default=["x".join(map(str, shape)) for shape in SHAPES])
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"expected a GPU, got {jax.devices()[0].device_kind}: jax sees no other device")
    device = jax.devices("cuda")[0]
    where = {"device": device.device_kind, "jax": jax.__version__, "commit": args.commit}
    where |= {"build": str(library.status("cuda").build_info)}
    cases = []
    if not args.no_passes:
        shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes]
        cases += [lambda shape=shape: measure_passes(*shape, args.only) for shape in shapes]
    if not args.no_gemm:
        shapes = ((8192, 4096, 4096), (8192, 8192, 8192), (8192, 14336, 4096), (2048, 4096, 4096))
        cases += [lambda shape=shape: measure_gemms(*shape) for shape in shapes]
    for case in cases:
        for line in case():
            numbers = "  ".join(f"{v:9.3f} {k}" for k, v in line.items() if isinstance(v, float))
            print(f"{line['kernel']:36} {line['shape']!s:22} {numbers}", flush=True)
            report.append(args.out, [line | where])


if __name__ == "__main__":
    main()
