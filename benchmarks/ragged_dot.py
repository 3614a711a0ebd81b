"""Times ``jax.lax.ragged_dot`` and its gradients in bfloat16, for a comparison with grouped_gemm_bench.

    grouped_gemm_bench sizes 8x8192 skewed | python benchmarks/ragged_dot.py 4096x14336 14336x4096

reads the sizes of groups, one set a line, and prints one JSON line for each product, set and K x N.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp


def milliseconds(run, *operands) -> tuple[float, float, float]:
    """Median, least and most of 5 rounds of some calls in flight."""
    run(*operands).block_until_ready()
    start = time.perf_counter()
    run(*operands).block_until_ready()
    count = max(2, min(20, int(0.01 / (time.perf_counter() - start))))
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(count):
            result = run(*operands)
        result.block_until_ready()
        rounds.append((time.perf_counter() - start) / count * 1e3)
    return statistics.median(rounds), min(rounds), max(rounds)


def main() -> None:
    dot = jax.lax.ragged_dot
    for line in sys.stdin:
        sizes = jnp.array([int(size) for size in line.split()], jnp.int32)
        tokens, groups = int(sizes.sum()), len(sizes)
        for shape in sys.argv[1:]:
            k, n = (int(x) for x in shape.split("x"))
            keys = jax.random.split(jax.random.key(0), 3)
            x = jax.random.normal(keys[0], (tokens, k), jnp.bfloat16)
            w = jax.random.normal(keys[1], (groups, k, n), jnp.bfloat16)
            dy = jax.random.normal(keys[2], (tokens, n), jnp.bfloat16)
            products = {
                "fprop": (jax.jit(dot), (x, w, sizes)),
                "dgrad": (jax.jit(lambda dy, x, w, s: jax.vjp(lambda x: dot(x, w, s), x)[1](dy)[0]), (dy, x, w, sizes)),
                "wgrad": (jax.jit(lambda dy, x, w, s: jax.vjp(lambda w: dot(x, w, s), w)[1](dy)[0]), (dy, x, w, sizes)),
            }
            for name, (run, operands) in products.items():
                row = {"product": f"{name} bf16 bf16 bf16", "groups": groups, "tokens": tokens, "k": k, "n": n}
                row |= {"sizes": "skewed", "name": "ragged_dot"}
                try:
                    median, least, most = milliseconds(run, *operands)
                    row |= {"ms": round(median, 4), "min_ms": round(least, 4), "max_ms": round(most, 4)}
                    row["tflops"] = round(2 * tokens * n * k / median / 1e9)
                except jax.errors.JaxRuntimeError as error:
                    row["error"] = str(error).splitlines()[0]
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
