"""Trains train_lm.py's model with tensor and sequence parallelism, and compares it with one device.

    python examples/collective_matmul.py                          # all GPUs; or 8 CPU devices, if there is no GPU
    python examples/collective_matmul.py --tensor-parallel 4      # the other devices split the batch
    python examples/collective_matmul.py --overlap ring --recipe none

Every linear of a layer is split over the axis "tp", and between the layers so are the tokens of a sequence: each linear
has an all-gather before it or a reduce-scatter behind it, which the plans at the end say more about. The same model
trains on one device from the same parameters and batches; both losses are printed.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if "xla_force_host_platform_device_count" not in os.environ.get(
    "XLA_FLAGS", ""
):  # of CPU devices; GPUs are what they are
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import jax.numpy as jnp
import lm_data
import optax
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from lm_console import Console
from lm_model import LanguageModel, layer_config
from train_lm import RECIPES, HelpFormatter, TrainState, make_model, make_optimizer

import te_jax as te
from te_jax.testing import hlo

P = PartitionSpec
TOKENS = P("data", "tp")  # [B, T]
REPORT_EVERY = 10


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--tensor-parallel", type=int, help="devices that share every linear; default: all")
    parser.add_argument(
        "--overlap", choices=("auto", "overlapped", "ring", "plain"), default="auto", help="of the layers"
    )
    parser.add_argument("--recipe", choices=RECIPES, default="delayed", help="of the FP8 quantization")
    parser.add_argument("--steps", type=int, default=100, help="of training, and of the learning-rate schedule")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batches")
    parser.add_argument("--layers", type=int, default=2, help="transformer layers")
    parser.add_argument("--width", type=int, default=128, help="features of the residual stream")
    parser.add_argument("--heads", type=int, default=8, help="attention heads, a multiple of --tensor-parallel")
    parser.add_argument("--seq", type=int, default=128, help="bytes per sequence, a multiple of --tensor-parallel")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="its peak")
    parser.add_argument("--data", help="a folder of .py files to train on; default: the standard library")
    parser.add_argument("--alone", action="store_true", help="don't train on one device too")
    return parser


def loss_of(model: LanguageModel, variables, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean nats per byte; inputs, targets [B, T]."""
    logits = model.apply(variables, inputs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def split_loss(model: LanguageModel, mesh: jax.sharding.Mesh, specs):
    """The same, of arrays that are split over the mesh: each device has its sequences' part of the tokens."""

    def shard(variables, inputs, targets):
        return jax.lax.pmean(loss_of(model, variables, inputs, targets), ("data", "tp"))

    return jax.shard_map(shard, mesh=mesh, in_specs=(specs, TOKENS, TOKENS), out_specs=P())


def train_step(loss_fn, optimizer, state: TrainState, inputs: jax.Array, targets: jax.Array):
    """As train_lm.py has it: only the loss knows of devices."""
    loss, grads = jax.value_and_grad(loss_fn)(state.variables(), inputs, targets)
    rest, fp8 = te.state.split(grads)
    updates, opt_state = optimizer.update(rest["params"], state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(params, te.state.apply(state.fp8, fp8), opt_state), loss


def train(name: str, args: argparse.Namespace, corpus: lm_data.Corpus, loss_fn, optimizer, state: TrainState, place):
    """(losses, the compiled step's text); ``place`` puts a batch where it belongs."""

    def batch(step: int) -> tuple[jax.Array, jax.Array]:
        tokens = corpus.batch(args.seed, step, args.batch, args.seq)
        return place(tokens[:, :-1]), place(tokens[:, 1:])

    step_fn = jax.jit(lambda state, *tokens: train_step(loss_fn, optimizer, state, *tokens), donate_argnums=0)
    compiled = step_fn.lower(state, *batch(0)).compile()
    losses = []
    with Console(name, 0, args.steps, args.batch * args.seq) as console:
        for step in range(args.steps):
            state, loss = compiled(state, *batch(step))
            losses.append(float(loss))
            if (step + 1) % REPORT_EVERY == 0 or step + 1 == args.steps:
                console.update(step + 1, losses[-1])
    return losses, compiled.as_text()


def print_plans(model: LanguageModel, mesh: jax.sharding.Mesh, args: argparse.Namespace) -> None:
    """Of one layer, chain by chain, as it is planned inside of ``shard_map``."""
    layer = te.flax.TransformerLayer(**layer_config(model))

    def shard(x):
        for name, plan in layer.plan(x).items():
            print(f"\nplan of {name}:\n{plan}")
        return x

    x = jax.ShapeDtypeStruct((args.batch, args.seq, args.width), jnp.bfloat16)
    jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=TOKENS, out_specs=TOKENS)).trace(x)


def main(argv: list[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    args.schedule_steps, args.kv_heads, args.remat = args.steps, None, False
    devices = jax.devices()
    ranks = args.tensor_parallel or len(devices)
    for what, size in {"devices": len(devices), "--heads": args.heads, "--seq": args.seq}.items():
        if size % ranks:
            sys.exit(f"collective_matmul: {what}: expected a multiple of --tensor-parallel {ranks}, got {size}")
    if args.batch % (len(devices) // ranks):
        sys.exit(f"collective_matmul: --batch: expected a multiple of {len(devices) // ranks}, got {args.batch}")
    mesh = jax.make_mesh((len(devices) // ranks, ranks), ("data", "tp"), axis_types=(AxisType.Auto,) * 2)

    corpus = lm_data.load(args.data)
    model = make_model(args, RECIPES[args.recipe]).clone(tensor_axis="tp", overlap=args.overlap)
    optimizer = make_optimizer(args)
    tokens = jnp.zeros((args.batch, args.seq), jnp.int32)
    boxed = jax.jit(model.init)(jax.random.key(args.seed), tokens)  # without a mesh: the parameters of the whole
    specs, variables = nn.get_partition_spec(boxed), jax.device_get(nn.unbox(boxed))

    def start(variables) -> TrainState:
        return TrainState.of(variables, jax.jit(optimizer.init)(variables["params"]))

    place = lambda spec: lambda x: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    placed = jax.tree.map(lambda x, spec: place(spec)(x), variables, specs)
    split, text = train(
        f"{ranks} devices", args, corpus, split_loss(model, mesh, specs), optimizer, start(placed), place(TOKENS)
    )
    print_plans(model, mesh, args)
    calls = ", ".join(f"{target} x{n}" for target, n in sorted(hlo.count_custom_calls(text).items()))
    print(f"\nloss after {args.steps} steps on {len(devices)} {devices[0].device_kind} devices: {split[-1]:.4f}")
    print(f"custom calls (in the train step; a loop over layers counts once): {calls or 'none'}")
    if args.alone:
        return
    alone, _ = train(
        "one device",
        args,
        corpus,
        lambda *a: loss_of(model, *a),
        optimizer,
        start(jax.device_put(variables)),
        jnp.asarray,
    )
    most = max(abs(a / b - 1) for a, b in zip(split, alone, strict=True))
    print(f"loss after {args.steps} steps on one device: {alone[-1]:.4f}; of all steps {100 * most:.3f}% apart at most")


if __name__ == "__main__":
    main()
