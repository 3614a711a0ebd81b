"""Trains a byte-level transformer in FP8 on the sources of Python's standard library.

    python examples/train_lm.py                             # FP8, delayed scaling, 300 steps, a new folder in runs/
    python examples/train_lm.py --compare                   # then the same in bf16, both curves in one plot
    python examples/train_lm.py --out runs/a --steps 150    # stops half-way (so does Ctrl-C, or kill) ...
    python examples/train_lm.py --out runs/a --resume       # ... and goes on, bit for bit as if it had not stopped

The learning-rate schedule depends on --schedule-steps alone, the batch of a step on (--seed, step) alone. In --out:
checkpoints/<step>, losses.jsonl, summary.json, loss.png; the bf16 run of --compare has its own folder, bf16/. With
--health-every also health.jsonl, health.png and, with --tensorboard, a folder tensorboard/ of the same scalars.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from typing import Any

# On a CPU XLA runs the custom calls on its own threads; threads of the BLAS beside them only wait for one another.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import jax.numpy as jnp
import lm_data
import lm_report
import optax
from flax import struct
from lm_console import Console, StopOnSignal
from lm_model import LanguageModel, layer_config

import te_jax as te
from te_jax.testing import hlo

RECIPES = {"delayed": te.DelayedScaling(), "current": te.CurrentScaling(), "block": te.BlockScaling(), "none": None}
REPORT_EVERY = 10  # steps between losses fetched from the device
HELD_OUT_BATCHES = 32


FIXED = ("recipe", "schedule_steps", "seed", "layers", "width", "heads", "kv_heads", "seq", "batch", "learning_rate")
"""What a run is: kept in its config.json, taken from there by --resume."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The text above as it is, and the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, default="delayed", help="of the FP8 quantization")
    parser.add_argument("--steps", type=_positive, default=300, help="where to stop")
    parser.add_argument("--schedule-steps", type=_positive, default=300, help="length of the learning-rate schedule")
    parser.add_argument("--seed", type=_seed, default=0, help="of parameters and batches")
    parser.add_argument("--out", type=pathlib.Path, help="default: a new folder in runs/; with --resume its newest one")
    parser.add_argument("--save-every", type=_positive, default=100, help="steps between checkpoints")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in --out, as the run was started"
    )
    parser.add_argument("--compare", action="store_true", help="train in bf16 too, and plot both")
    parser.add_argument("--layers", type=_positive, default=2, help="transformer layers")
    parser.add_argument("--width", type=_positive, default=128, help="features of the residual stream")
    parser.add_argument("--heads", type=_positive, default=4, help="attention heads")
    parser.add_argument("--kv-heads", type=_positive, help="default: --heads")
    parser.add_argument("--seq", type=_positive, default=128, help="bytes per sequence")
    parser.add_argument("--batch", type=_positive, default=8, help="sequences per step")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="its peak")
    parser.add_argument("--data", help="a folder of .py files to train on; default: the standard library")
    parser.add_argument("--remat", action="store_true", help="recompute each layer in the backward pass")
    parser.add_argument(
        "--health-every", type=_positive, metavar="STEPS", help="measure what FP8 does to every tensor this often"
    )
    parser.add_argument("--tensorboard", action="store_true", help="write the measurements as event files too")
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The options; with --resume those of the run that goes on, where the command doesn't say them."""
    parser = make_parser()
    args = parser.parse_args(argv)
    args.out = choose_out(args)
    config = args.out / "config.json"
    if args.resume and config.exists():
        saved = json.loads(config.read_text())
        parser.set_defaults(**{name: saved[name] for name in FIXED if name in saved}, out=args.out)
        args = parser.parse_args(argv)
    elif args.resume:
        print(f"train_lm: no run in {args.out} to resume: starting one")
    return args


@struct.dataclass
class TrainState:
    """All that training changes. ``fp8`` is state, not parameters: it never goes through the optimizer."""

    params: Any
    fp8: Any
    opt_state: Any

    @classmethod
    def of(cls, variables: dict[str, Any], opt_state: Any) -> TrainState:
        rest, fp8 = te.state.split(variables)
        return cls(rest["params"], fp8, opt_state)

    def variables(self) -> dict[str, Any]:
        """As the model's ``init`` makes them."""
        return te.state.merge({"params": self.params}, self.fp8)


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    warmup = max(1, args.schedule_steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=args.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(args.schedule_steps, warmup + 1),
        end_value=0.1 * args.learning_rate,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))


def make_model(args: argparse.Namespace, recipe: te.Recipe | None) -> LanguageModel:
    return LanguageModel(
        vocabulary=lm_data.VOCABULARY,
        layers=args.layers,
        width=args.width,
        heads=args.heads,
        kv_heads=args.kv_heads,
        recipe=recipe,
        remat=args.remat,
    )


