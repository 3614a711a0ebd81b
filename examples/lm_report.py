"""What a run leaves behind: losses and FP8 health as JSON lines, plots, and which custom calls the train step used."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterable

import numpy as np


class LossLog:
    """``losses.jsonl``: one {"step", "loss"} a line, in order; ``step`` is the number of steps done before it."""

    def __init__(self, path: pathlib.Path, start: int) -> None:
        kept = [entry for entry in read_log(path) if entry["step"] < start]  # later ones are trained again
        path.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        self._file = path.open("a")

    def extend(self, entries: Iterable[tuple[int, float]]) -> None:
        for step, loss in entries:
            self._file.write(json.dumps({"step": step, "loss": loss}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class HealthLog(LossLog):
    """``health.jsonl``: {"step", "fp8/<tensor>/<amax, scale, ...>": value, ...}, as TensorBoard names them.

    ``tensorboard``: also writes event files beside it, with the package of that name.
    """

    def __init__(self, path: pathlib.Path, start: int, *, tensorboard: bool = False) -> None:
        super().__init__(path, start)
        self._writer = None
        if tensorboard:
            from tensorboard.summary import Writer

            self._writer = Writer(str(path.parent / "tensorboard"))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **scalars}) + "\n")
        self._file.flush()
        if self._writer is not None:
            for tag, value in scalars.items():
                self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        super().close()
        if self._writer is not None:
            self._writer.close()


def read_log(path: pathlib.Path) -> list[dict]:
    """The entries of a log, up to a line that an interruption cut short; none if there is no file."""
    entries: list[dict] = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                entries.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return entries


def write_summary(path: pathlib.Path, results: dict, unigram_entropy: float) -> None:
    """``results``: name of a run -> its ``Result``."""
    runs = {
        name: {
            "steps": result.steps,
            "held_out_loss": result.held_out_loss,
            "bits_per_byte": bits_per_byte(result.held_out_loss),
            "custom_calls": result.custom_calls,
            "checkpoint": str(result.checkpoint),
        }
        for name, result in results.items()
    }
    path.write_text(json.dumps({"unigram_entropy": unigram_entropy, "runs": runs}, indent=1))


def bits_per_byte(loss: float) -> float:
    """From nats per byte."""
    return loss / math.log(2)


def plot(path: pathlib.Path, curves: dict[str, list[dict]], unigram_entropy: float) -> None:
    """Loss over steps, one curve per name, each also smoothed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, entries in curves.items():
        steps, losses = [e["step"] for e in entries], [e["loss"] for e in entries]
        style = "--" if name == "bf16" else "-"  # the curves lie on one another
        (line,) = axes.plot(steps, _smooth(losses), style, label=name, linewidth=1.8)
        axes.plot(steps, losses, color=line.get_color(), alpha=0.25, linewidth=0.8)
    axes.axhline(unigram_entropy, color="grey", linestyle=":", label="byte frequencies alone")
    axes.set(xlabel="step", ylabel="training loss (nats per byte)", title="te_jax: byte-level language model")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_health(path: pathlib.Path, entries: list[dict]) -> None:
    """Amax, and the fractions saturated and flushed to zero, of every quantized tensor over steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colors = {"x": "tab:blue", "kernel": "tab:orange", "dy": "tab:green"}
    panels = {"amax": "amax", "saturated": "fraction saturated", "flushed": "fraction flushed to zero"}
    figure, axes = plt.subplots(len(panels), figsize=(8, 8), layout="constrained", sharex=True)
    for axis, (tag, label) in zip(axes, panels.items(), strict=True):
        for name in sorted({key for entry in entries for key in entry if key.endswith(f"/{tag}")}):
            role = next(role for role in colors if role in name.split("/"))
            points = [(entry["step"], entry[name]) for entry in entries if name in entry]
            axis.plot(*zip(*points, strict=True), color=colors[role], alpha=0.6, linewidth=0.9, label=role, marker=".")
        axis.set(ylabel=label, yscale="log" if tag == "amax" else "linear")
    handles = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))
    axes[0].legend(handles.values(), handles.keys())
    axes[-1].set(xlabel="step")
    figure.suptitle("te_jax: what FP8 does to every tensor")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _smooth(values: list[float], decay: float = 0.9) -> np.ndarray:
    """Exponential moving average, without the bias towards its start."""
    mean, weight, out = 0.0, 0.0, []
    for value in values:
        mean, weight = decay * mean + (1 - decay) * value, decay * weight + (1 - decay)
        out.append(mean / weight)
    return np.asarray(out)
