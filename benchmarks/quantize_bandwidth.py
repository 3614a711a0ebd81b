"""Times the custom calls on a GPU: TB/s of the quantizing passes, TFLOP/s of the GEMMs.

A pass is timed in a loop on the device (one program, so no dispatch from Python in between), whose carried scalar makes
the calls depend on each other; a GEMM as a program of its own, many in flight. Medians over several runs. Bytes are
those that have to move: each operand read once (twice where the scale comes from the tensor's own amax), each result
written once. GEMM operands are random: zeros run faster.

    python benchmarks/quantize_bandwidth.py --commit $(git rev-parse HEAD) --out benchmarks/results/h200.jsonl
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp

from te_jax import primitives as P
from te_jax.primitives import library

F8 = jnp.float8_e4m3fn


def seconds(step, *operands, repeats: int = 7) -> float:
    """Median seconds of one ``step(carry f32[], *operands) -> f32[]``. Operands are arguments, not constants."""

    def loop(count, *operands):
        return jax.lax.fori_loop(0, count, lambda _, carry: step(carry, *operands), jnp.float32(0))

    run = jax.jit(loop, static_argnums=0)

    def once(count):
        start = time.perf_counter()
        run(count, *operands).block_until_ready()
        return time.perf_counter() - start

    once(10), once(10)
    count = max(10, min(1000, int(0.03 / max(once(10) / 10, 1e-6))))
    once(count)
    # The difference of two lengths leaves out the launch of the program.
    return statistics.median((once(2 * count) - once(count)) / count for _ in range(repeats))


def random(shape, dtype, seed=0):
    return jax.jit(lambda: jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype))()


def size(*arrays) -> int:
    return sum(x.size * x.dtype.itemsize for x in arrays)


def copy_ceiling():
    x = random((8192, 16384), jnp.bfloat16)
    run = jax.jit(lambda count, x: jax.lax.fori_loop(0, count, lambda _, x: -x, x), static_argnums=0)
    times = []
    for count in (20, 40) * 5:
        run(count, x).block_until_ready()
        start = time.perf_counter()
        run(count, x).block_until_ready()
        times.append(time.perf_counter() - start)
    per_step = statistics.median((b - a) / 20 for a, b in zip(times[::2], times[1::2], strict=True))
    return {
        "kernel": "copy (XLA negate)",
        "shape": x.shape,
        "ms": per_step * 1e3,
        "TB/s": 2 * size(x) / per_step / 1e12,
    }


def passes(rows, cols):
    """(name, step, operands, bytes) of every quantizing pass on [rows, cols]."""
    x = random((rows, cols), jnp.bfloat16)
    wide = random((rows, 2 * cols), jnp.bfloat16, 1)
    gamma = random((cols,), jnp.float32, 2)
    n = rows * cols
    both = {"format": "e4m3", "data_t": True, "amax": True}
    for name, scale, reads in (("delayed", 1.0, 1), ("current", 0.0, 2)):

        def of(out, carry, scale=scale):
            return carry + 0 * out.scale if scale == 0 else out.scale - scale

        def quantize(carry, x, scale=scale, of=of, **spec):
            return of(P.quantize(x, scale + carry, P.QuantizeSpec(**both | spec)), carry)

        yield f"quantize row copy, {name}", lambda c, x, q=quantize: q(c, x, data_t=False), (x,), (2 * reads + 1) * n
        yield f"quantize both copies, {name}", quantize, (x,), (2 * reads + 2) * n
        yield (f"quantize both copies + dbias, {name}", lambda c, x, q=quantize: q(c, x, dbias=True), (x,),
               (2 * reads + 2) * n)  # fmt: skip

        def norm(carry, x, gamma, scale=scale, of=of):
            return of(P.norm(x, gamma, None, scale + carry, P.NormSpec(stats=True, **both)), carry)

        yield f"rmsnorm, {name}", norm, (x, gamma), 4 * n
        for kind, operand in (("gelu", x), ("swiglu", wide)):

            def activation(carry, x, scale=scale, of=of, kind=kind):
                return of(P.activation(x, scale + carry, P.ActivationSpec(kind=kind, **both)), carry)

            def grad(carry, dy, x, scale=scale, of=of, kind=kind):
                return of(P.activation_grad(dy, x, scale + carry, P.ActivationGradSpec(kind=kind, **both)), carry)

            yield f"{kind}, {name}", activation, (operand,), reads * size(operand) + 2 * n
            yield (f"d{kind}, {name}", grad, (x, operand), reads * size(x, operand) + 2 * operand.size)


def measure_passes(rows, cols):
    for name, step, operands, moved in passes(rows, cols):
        t = seconds(step, *operands)
        yield {"kernel": name, "shape": (rows, cols), "dtype": "bfloat16", "us": t * 1e6, "TB/s": moved / t / 1e12}
    data = random((rows, cols), F8)

    def dequantize(carry, data):
        return P.dequantize(data, 1 + carry, P.DequantizeSpec())[0, 0].astype(jnp.float32) * 0

    t = seconds(dequantize, data)
    yield {"kernel": "dequantize", "shape": (rows, cols), "dtype": "bfloat16", "us": t * 1e6,
           "TB/s": 3 * data.size / t / 1e12}  # fmt: skip


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
    args = parser.parse_args()
    device = jax.devices("cuda")[0]
    where = {"device": device.device_kind, "jax": jax.__version__, "commit": args.commit}
    where |= {"build": str(library.status("cuda").build_info)}
    cases = [copy_ceiling]
    cases += [lambda shape=shape: measure_passes(*shape) for shape in ((8192, 8192), (8192, 4096), (2048, 4096))]
    if not args.no_gemm:
        shapes = ((8192, 4096, 4096), (8192, 8192, 8192), (8192, 14336, 4096), (2048, 4096, 4096))
        cases += [lambda shape=shape: measure_gemms(*shape) for shape in shapes]
    for case in cases:
        found = case()
        for line in [found] if isinstance(found, dict) else found:
            numbers = "  ".join(f"{v:9.3f} {k}" for k, v in line.items() if isinstance(v, float))
            print(f"{line['kernel']:36} {line['shape']!s:22} {numbers}", flush=True)
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                with args.out.open("a") as file:
                    file.write(json.dumps(line | where) + "\n")


if __name__ == "__main__":
    main()
