"""What sampling the health of FP8 costs a training run: ``te.health.Callback`` beside the step of examples/train_lm.py.

    python benchmarks/health.py --out benchmarks/results/health.jsonl

Wall time of windows of train steps, whose state is donated, with one sample at the begin of a window and without, in
turns. A sample's cost is the difference of the medians, its share that of so many steps as lie between two samples.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import jax
import jax.numpy as jnp
import layers
import numpy as np
import report
import single_gpu

import te_jax as te
from te_jax.testing import bench

EVERY = 100


class Run:
    """A training run that goes on from window to window."""

    def __init__(self, args: argparse.Namespace):
        import train_lm  # layers.py has put examples/ on the path

        self.step, self.state, self.tokens = layers.train_step(args.size, args.layers, f"te_jax {args.recipe}")
        model = layers.language_model(args.size, args.layers, layers.RECIPES[args.recipe])
        loss = lambda variables, tokens: train_lm.loss_of(model, variables, tokens)  # noqa: E731
        probe = te.health.instrument(model, self.state.variables(), self.tokens[:, :-1])
        self.reports: list[te.health.Report] = []
        self.callbacks = {
            what: te.health.Callback(loss, probe, rows=rows, monitor=te.health.Monitor(te.health.Limits(growth=None)))
            for what, rows in (("callback", None), ("callback, rows=1", 1))
        }

    def sample(self, what: str) -> None:
        if what in self.callbacks:
            self.reports.append(self.callbacks[what].sample(0, self.state.variables(), self.tokens))
        elif what == "report of the state":
            self.reports.append(te.state.report(self.state.variables()))

    def window(self, what: str, steps: int) -> float:
        """Seconds of a window."""
        start = time.perf_counter()
        self.sample(what)
        for _ in range(steps):
            self.state, _ = self.step(self.state, self.tokens)
        jax.block_until_ready(self.state)
        return time.perf_counter() - start

    def check(self) -> None:
        """A sample sees the parameters as they are, and finite numbers."""
        kernel = self.state.variables()["params"]["layers"]["mlp"]["fc1"]["kernel"]
        want = np.asarray(jnp.abs(kernel).max((1, 2)))
        self.sample("callback")
        found = self.reports[-1]
        got = [found[f"layers/mlp/fc1/kernel/{layer}"].amax for layer in range(len(want))]
        np.testing.assert_array_equal(np.float32(got), want)
        values = [value for tensor in found.values() for value in tensor]
        assert np.isfinite(values).all()
        print(f"{len(found)} tensors; most saturated {max(t.saturated for t in found.values()):.2e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=("delayed", "current"), default="delayed")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20, help="of a window")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scale", type=int, default=1, help="divide all sizes, to try the script on a CPU")
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines are added to this file")
    args = parser.parse_args()
    args.size = layers.Size() if args.scale == 1 else layers.Size().scaled(args.scale)
    run = Run(args)
    whats = ["none", *run.callbacks, *(["report of the state"] if args.recipe == "delayed" else [])]
    for what in whats:  # compiles
        run.window(what, 2)
    run.check()
    seconds: dict[str, list[float]] = {what: [] for what in whats}
    for number in range(args.rounds):
        for what in itertools.islice(itertools.cycle(whats), number % len(whats), number % len(whats) + len(whats)):
            seconds[what].append(run.window(what, args.steps))
    medians = {what: bench.median_ms(times) for what, times in seconds.items()}
    step_ms = medians["none"] / args.steps
    common = {"case": f"train step, {args.layers} layers", "recipe": args.recipe, "every": EVERY}
    common |= {"tokens": args.size.batch * args.size.seq, "step_ms": round(step_ms, 4), "window": args.steps}
    common |= {"rounds": args.rounds, "scale": args.scale} | single_gpu.environment()
    rows = []
    for what in whats[1:]:
        cost = medians[what] - medians["none"]
        rows.append({"what": what, "sample_ms": round(cost, 4), "share": round(cost / (EVERY * step_ms), 6)} | common)
        rows[-1] |= {"spread": bench.spread(seconds[what]), "spread_without": bench.spread(seconds["none"])}
        print(f"{what}: {cost:.2f} ms a sample, step {step_ms:.2f} ms: {100 * rows[-1]['share']:.3f}% every {EVERY}")
    report.append(args.out, rows)


if __name__ == "__main__":
    main()
