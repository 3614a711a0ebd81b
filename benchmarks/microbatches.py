"""Gradient accumulation: kernels quantized once or in every microbatch; gradients added by wgrad GEMMs or behind them.

    python benchmarks/microbatches.py --out benchmarks/results/microbatches.jsonl
    python benchmarks/microbatches.py --main-grad --out benchmarks/results/main_grad.jsonl

Wall time, many calls in flight, contestants in turns, medians. The first: a jitted ``te.accumulate_gradients`` over
8192 tokens. ``--main-grad``: training steps (SGD, variables donated) of a stack of layers, with ``main_grad=True``,
with ``lax.scan`` and an addition, and of the same layers in plain Flax in bfloat16; and the device memory that each
one's first steps need at most, its variables included (the peak, less what was in use before): one size a process.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import flax.linen as nn
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


class FlaxMLP(nn.Module):
    """x + MLP(norm(x)), as ``te.flax.LayerNormMLP`` with a residual, in bfloat16."""

    width: int
    hidden: int

    @nn.compact
    def __call__(self, x, _):
        dense = functools.partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16)
        gate, up = jnp.split(dense(2 * self.hidden)(nn.RMSNorm(dtype=jnp.bfloat16)(x)), 2, axis=-1)
        return x + dense(self.width)(nn.silu(gate) * up), None


class FlaxStack(nn.Module):
    width: int
    hidden: int
    layers: int

    @nn.compact
    def __call__(self, x):
        stack = nn.scan(FlaxMLP, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
        return stack(self.width, self.hidden)(x, None)[0]


def stack_of(args, recipe) -> nn.Module:
    width, hidden = WIDTH // args.scale, HIDDEN // args.scale
    layer = te.Sequential(
        [
            te.ops.StartResidual(),
            te.ops.RMSNorm(),
            te.ops.Linear(2 * hidden, use_bias=False),
            te.ops.SwiGLU(),
            te.ops.Linear(width, use_bias=False),
            te.ops.AddResidual(),
        ],
        recipe=recipe,
        dtype=jnp.bfloat16,
    )
    return te.flax.LayerStack(layer, args.layers)


class Training:
    """Steps of SGD, one after the other."""

    def __init__(self, module, variables, batch, gradients):
        def loss(variables, batch):
            y = module.apply(variables, batch["x"])
            return jnp.mean(jnp.sum(y.astype(jnp.float32) * batch["dy"], -1))

        def step(variables, batch):
            value, grads = gradients(loss, variables, batch)
            params, state = te.state.split(variables)
            grads, new_state = te.state.split(grads)
            params = jax.tree.map(lambda p, g: p - 1e-6 * g, params, grads)
            return te.state.merge(params, te.state.apply(state, new_state) if state else {}), value

        self.batch = batch
        self.variables = jax.tree.map(jnp.copy, variables)
        self.step = jax.jit(step, donate_argnums=0).lower(self.variables, batch).compile()

    def __call__(self):
        self.variables, loss = self.step(self.variables, self.batch)
        return loss


def by_scan(loss, variables, batch, microbatches):
    """What one writes by hand: lax.scan, gradients added to a tree of float32."""
    rows = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)

    def body(sums, part):
        value, grads = jax.value_and_grad(loss)(variables, part)
        return jax.tree.map(jnp.add, sums, grads), value

    sums, losses = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, variables), rows)
    return losses.mean(), jax.tree.map(lambda g: g / microbatches, sums)


def measure_main_grad(tokens: int, microbatches: int, args) -> list[dict]:
    """Rows of one size: ``tokens`` in a microbatch."""
    width, hidden = WIDTH // args.scale, HIDDEN // args.scale
    shape = (tokens * microbatches, width)
    keys = jax.random.split(jax.random.key(0), 3)
    batch = {"x": jax.random.normal(keys[0], shape, jnp.bfloat16), "dy": jax.random.normal(keys[1], shape)}
    recipe = te.DelayedScaling(amax_history_len=16)
    ours, flax = stack_of(args, recipe), FlaxStack(width, hidden, args.layers)
    variables = jax.jit(ours.init)(keys[2], batch["x"][:16])
    plain = jax.jit(flax.init)(keys[2], batch["x"][:16])
    accumulate = functools.partial(te.accumulate_gradients, num_microbatches=microbatches)
    contestants = {
        "main_grad": (ours, variables, functools.partial(accumulate, main_grad=True)),
        "scan + add": (ours, variables, accumulate),
        "flax bfloat16, scan + add": (flax, plain, functools.partial(by_scan, microbatches=microbatches)),
    }
    steps, memory, losses = {}, {}, {}
    device = jax.devices()[0]
    for name, (module, start, gradients) in contestants.items():
        before = (device.memory_stats() or {}).get("bytes_in_use", 0)
        steps[name] = Training(module, start, batch, gradients)
        losses[name] = float(steps[name]())
        jax.block_until_ready(steps[name]())
        needed = (device.memory_stats() or {}).get("peak_bytes_in_use", 0) - before
        temp = steps[name].step.memory_analysis().temp_size_in_bytes
        memory[name] = {"peak GB": round(needed / 1e9, 3), "compiler's temporary GB": round(temp / 1e9, 3)}
        print(name, tokens, losses[name], memory[name], flush=True)
    a, b = (te.state.split(steps[name].variables)[0] for name in ("main_grad", "scan + add"))
    change = jax.tree.map(lambda x, y: jnp.max(jnp.abs(x - y)), te.state.split(variables)[0], b)
    error = jax.tree.map(lambda x, y, c: float(jnp.max(jnp.abs(x - y)) / c), a, b, change)
    if max(jax.tree.leaves(error)) > 0.02:
        raise RuntimeError(f"main_grad and scan + add train differently: {error}")
    times = bench.interleaved(
        {name: bench.burst_of(step) for name, step in steps.items()}, rounds=args.rounds, burst_s=args.burst_ms / 1e3
    )
    case = f"{args.layers} layers rmsnorm+swiglu mlp {width}/{hidden} in a scan, SGD"
    common = {"case": case, "tokens": tokens, "recipe": recipe.name, "microbatches": microbatches}
    return [
        common
        | {"gradients": name, "recipe": "none" if "flax" in name else recipe.name, "ms": bench.median_ms(times[name])}
        | {"spread": bench.spread(times[name])}
        | memory[name]
        for name in steps
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines are added to this file")
    parser.add_argument("--microbatches", type=int, nargs="+", default=(4, 16))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst-ms", type=float, default=25)
    parser.add_argument("--scale", type=int, default=1, help="divide all sizes, to try the script on a CPU")
    parser.add_argument("--main-grad", action="store_true", help="time how gradients are added")
    parser.add_argument("--tokens", type=int, nargs="+", default=(1024, 4096), help="in a microbatch; --main-grad")
    parser.add_argument("--layers", type=int, default=4, help="--main-grad")
    args = parser.parse_args()
    where = single_gpu.environment()
    if args.main_grad:
        for tokens in args.tokens:
            for row in measure_main_grad(tokens // args.scale, args.microbatches[0], args):
                print(row, flush=True)
                report.append(args.out, [row | where])
        return
    for recipe in RECIPES:
        for name, module in modules(recipe, args.scale).items():
            for count in args.microbatches:
                for row in measure(name, module, recipe.name, count, args):
                    print(row, flush=True)
                    report.append(args.out, [row | where])


if __name__ == "__main__":
    main()
