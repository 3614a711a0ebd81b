"""Activations in host memory: time, device memory and host memory of remat policies, on one GPU.

    python benchmarks/offload.py toy layers --out benchmarks/results/offload.jsonl
    python benchmarks/offload.py longest

``toy``: 8 layers x + tanh(x w0) w1 in bfloat16, 8192 x 8192, 8192 tokens, one tensor of 134 MB a layer, the carry.
``layers``: 16 of ``te.flax.TransformerLayer`` in FP8, 4096/14336, 32 heads, 8 of keys and values, 4 x 4096 tokens.
``longest``: the longest sequence for which a step of them fits into ``--limit`` bytes.

Loss and gradients of all parameters; the median of single steps. Every variant runs in a process of its own, for its
peak of device memory (``memory_stats``), without preallocation. A sample of the gradients is compared with that of the
first variant of its case.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np

import te_jax as te

MODULES = ("core_attn", "qkv_linear", "fc1")  # their inputs: 335 MB a layer of the transformer
SKIPS = ("core_attn", "context")  # what lets the backward pass skip the projection before attention and attention
RECIPES = {"delayed": te.DelayedScaling(), "none": None}
CONCURRENT = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
NO_BUFFERS = {"xla_gpu_enable_command_buffer": ""}


@dataclasses.dataclass(frozen=True)
class Variant:
    """Which tensors go where; ``options`` of the compiler (None: those of te.remat)."""

    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    options: dict[str, Any] | None = None
    remat: bool = True

    @property
    def policy(self) -> Any:
        return te.remat.policy(self.save, self.offload, extra_names=("x",)) if self.remat else None


TOY = {
    "save": Variant(save=("x",), options=CONCURRENT),
    "save, no command buffers": Variant(save=("x",), options=NO_BUFFERS),
    "offload": Variant(offload=("x",)),
    "offload, XLA's defaults": Variant(offload=("x",), options={}),
}
LAYERS = {
    "save inputs": Variant(save=MODULES, options=CONCURRENT),
    "save inputs, no command buffers": Variant(save=MODULES, options=NO_BUFFERS),
    "offload inputs": Variant(offload=MODULES),
    "offload inputs, XLA's defaults": Variant(offload=MODULES, options={}),
    "offload inputs, forward pipelined": Variant(offload=MODULES, options=te.remat.compiler_options(carry=True)),
    "remat": Variant(options=CONCURRENT),
    "remat, no command buffers": Variant(options=NO_BUFFERS),
    "offload x, core_attn, context": Variant(offload=("attn_norm", *SKIPS)),
    "offload core_attn, context": Variant(offload=SKIPS),
    "offload x, context": Variant(offload=("attn_norm", "context")),
    "offload x, context, mlp_norm": Variant(offload=("attn_norm", "context", "mlp_norm")),
    "offload x, context; save mlp_norm": Variant(save=("mlp_norm",), offload=("attn_norm", "context")),
    "save core_attn, context": Variant(save=SKIPS, options=CONCURRENT),
    "no remat": Variant(remat=False, options=CONCURRENT),
}
LONGEST = {
    "remat": LAYERS["remat"],
    "save core_attn, context": LAYERS["save core_attn, context"],
    "offload x, context": LAYERS["offload x, context"],
}
CASES = {"toy": TOY, "layers": LAYERS, "longest": LONGEST}


def jitted(step: Any, variant: Variant, *, carry: bool = False) -> Any:
    if variant.options is None:
        return te.remat.jit(step, carry=carry)
    return jax.jit(step, compiler_options=variant.options)


def toy(variant: Variant, args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """(jitted step, parameters, x)."""
    layers, width = (8, 8192) if args.scale == 1 else (3, 8192 // args.scale)

    def layer(x, w):
        x = te.remat.name(x, "x")
        return x + jnp.tanh(x @ w[0]) @ w[1], None

    def loss(w, x):
        return jnp.mean(te.remat.scan(layer, x, w, policy=variant.policy)[0].astype(jnp.float32) ** 2)

    weights = normal(jax.random.key(0), (layers, 2, width, width), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (width, width), jnp.bfloat16)
    return jitted(jax.value_and_grad(loss), variant, carry=True), weights, x


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """[layers, ..., K, N] of standard deviation 1 / sqrt(K), made layer by layer: the step is to have the peak."""
    make = lambda key: (jax.random.normal(key, shape[1:], jnp.float32) * shape[-2] ** -0.5).astype(dtype)  # noqa: E731
    return jax.lax.map(make, jax.random.split(key, shape[0]))


def stack(variant: Variant, args: argparse.Namespace) -> tuple[te.flax.LayerStack, int]:
    """The layers, and their width."""
    width, hidden = 4096 // args.scale, 14336 // args.scale
    layer = te.flax.TransformerLayer(
        32, hidden, num_kv_heads=8, head_dim=width // 32, recipe=RECIPES[args.recipe], dtype=jnp.bfloat16
    )
    return te.flax.LayerStack(layer, args.layers, variant.policy), width


def transformer(variant: Variant, args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """(jitted step, variables whose FP8 state has seen a step, x)."""
    model, width = stack(variant, args)
    x = jax.random.normal(jax.random.key(1), (args.batch, args.seq, width), jnp.bfloat16)
    init = functools.partial(model.init, jax.random.key(0), x[:1, :32])
    params = jax.eval_shape(init)["params"]
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(params))))
    make = lambda leaf: normal(next(keys), leaf.shape, leaf.dtype) if leaf.ndim > 2 else jnp.ones_like(leaf)  # noqa: E731
    state = jax.jit(lambda: te.state.split(init())[1])()
    variables = te.state.merge({"params": jax.tree.map(make, params)}, state)
    return jitted(step_of(model), variant), variables, x


def step_of(model: Any) -> Any:
    def loss(variables, x):
        return jnp.mean(model.apply(variables, x).astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss)


def next_state(variables: Any, grads: Any) -> Any:
    rest, fp8 = te.state.split(variables)
    return te.state.merge(rest, te.state.apply(fp8, te.state.split(grads)[1]))


def measure(case: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs one variant in this process."""
    variant = CASES[case][name]
    start = time.perf_counter()
    step, weights, x = (toy if case == "toy" else transformer)(variant, args)
    compiled = step.lower(weights, x).compile()
    memory = compiled.memory_analysis()
    compiled_s = time.perf_counter() - start
    if case == "layers":
        _, grads = compiled(weights, x)
        weights = next_state(weights, grads)
        del grads
    times, out = [], None
    for _ in range(args.steps + args.warmup):
        del out
        start = time.perf_counter()
        out = jax.block_until_ready(compiled(weights, x))
        times.append((time.perf_counter() - start) * 1e3)
    times = times[args.warmup :]
    stats = jax.devices()[0].memory_stats() or {}  # before gradients are looked at, which takes memory too
    loss, grads = out
    sample = [np.asarray(leaf.reshape(-1)[:: max(1, leaf.size // 8192)], np.float32) for leaf in jax.tree.leaves(grads)]
    np.savez(args.grads, *sample)
    return {
        "case": case,
        "variant": name,
        "recipe": "none" if case == "toy" else args.recipe,
        "layers": 8 if case == "toy" else args.layers,
        "ms": round(statistics.median(times), 2),
        "ms_least": round(min(times), 2),
        "loss": float(loss),
        "peak_GB": round(stats.get("peak_bytes_in_use", 0) / 1e9, 3),
        "arguments_and_results_GB": round((memory.argument_size_in_bytes + memory.output_size_in_bytes) / 1e9, 3),
        "temp_GB": round(memory.temp_size_in_bytes / 1e9, 3),
        "host_GB": round(memory.host_temp_size_in_bytes / 1e9, 3),
        "start_s": round(compiled_s, 1),
    }


def longest(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The longest sequence of ``args.quantum`` times n tokens whose step fits into ``args.limit``, and one step of it.

    The time is that of the first step, which also chooses the algorithms of GEMMs and pins host memory.
    """
    variant = LONGEST[name]
    model, width = stack(variant, args)
    variables = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 32, width), jnp.bfloat16))
    step = jitted(step_of(model), variant)

    @functools.cache
    def bytes_of(n: int) -> int:
        x = jax.ShapeDtypeStruct((1, n * args.quantum, width), jnp.bfloat16)
        memory = step.lower(variables, x).compile().memory_analysis()
        return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes

    # Memory is linear in tokens, nearly: a line through two sizes says where to look.
    n = 4
    slope = (bytes_of(2 * n) - bytes_of(n)) / n
    n = int(2 * n + (args.limit - bytes_of(2 * n)) / slope)
    while bytes_of(n) > args.limit:
        n -= 1
    while bytes_of(n + 1) <= args.limit:
        n += 1
    args.batch, args.seq, args.steps, args.warmup = 1, n * args.quantum, 1, 0
    print(
        json.dumps({"case": "longest", "variant": name, "tokens": args.seq, "compiled_bytes": bytes_of(n)}), flush=True
    )
    return measure("longest", name, args) | {"tokens": args.seq}


def child(case: str, name: str, args: argparse.Namespace, grads: str) -> dict[str, Any]:
    """One variant in a process of its own."""
    own = [case, "--variant", name, "--grads", grads]
    for flag in ("scale", "layers", "recipe", "batch", "seq", "steps", "warmup", "limit", "quantum"):
        own += [f"--{flag}", str(getattr(args, flag))]
    algorithms = str(pathlib.Path(grads).with_name("algorithms.json"))  # the same for all: the first one times them
    environment = {
        **os.environ,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TE_JAX_GEMM_ALGORITHMS_FILE": algorithms,
    }
    command = [sys.executable, __file__, *own]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=args.timeout)
    except subprocess.TimeoutExpired as error:
        return {"case": case, "variant": name, "error": f"{error.timeout} s are over", "printed": str(error.stdout)}
    if done.returncode:
        return {"case": case, "variant": name, "error": done.stderr.strip()[-400:], "printed": done.stdout}
    return json.loads(done.stdout.splitlines()[-1])


def difference(path: str, reference: str) -> float:
    """The largest relative error (Frobenius norm) of a sampled gradient."""
    with np.load(path) as got, np.load(reference) as want:
        pairs = [(got[k].astype(np.float64), want[k].astype(np.float64)) for k in want.files]
    return max(float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--only", nargs="+", help="these variants")
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines are added to this file")
    parser.add_argument("--scale", type=int, default=1, help="divide widths, to try the script on a CPU")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--recipe", choices=RECIPES, default="delayed")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--limit", type=int, default=100_000_000_000, help="bytes for `longest`")
    parser.add_argument("--quantum", type=int, default=8192, help="`longest` tries multiples of this")
    parser.add_argument("--timeout", type=int, default=240, help="seconds for one variant")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    parser.add_argument("--grads", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        case = args.cases[0]
        print(json.dumps(longest(args.variant, args) if case == "longest" else measure(case, args.variant, args)))
        return

    import report
    import single_gpu

    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # this process only asks what the device is
    where = single_gpu.environment()
    with tempfile.TemporaryDirectory() as folder:
        for case in args.cases:
            first = None
            for i, name in enumerate(CASES[case]):
                if args.only and name not in args.only:
                    continue
                grads = f"{folder}/{case}{i}.npz"
                row = child(case, name, args, grads)
                if "error" not in row and case != "longest":
                    first = first or grads
                    row["gradients_differ_by"] = difference(grads, first)
                print(json.dumps(row), flush=True)
                if "error" not in row:
                    report.append(args.out, [row | where])


if __name__ == "__main__":
    main()
