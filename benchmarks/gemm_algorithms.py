"""GEMM algorithms: the heuristic's first against the fastest of those timed, and what choosing costs. Needs a GPU.

The three GEMMs of a linear layer run as one loop on the device, both ways in turns in one process. ``first_call_s`` is
the first run of a program, in which algorithms are chosen; the choices themselves follow, one row each.

    python benchmarks/gemm_algorithms.py --commit $(git rev-parse HEAD) --out benchmarks/results/gemm_algorithms.jsonl
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import report

from te_jax import primitives as P
from te_jax.primitives import gemm_algorithms, library

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
MODES = ("first", "timed")
LINEARS = ((4096, 4096), (8192, 8192), (4096, 14336), (4096, 28672), (14336, 4096))  # [K, N] of the kernel
SCALE_INV = jnp.float32(1e-3)


def random(shape, dtype, seed):
    return jax.jit(lambda: (jax.random.normal(jax.random.key(seed), shape, jnp.float32) * 60).astype(dtype))()


def operands(tokens, k, n):
    """What fprop, dgrad and wgrad read: x [tokens, K], the kernel [K, N] and dy [tokens, N], each also transposed."""
    shapes = ((tokens, k), (k, tokens), (k, n), (n, k), (tokens, n), (n, tokens))
    return [random(shape, E4M3 if i < 4 else E5M2, i) for i, shape in enumerate(shapes)]


def program(spec, count):
    """``count`` times the three GEMMs. A new function, so that it is compiled, and its algorithms chosen, anew."""

    def three(scale_inv, x, x_t, w, w_t, dy, dy_t):
        pairs = ((x, w_t), (dy, w), (x_t, dy_t))
        outs = [P.gemm(lhs, rhs, spec, lhs_scale_inv=scale_inv, rhs_scale_inv=scale_inv)[0] for lhs, rhs in pairs]
        return SCALE_INV + 1e-30 * sum(out[0, 0].astype(jnp.float32) for out in outs)

    return jax.jit(lambda s, *args: jax.lax.fori_loop(0, count, lambda _, s: three(s, *args), s))


def seconds(run, args):
    start = time.perf_counter()
    run(SCALE_INV, *args).block_until_ready()
    return time.perf_counter() - start


def compare(tokens, k, n, fast, rounds=9):
    """The row of one linear layer."""
    args = operands(tokens, k, n)
    flops = 6 * tokens * k * n
    count = max(4, min(200, int(0.012 * 1.2e15 / flops)))
    run, first_call = {}, {}
    for mode in MODES:
        gemm_algorithms.use(mode)
        run[mode] = program(P.GemmSpec(fast_accumulation=fast), count).lower(SCALE_INV, *args).compile()
        first_call[mode] = seconds(run[mode], args)
        for _ in range(2):
            seconds(run[mode], args)
    times = {mode: [] for mode in MODES}
    for i in range(rounds):
        for mode in MODES[:: 1 if i % 2 else -1]:
            gemm_algorithms.use(mode)
            times[mode].append(seconds(run[mode], args) / count)
    median = {mode: statistics.median(values) for mode, values in times.items()}
    row = {"linear": (tokens, k, n), "accumulation": "fast" if fast else "precise"}
    row |= {f"{mode}_ms": 1e3 * median[mode] for mode in MODES}
    row |= {"gain": median["first"] / median["timed"], "TFLOP/s": flops / median["timed"] / 1e12}
    return row | {f"first_call_{mode}_s": first_call[mode] for mode in MODES}


def choices():
    """One row for each GEMM whose algorithm was chosen by timing."""
    for choice in gemm_algorithms.report():
        names = ("gemm", "source", "time_us", "first_us", "candidates", "note")
        yield {name: getattr(choice, name) for name in names}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines are added to this file")
    parser.add_argument("--commit", default="unknown")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"expected a GPU, got {jax.devices()[0].device_kind}: jax sees no other device")
    library.ensure_registered("cuda")
    where = {"device": jax.devices("cuda")[0].device_kind, "jax": jax.__version__, "commit": args.commit}
    where |= {"cublaslt": library.cublaslt_status()["version"], "cuda": library.status("cuda").build_info.get("cuda")}

    def emit(row):
        print(row, flush=True)
        report.append(args.out, [row | where])

    for tokens in (2048, 8192):
        for k, n in LINEARS:
            for fast in (True, False):
                emit(compare(tokens, k, n, fast))
    for row in choices():
        emit(row)


if __name__ == "__main__":
    main()