def init_state(model: LanguageModel, optimizer, seed: int, tokens: jax.Array) -> TrainState:
    """tokens [B, T + 1], for the shapes."""
    variables = jax.jit(model.init)(jax.random.key(seed), tokens[:, :-1])
    return TrainState.of(variables, jax.jit(optimizer.init)(variables["params"]))


def loss_of(model: LanguageModel, variables: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Mean nats per byte of tokens [B, T + 1]."""
    logits = model.apply(variables, tokens[:, :-1])  # [B, T, V]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(model, optimizer, state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    loss, grads = jax.value_and_grad(lambda variables: loss_of(model, variables, tokens))(state.variables())
    rest, fp8 = te.state.split(grads)
    grads = rest["params"]
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    return (
        TrainState(
            params=optax.apply_updates(state.params, updates),
            fp8=te.state.apply(state.fp8, fp8),  # the "gradient" of FP8 state is its next value
            opt_state=opt_state,
        ),
        loss,
    )


@dataclasses.dataclass
class Result:
    steps: int
    held_out_loss: float | None  # None: stopped by a signal
    custom_calls: dict[str, int]
    checkpoint: pathlib.Path


def run(args: argparse.Namespace, name: str, recipe: te.Recipe | None, out: pathlib.Path, corpus, stop) -> Result:
    """Trains up to --steps, or until a signal, and saves."""
    out.mkdir(parents=True, exist_ok=True)
    model, optimizer = make_model(args, recipe), make_optimizer(args)
    state = init_state(model, optimizer, args.seed, corpus.batch(args.seed, 0, args.batch, args.seq))
    checkpoints = te.checkpoint.Manager(out / "checkpoints", recipe=recipe)
    start = 0
    if args.resume and checkpoints.latest_step() is not None:
        start, variables, opt_state, _ = checkpoints.restore(state.variables(), opt_state=state.opt_state)
        state = TrainState.of(variables, opt_state)
        print(f"{name}: resumed at step {start} from {out}/checkpoints/{start}")

    step_fn = jax.jit(lambda state, tokens: train_step(model, optimizer, state, tokens), donate_argnums=0)
    lowered = step_fn.lower(state, corpus.batch(args.seed, 0, args.batch, args.seq))
    compiled = lowered.compile()

    log = lm_report.LossLog(out / "losses.jsonl", start)
    health = make_health(args, model, state, recipe, out, start)
    step, stopping, pending = start, False, []
    with Console(name, start, args.steps, args.batch * args.seq) as console:
        while step < args.steps and not stopping:
            tokens = corpus.batch(args.seed, step, args.batch, args.seq)
            if health is not None:
                health(step, state.variables(), tokens)
            state, loss = compiled(state, tokens)
            pending.append((step, loss))
            step += 1
            stopping = stop.received is not None
            saving = step % args.save_every == 0 or step == args.steps or stopping
            if saving or step % REPORT_EVERY == 0:
                log.extend((done, float(loss)) for done, loss in pending)
                console.update(step, float(loss))
                pending.clear()
            if saving:
                checkpoints.save(step, state.variables(), opt_state=state.opt_state)
    checkpoints.close()

    held_out = None if stopping else held_out_loss(model, state, corpus, args)
    calls = dict(sorted(hlo.count_custom_calls(lowered.as_text()).items()))
    return Result(step, held_out, calls, out / "checkpoints" / str(step))


def make_health(args, model: LanguageModel, state: TrainState, recipe, out: pathlib.Path, start: int):
    """What --health-every asks for: flags go to the console. None without it, and for a run that isn't quantized."""
    if args.health_every is None or recipe is None:
        return None
    log = lm_report.HealthLog(out / "health.jsonl", start, tensorboard=args.tensorboard)
    tokens = jax.ShapeDtypeStruct((args.batch, args.seq), jnp.int32)
    return te.health.Callback(
        lambda variables, tokens: loss_of(model, variables, tokens),
        te.health.instrument(model, state.variables(), tokens),
        every=args.health_every,
        monitor=te.health.Monitor(),
        write=log.write,
        on_flags=lambda flags: print("not healthy:", *map(str, flags), sep="\n  "),
    )


def held_out_loss(model: LanguageModel, state: TrainState, corpus: lm_data.Corpus, args: argparse.Namespace) -> float:
    evaluate = jax.jit(lambda tokens: loss_of(model, state.variables(), tokens))
    batches = corpus.held_out_batches(HELD_OUT_BATCHES, args.batch, args.seq)
    return float(sum(evaluate(tokens) for tokens in batches) / HELD_OUT_BATCHES)


def check_sizes(args: argparse.Namespace, corpus: lm_data.Corpus) -> None:
    """Raises ValueError for sizes that the model doesn't take, or the text."""
    shortest = min(len(corpus.train), len(corpus.held_out))
    if args.seq + 1 >= shortest:
        raise ValueError(f"--seq: expected less than the {shortest} bytes of text, got {args.seq}")
    tokens = jax.ShapeDtypeStruct((args.batch, args.seq), jnp.int32)
    jax.eval_shape(make_model(args, RECIPES[args.recipe]).init, jax.random.key(0), tokens)


def check_out(out: pathlib.Path, args: argparse.Namespace) -> None:
    """A run may only be resumed as what it was; a new one may not run over an old one."""
    config = {flag: getattr(args, flag) for flag in FIXED}
    path = out / "config.json"
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(config, indent=1))
        return
    if not args.resume:
        sys.exit(f"train_lm: --out: expected a folder without a run, got {out}; --resume goes on with the run in it")
    for flag, was in json.loads(path.read_text()).items():
        if config[flag] != was:
            option = "--" + flag.replace("_", "-")
            sys.exit(f"train_lm: {option}: expected {was}, as the run in {out} had, got {config[flag]}")


