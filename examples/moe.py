"""Trains a byte-level mixture-of-experts transformer, FP8 experts over 8 devices, against the same in bf16.

    python examples/moe.py                      # delayed scaling, then bf16; both held-out losses
    python examples/moe.py --recipe current --steps 300

Without GPUs the 8 devices are parts of the host. A device has its own sequences and its own experts: tokens go to their
experts and back by all_to_all (moe_layer.py). Attention, router and head are the same on all devices.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import lm_data
import optax
from flax import linen as nn
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from moe_layer import MoE
from train_lm import RECIPES, TrainState, make_optimizer

import te_jax as te

AXIS = "expert"
BALANCE_WEIGHT = 0.01
HELD_OUT_BATCHES = 16


class MoELanguageModel(nn.Module):
    """tokens [B, T] -> (logits [B, T, vocabulary] float32, balance loss)."""

    width: int
    heads: int
    layers: int
    num_experts: int
    hidden_features: int
    axis: str | None
    recipe: te.Recipe | None

    @nn.compact
    def __call__(self, tokens: Array) -> tuple[Array, Array]:
        dtype = jnp.bfloat16
        x = nn.Embed(lm_data.VOCABULARY, self.width, dtype=dtype, name="embed")(tokens)
        balance = []
        for i in range(self.layers):
            x = te.flax.MultiHeadAttention(
                self.heads,
                norm="rmsnorm",
                causal=True,
                rope=True,
                residual=True,
                recipe=self.recipe,
                dtype=dtype,
                name=f"attention_{i}",
            )(x)
            moe = MoE(self.num_experts, self.hidden_features, axis=self.axis, recipe=self.recipe, name=f"moe_{i}")
            h = te.Sequential([te.ops.RMSNorm()], dtype=dtype, name=f"moe_norm_{i}")(x)
            y, loss = moe(h.reshape(-1, self.width))
            x, balance = x + y.reshape(x.shape), [*balance, loss]
        head = te.flax.LayerNormDense(lm_data.VOCABULARY, use_bias=False, recipe=self.recipe, dtype=dtype, name="head")
        return head(x).astype(jnp.float32), sum(balance) / self.layers


def specs_of(tree: Any) -> Any:
    """Experts, their FP8 state and what an optimizer keeps of them are split over their first dimension."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: P(AXIS) if "experts" in jax.tree_util.keystr(path) else P(), tree
    )


def loss_of(model: MoELanguageModel, params: Any, fp8: Any, tokens: Array) -> tuple[Array, Array]:
    """(what is minimized, mean nats per byte) of all devices' tokens [B, T + 1]; inside of shard_map."""
    logits, balance = model.apply(te.state.merge({"params": params}, fp8), tokens[:, :-1])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    nats = jax.lax.pmean(nats, AXIS)
    return nats + BALANCE_WEIGHT * balance, nats


def make_steps(model: MoELanguageModel, optimizer: optax.GradientTransformation, mesh, state: TrainState):
    """(train step, evaluation), compiled for the mesh."""
    specs = specs_of(state.params), specs_of(state.fp8)

    def gradients(params, fp8, tokens):
        grad = jax.value_and_grad(lambda p, s: loss_of(model, p, s, tokens), argnums=(0, 1), has_aux=True)
        (_, nats), grads = grad(params, fp8)
        return nats, grads

    in_specs = (*specs, P(AXIS))
    sharded = jax.shard_map(gradients, mesh=mesh, in_specs=in_specs, out_specs=(P(), specs))
    evaluate = jax.shard_map(
        lambda params, fp8, tokens: loss_of(model, params, fp8, tokens)[1],
        mesh=mesh,
        in_specs=in_specs,
        out_specs=P(),
    )

    def train(state: TrainState, tokens: Array) -> tuple[TrainState, Array]:
        nats, (grads, fp8) = sharded(state.params, state.fp8, tokens)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, te.state.apply(state.fp8, fp8), opt_state), nats

    return jax.jit(train, donate_argnums=0), jax.jit(lambda state, tokens: evaluate(state.params, state.fp8, tokens))


def run(args: argparse.Namespace, name: str, recipe: te.Recipe | None, corpus: lm_data.Corpus) -> float:
    """Trains; the held-out loss in nats per byte."""
    mesh = jax.make_mesh((args.devices,), (AXIS,), devices=jax.devices()[: args.devices])
    config = {
        "width": args.width,
        "heads": args.heads,
        "layers": args.layers,
        "num_experts": args.experts,
        "hidden_features": args.hidden,
        "recipe": recipe,
    }
    tokens = corpus.batch(args.seed, 0, args.batch, args.seq)
    whole = MoELanguageModel(axis=None, **config)  # all experts in one place, to make the parameters
    variables = jax.jit(whole.init)(jax.random.key(args.seed), tokens[: args.batch // args.devices, :-1])
    optimizer = make_optimizer(args)
    state = TrainState.of(variables, optimizer.init(variables["params"]))
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    state = jax.tree.map(put, state, specs_of(state))

    train, evaluate = make_steps(MoELanguageModel(axis=AXIS, **config), optimizer, mesh, state)
    for step in range(args.steps):
        state, nats = train(state, put(corpus.batch(args.seed, step, args.batch, args.seq), P(AXIS)))
        if (step + 1) % 20 == 0 or step + 1 == args.steps:
            print(f"{name}: step {step + 1}, {float(nats):.4f} nats per byte", flush=True)
    batches = corpus.held_out_batches(HELD_OUT_BATCHES, args.batch, args.seq)
    return sum(float(evaluate(state, put(tokens, P(AXIS)))) for tokens in batches) / HELD_OUT_BATCHES


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=[name for name in RECIPES if name != "none"], default="delayed")
    parser.add_argument("--steps", type=int, default=200, help="and the length of the learning-rate schedule")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--experts", type=int, default=16, help="of a layer, on all devices together")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=64, help="features of an expert")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq", type=int, default=64, help="bytes per sequence")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step, on all devices together")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    args.schedule_steps = args.steps
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    corpus = lm_data.load()
    fp8 = run(args, args.recipe, RECIPES[args.recipe], corpus)
    bf16 = run(args, "bf16", None, corpus)
    print(
        f"held-out loss, nats per byte: {args.recipe} {fp8:.4f}, bf16 {bf16:.4f} ({100 * (fp8 / bf16 - 1):+.2f}%); "
        f"byte frequencies alone: {corpus.unigram_entropy():.4f}"
    )


if __name__ == "__main__":
    main()
