"""Where each millisecond goes: kernels by class, idle gaps and launches of a layer, a train step or a benchmark case.

    python benchmarks/profile_step.py layer                      # TransformerLayer 4096/14336, 2 x 4096 tokens
    python benchmarks/profile_step.py train --layers 4           # the step of examples/train_lm.py at that size
    python benchmarks/profile_step.py case --rows 0 7            # rows of benchmarks/single_gpu.py

Times without the profiler first (implementations in turns), then a trace of each.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import peers

if __name__ == "__main__":
    peers.te_environment()

import jax
import kernel_trace
import layers
import report
import single_gpu

from te_jax.testing import bench


def of_layer(args) -> list[dict]:
    steps = layers.layer_steps(args.size, args.impls)
    times = bench.interleaved(layers.layer_bursts(steps), rounds=args.rounds, burst_s=0.1)
    rows = []
    for name, (_, both, _, operands) in steps.items():
        ms = bench.median_ms(times["fwd_bwd", name])
        row = {"case": "transformer layer", "impl": name, "tokens": args.size.batch * args.size.seq}
        row |= {"fwd_ms": bench.median_ms(times["fwd", name]), "fwd_bwd_ms": ms}
        row |= {"tflops": args.size.flops / ms / 1e9}
        call = functools.partial(both, *operands)
        rows.append(row | _profile(f"layer, {name}, forward + backward", call, args))
    return rows


def of_train_step(args) -> list[dict]:
    """One implementation after the other: states of several would not fit in memory together."""
    return [_train_row(name, args) for name in args.impls or ["te_jax delayed", "te_jax current", "flax bf16"]]


def _train_row(name: str, args) -> dict:
    step, state, tokens = layers.train_step(args.size, args.layers, name)

    losses = []

    def call():
        nonlocal state
        state, loss = step(state, tokens)
        losses.append(loss)
        return loss

    for _ in range(3):
        loss = call()
    jax.block_until_ready(loss)
    seconds = []
    for _ in range(args.rounds):
        start = time.perf_counter()
        for _ in range(5):
            loss = call()
        jax.block_until_ready((state, loss))
        seconds.append((time.perf_counter() - start) / 5)
    ms = statistics.median(seconds) * 1e3
    count = args.size.batch * args.size.seq
    row = {"case": f"train step, {args.layers} layers", "impl": name, "tokens": count, "step_ms": round(ms, 4)}
    row |= {"tokens_per_s": round(count / ms * 1e3), "losses": [round(float(loss), 4) for loss in losses]}
    return row | _profile(f"train step, {name}", call, args)


def of_cases(args) -> list[dict]:
    known = peers.implementations()
    rows = []
    for index in args.rows:
        case = bench.SINGLE_GPU[index] if args.scale == 1 else bench.SINGLE_GPU[index].scaled(args.scale)
        arrays = case.arrays()
        for name in args.impls or ["te_jax delayed", "te_jax current", "te delayed", "flax"]:
            if name not in known:
                continue
            program = peers.build(known[name], case, arrays)
            operands = (program.params, program.state, program.x, program.dy)
            row = {"case": case.name, "tokens": case.tokens, "impl": name}
            title = f"{case.name}, {case.tokens} tokens, {name}"
            rows.append(row | _profile(title, lambda p=program, o=operands: p.both(*o), args))
    return rows


def _profile(title: str, call, args) -> dict:
    """Prints the table; its figures for the results."""
    for _ in range(2):
        jax.block_until_ready(call())
    kernels = kernel_trace.record(call, args.calls)
    if not kernels:
        print(f"{title}: no device events (needs a GPU)\n")
        return {}
    found = kernel_trace.profile(kernels, args.calls)
    print(kernel_trace.table(title, found, kernels=args.kernels), flush=True)
    rounded = {name: [round(ms, 5), round(n, 1)] for name, (ms, n) in found.by_class.items()}
    return {
        "busy_ms": round(found.busy_ms, 5), "span_ms": round(found.span_ms, 5), "launches": found.launches,
        "by_class": rounded,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("layer", "train", "case"))
    parser.add_argument("--impls", nargs="+", help="names as in peers.py and layers.py")
    parser.add_argument("--layers", type=int, default=4, help="of the train step's model")
    parser.add_argument("--rows", type=int, nargs="+", default=(0, 7), help="cases")
    parser.add_argument("--calls", type=int, default=5, help="calls in a trace")
    parser.add_argument("--kernels", type=int, default=12, help="kernels listed by name")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scale", type=int, default=1, help="divide all sizes, to try the script on a CPU")
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines are added to this file")
    args = parser.parse_args()
    args.size = layers.Size() if args.scale == 1 else layers.Size().scaled(args.scale)
    rows = {"layer": of_layer, "train": of_train_step, "case": of_cases}[args.what](args)
    where = single_gpu.environment() | {"scale": args.scale}
    for row in rows:
        print(json.dumps({k: v for k, v in row.items() if k != "by_class"}))
    report.append(args.out, (row | where for row in rows))


if __name__ == "__main__":
    main()
