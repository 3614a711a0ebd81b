"""Gradient accumulation with kernels quantized once per optimizer step, or in every microbatch.

    python benchmarks/microbatches.py --out benchmarks/results/microbatches.jsonl

Wall time of a jitted ``te.accumulate_gradients`` over 8192 tokens, many calls in flight; the two in turns, medians.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import jax
import jax.numpy as jnp
import report
import single_gpu

import te_jax as te
from te_jax.testing import bench

TOKENS, WIDTH, HIDDEN = 8192, 4096, 14336
RECIPES = (te.DelayedScaling(), te.CurrentScaling())


def modules(recipe: te.Recipe, scale: int) -> dict:
    width, hidden = WIDTH // scale, HIDDEN // scale
    common = {"recipe": recipe, "dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    return {
        f"linear {width}->{width} bias": te.flax.Dense(width, **common),
        f"rmsnorm+swiglu mlp {width}/{hidden}": te.flax.LayerNormMLP(width, hidden, **common),
    }


def compiled_step(module, variables, batch, microbatches: int, *, once: bool):
    """() -> (loss, gradients) of a step over all microbatches."""

    def loss(variables, batch):
        y = module.apply(variables, batch["x"])
        return jnp.sum(y.astype(jnp.float32) * batch["dy"].astype(jnp.float32))

    def step(variables, batch):
        if once:
            variables = te.quantize_kernels(module, variables, batch["x"][: batch["x"].shape[0] // microbatches])
        return te.accumulate_gradients(loss, variables, batch, num_microbatches=microbatches)

    return functools.partial(jax.jit(step).lower(variables, batch).compile(), variables, batch)


def measure(name: str, module, recipe: str, microbatches: int, args) -> list[dict]:
    tokens, width = TOKENS // args.scale, WIDTH // args.scale
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (tokens, width), jnp.bfloat16)
    batch = {"x": x, "dy": jax.random.normal(keys[1], (tokens, width), jnp.bfloat16)}
    variables = module.init(keys[2], x[:16])
    steps = {
        what: compiled_step(module, variables, batch, microbatches, once=once)
        for what, once in (("every microbatch", False), ("once", True))
    }
    same = jax.tree.map(lambda a, b: bool((a == b).all()), *(step() for step in steps.values()))
    if not jax.tree.all(same):
        raise RuntimeError(f"{name}: kernels quantized once give other results")
    times = bench.interleaved(
        {what: bench.burst_of(step) for what, step in steps.items()}, rounds=args.rounds, burst_s=args.burst_ms / 1e3
    )
    common = {"case": name, "tokens": tokens, "recipe": recipe, "microbatches": microbatches}
    return [common | {"kernels quantized": what, "ms": bench.median_ms(times[what])} for what in steps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines are added to this file")
    parser.add_argument("--microbatches", type=int, nargs="+", default=(4, 16))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst-ms", type=float, default=25)
    parser.add_argument("--scale", type=int, default=1, help="divide all sizes, to try the script on a CPU")
    args = parser.parse_args()
    where = single_gpu.environment()
    for recipe in RECIPES:
        for name, module in modules(recipe, args.scale).items():
            for count in args.microbatches:
                for row in measure(name, module, recipe.name, count, args):
                    print(row, flush=True)
                    report.append(args.out, [row | where])


if __name__ == "__main__":
    main()
