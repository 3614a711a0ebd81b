"""Chains of linear layers, forward and backward, with and without command buffers (CUDA graphs). Needs a GPU.

Each way runs in a process of its own: "on"; "te_jax off", where XLA's kernels are captured but not custom calls; "off".
``loop_ms`` is a training loop in which the FP8 state goes round, ``many_ms`` calls that don't depend on each other.

    python benchmarks/command_buffers.py --commit $(git rev-parse HEAD) --out benchmarks/results/gemm_algorithms.jsonl
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import report

import te_jax as te
from te_jax import ops
from te_jax.primitives import library

WAYS = {
    "on": {},
    "te_jax off": {"TE_JAX_COMMAND_BUFFERS": "0"},
    "off": {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="},
}
CHAINS = ((2048, 4096, 1), (512, 1024, 4))  # tokens, width, layers


def median_ms(call, count=40, rounds=7):
    """Median milliseconds of one of ``count`` calls that are queued without waiting."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(count):
            out = call()
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / count)
    return 1e3 * statistics.median(times)


def measure(tokens, width, layers):
    recipe = te.DelayedScaling(amax_history_len=16)
    linears = [ops.Linear(width) for _ in range(layers)]
    chain = te.Sequential(linears, recipe=recipe, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    x, dy = (jax.random.normal(jax.random.key(i), (tokens, width), jnp.bfloat16) for i in range(2))
    variables = jax.jit(chain.init)(jax.random.key(2), x)

    def step(variables, x, dy):
        y, vjp = jax.vjp(chain.apply, variables, x)
        grads, dx = vjp(dy)
        grads, fp8 = te.state.split(grads)
        return te.state.merge(te.state.split(variables)[0], fp8), y, dx, grads

    step_of = jax.jit(step)
    in_place = jax.jit(step, donate_argnums=0)
    current = [jax.tree.map(jnp.array, variables)]

    def loop():
        current[0], *rest = in_place(current[0], x, dy)
        return current[0], rest

    def independent():
        return step_of(variables, x, dy)

    for call in (loop, independent):
        for _ in range(4):
            jax.block_until_ready(call())
    return {"many_ms": median_ms(independent), "loop_ms": median_ms(loop)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines are added to this file")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # measures in this process
    args = parser.parse_args()
    if args.way is None:
        for way, environment in WAYS.items():
            command = [sys.executable, __file__, "--way", way, "--commit", args.commit]
            command += ["--out", str(args.out)] if args.out else []
            subprocess.run(command, env=os.environ | environment, check=True)
        return
    where = {"device": jax.devices("cuda")[0].device_kind, "jax": jax.__version__, "commit": args.commit}
    where |= {"cuda": library.status("cuda").build_info.get("cuda")}
    for chain in CHAINS:
        row = dict(zip(("command_buffers", "tokens", "width", "layers"), (args.way, *chain), strict=True))
        row |= measure(*chain)
        print(row, flush=True)
        report.append(args.out, [row | where])


if __name__ == "__main__":
    main()
