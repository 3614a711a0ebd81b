"""What a remat policy costs and frees: step time, device memory and host memory of a stack of transformer layers.

    python examples/offload.py                          # small; --layers 16 --width 4096 --seq 4096 for an H200
    python examples/offload.py --policy remat offload   # some of the policies

Each policy trains for a few steps in a process of its own, whose peak of device memory is then the policy's. On a CPU
nothing is moved, and device memory is what the compiler says.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import te_jax as te

POLICIES = {
    "keep everything": None,
    "remat": te.remat.policy(),
    "save": te.remat.policy(save=("core_attn", "context")),
    "offload": te.remat.policy(offload=("core_attn", "context"), min_bytes=0),
    "offload more": te.remat.policy(offload=("attn_norm", "context"), min_bytes=0),
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="of which the first isn't timed")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/offload"), help="table and plot")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def train(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A row of the table: a few steps of regression to a fixed target under one policy."""
    layer = te.flax.TransformerLayer(
        num_heads=args.width // 32, hidden_features=4 * args.width, recipe=te.DelayedScaling(), dtype=jnp.bfloat16
    )
    model = te.flax.LayerStack(layer, args.layers, POLICIES[name])
    tx = te.state.optimizer(optax.sgd(0.1))
    keys = jax.random.split(jax.random.key(0), 3)
    x, target = (jax.random.normal(key, (args.batch, args.seq, args.width), jnp.bfloat16) for key in keys[:2])
    variables = jax.jit(model.init)(keys[2], x)
    opt_state = tx.init(variables)

    def step(variables, opt_state, x, target):
        def loss_fn(variables):
            return jnp.mean((model.apply(variables, x) - target).astype(jnp.float32) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(variables)
        updates, opt_state = tx.update(grads, opt_state, variables)
        return optax.apply_updates(variables, updates), opt_state, loss

    # te.remat.jit, not jax.jit: with its compiler options the copies hide under the layers' compute.
    compiled = te.remat.jit(step, donate_argnums=(0, 1)).lower(variables, opt_state, x, target).compile()
    memory, times, losses = compiled.memory_analysis(), [], []
    for _ in range(args.steps):
        start = time.perf_counter()
        variables, opt_state, loss = jax.block_until_ready(compiled(variables, opt_state, x, target))
        times.append(time.perf_counter() - start)
        losses.append(float(loss))
    stats = jax.devices()[0].memory_stats() or {}
    compilers = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return {
        "policy": name,
        "step_ms": 1e3 * statistics.median(times[1:]),
        "device_mb": stats.get("peak_bytes_in_use", compilers) / 1e6,
        "host_mb": memory.host_temp_size_in_bytes / 1e6,
        "losses": losses,
    }


def in_a_process(name: str, args: argparse.Namespace) -> dict[str, Any]:
    own = [f"--{flag}={getattr(args, flag)}" for flag in ("layers", "width", "seq", "batch", "steps", "out")]
    done = subprocess.run(
        [sys.executable, __file__, "--child", "--policy", name, *own],
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def table(rows: list[dict[str, Any]]) -> str:
    """policy, step time, device memory, host memory."""
    lines = [f"{'policy':<16} {'step (ms)':>10} {'device (MB)':>12} {'host (MB)':>10} {'last loss':>10}"]
    for row in rows:
        numbers = (
            f"{row['step_ms']:>10.1f} {row['device_mb']:>12.1f} {row['host_mb']:>10.1f} {row['losses'][-1]:>10.5f}"
        )
        lines.append(f"{row['policy']:<16} {numbers}")
    return "\n".join(lines)


def plot(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """Memory over time: further to the left and lower is better."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for row in rows:
        (line,) = axes.plot(row["step_ms"], row["device_mb"], "o", label=row["policy"])
        if row["host_mb"]:
            height = row["device_mb"] + row["host_mb"]
            axes.plot([row["step_ms"]] * 2, [row["device_mb"], height], ":", color=line.get_color(), linewidth=1.5)
    axes.set(xlabel="step (ms)", ylabel="peak device memory (MB); dotted: host memory", title="te_jax: remat policies")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    args = parse_args()
    if args.child:
        print(json.dumps(train(args.policy[0], args)))
        return
    rows = [in_a_process(name, args) for name in args.policy]
    print(table(rows))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "policies.json").write_text(json.dumps(rows, indent=1))
    plot(args.out / "policies.png", rows)
    print(f"drawn in {args.out / 'policies.png'}")


if __name__ == "__main__":
    main()