def choose_out(args: argparse.Namespace, root: pathlib.Path = pathlib.Path("runs")) -> pathlib.Path:
    """--out, or the next (with --resume: the newest) numbered folder in runs/."""
    if args.out is not None:
        return args.out
    taken = [int(folder.name) for folder in root.glob("*") if folder.name.isdigit()]
    return root / str(max(taken, default=0) + (not (args.resume and taken)))


def print_report(name: str, result: Result, unigram_entropy: float) -> None:
    bits = lm_report.bits_per_byte
    calls = ", ".join(f"{target} x{count}" for target, count in result.custom_calls.items()) or "none"
    print(
        f"\n{name}: {result.steps} steps on {jax.devices()[0].device_kind}\n"
        f"  held-out loss     {result.held_out_loss:.4f} nats, {bits(result.held_out_loss):.3f} bits per byte"
        f" (byte frequencies alone: {bits(unigram_entropy):.3f})\n"
        f"  custom calls      {calls} (in the train step; a loop over layers counts once)\n"
        f"  checkpoint        {result.checkpoint}"
    )


def print_plan(args: argparse.Namespace, recipe: te.Recipe | None) -> None:
    """The plan of one transformer layer, chain by chain."""
    x = jax.ShapeDtypeStruct((args.batch, args.seq, args.width), jnp.bfloat16)
    layer = te.flax.TransformerLayer(**layer_config(make_model(args, recipe)))
    for chain, plan in layer.plan(x).items():
        print(f"\nplan of {chain}:\n{plan}")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    out = args.out
    try:  # before anything is written: a corrected command can use the same folder
        corpus = lm_data.load(args.data)
        check_sizes(args, corpus)
        check_out(out, args)
    except (ValueError, OSError) as error:
        sys.exit(f"train_lm: {error}")
    runs = {args.recipe if args.recipe != "none" else "bf16": (RECIPES[args.recipe], out)}
    if args.compare:
        runs.setdefault("bf16", (None, out / "bf16"))

    entropy = corpus.unigram_entropy()
    results: dict[str, Result] = {}
    with StopOnSignal() as stop:
        for name, (recipe, folder) in runs.items():
            results[name] = run(args, name, recipe, folder, corpus, stop)
            if stop.received is not None:
                options = f"--out {out} --resume --steps {args.steps}" + (" --compare" if args.compare else "")
                print(f"stopped by a signal at step {results[name].steps}; go on with {options}")
                sys.exit(128 + stop.received)

    print_plan(args, RECIPES[args.recipe])
    for name, result in results.items():
        print_report(name, result, entropy)
    if len(results) == 2:
        fp8, bf16 = (result.held_out_loss for result in results.values())
        print(f"\n{args.recipe} against bf16: {100 * (fp8 / bf16 - 1):+.2f}% held-out loss")
    curves = {name: lm_report.read_log(folder / "losses.jsonl") for name, (_, folder) in runs.items()}
    lm_report.plot(out / "loss.png", curves, entropy)
    health = lm_report.read_log(out / "health.jsonl")
    if health:
        lm_report.plot_health(out / "health.png", health)
    lm_report.write_summary(out / "summary.json", results, entropy)
    print(f"plot: {out / 'loss.png'}")


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**31:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 2**31 - 1, got {text}")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return value


if __name__ == "__main__":
    main()
