"""Results of ``single_gpu.py`` as tables, as shares of what was asked for, and as a plot."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from te_jax.testing.bench import geomean

Row = dict


class Key(NamedTuple):
    """What is compared: an implementation under some XLA flags, sorted."""

    impl: str
    recipe: str
    accumulation: str
    flags: str = ""

    @property
    def label(self) -> str:
        """As tables name it."""
        accumulation = f"({self.accumulation})" if self.accumulation not in ("", "fast", "xla") else ""
        flags = " ".join(_FLAG_NAMES.get(flag, flag) for flag in self.flags.split())
        return " ".join(part for part in (self.impl, self.recipe, accumulation, flags and f"[{flags}]") if part)


_FLAG_NAMES = {"--xla_gpu_command_buffer_scheduling_mode=CONCURRENT": "concurrent"}


def read(path: pathlib.Path) -> list[Row]:
    """The rows of the newest run of every case and implementation. Raises ValueError where they aren't such rows."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return list({(row["case"], row["tokens"], key(row)): row for row in rows}.values())
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path}: expected lines of single_gpu.py --out, got {error!r}") from error


def append(path: pathlib.Path | None, rows: Iterable[Row]) -> None:
    """Adds rows to a file of JSON lines; nothing without a path."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def key(row: Row) -> Key:
    flags = " ".join(sorted(row.get("flags", "").split()))
    return Key(row["impl"], row["recipe"], row["accumulation"], flags)


def cases(rows: Iterable[Row]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((row["case"], row["tokens"]) for row in rows))


def table(rows: Sequence[Row]) -> str:
    """Forward / forward + backward in ms of every implementation, the limit, then the summary. Markdown."""
    keys = list(dict.fromkeys(map(key, rows)))
    at = {(row["case"], row["tokens"], key(row)): row for row in rows}
    header = ["case", "tokens", *(k.label for k in keys), "GEMMs", "limit"]
    lines = [header, ["---"] * len(header)]
    for case, tokens in cases(rows):
        found = [at.get((case, tokens, k), {}) for k in keys]
        cells = [
            f"{r['fwd_ms']:.3f} / {r['fwd_bwd_ms']:.3f}" if "fwd_ms" in r else "failed" if r else "" for r in found
        ]
        limits = next((r for r in found if "limit_ms" in r), {})
        cells += [f"{limits['gemm_ms']:.3f}", f"{limits['limit_ms']:.3f}"] if limits else ["", ""]
        lines.append([case, str(tokens), *cells])
    out = ["Cells: forward / forward + backward, ms; GEMMs and limit: forward + backward, ms.", ""]
    out += ["| " + " | ".join(line) + " |" for line in lines]
    failed = [f"{key(r).label}, {r['case']}, {r['tokens']}: {r['error']}" for r in rows if "error" in r]
    return "\n".join([*out, "", *summary(rows), *failed])


def ratios(rows: Sequence[Row], ours: Key, theirs: Sequence[Key], what: str = "fwd_bwd_ms") -> dict:
    """(case, tokens) -> how many times faster ``ours`` is than the fastest of ``theirs``."""
    at = {(row["case"], row["tokens"], key(row)): row for row in rows if what in row}
    out = {}
    for case in cases(rows):
        peers = [at[*case, k][what] for k in theirs if (*case, k) in at]
        if peers and (*case, ours) in at:
            out[case] = min(peers) / at[*case, ours][what]
    return out


def limit_shares(rows: Sequence[Row], ours: Key) -> dict:
    """(case, tokens) -> limit / time. Current scaling's limit has its second read; {} where no limit was measured.

    Limits are those of GEMMs with fast accumulation, so nothing else has a share of one.
    """
    if ours.accumulation != "fast":
        return {}
    kind = "limit_current_ms" if ours.recipe == "current" else "limit_ms"
    return {(r["case"], r["tokens"]): r[kind] / r["fwd_bwd_ms"] for r in rows if key(r) == ours and kind in r}


def summary(rows: Sequence[Row]) -> list[str]:
    """What the figures say, one line a question: the worst case and the geometric mean.

    Compared are rows of the same flags. What is wanted is said of GPUs at full size alone: a trial on a CPU or with
    ``--scale`` can't miss it.
    """
    keys = list(dict.fromkeys(map(key, rows)))
    trials = {(r["case"], r["tokens"]) for r in rows if r["device"] == "cpu" or r.get("scale", 1) != 1}
    line = functools.partial(_summary_line, trials)
    lines = []
    for ours in [k for k in keys if k.impl == "te_jax"]:
        peers = [k for k in keys if k.flags == ours.flags]
        flax = [k for k in peers if k.impl.startswith("flax")]
        direct = [k for k in peers if k.impl.startswith("Fp8Direct")]
        shares = limit_shares(rows, ours)
        for tokens, wanted in ((8192, 0.92), (2048, 0.85)):
            some = {c: v for c, v in shares.items() if c[1] == tokens}
            lines += line(f"{ours.label}: share of the limit at {tokens} tokens", some, wanted, None)
        engine = [k for k in peers if k.impl == "TransformerEngine" and k.recipe == ours.recipe]
        lines += line(f"{ours.label}: times TransformerEngine {ours.recipe}", ratios(rows, ours, engine), 0.98, 1.05)
        bf16 = ratios(rows, ours, flax)
        blocks = ours.recipe == "block"
        lines += line(f"{ours.label}: times flax bf16", bf16, None, None if blocks else 1.6)
        long = {c: v for c, v in bf16.items() if c[1] == 8192}
        wanted = (None, 1.3) if blocks else (1.5, None)
        lines += line(f"{ours.label}: times flax bf16 at 8192 tokens", long, *wanted)
        lines += line(f"{ours.label}: times Fp8DirectDotGeneralOp", ratios(rows, ours, direct), 1.0, 1.1)
    return lines


def _summary_line(trials: set, what: str, values: dict, worst: float | None, mean: float | None) -> list[str]:
    if not values:
        return []
    (case, tokens), lowest = min(values.items(), key=lambda item: item[1])
    middle = geomean(values.values())
    met = (worst is None or lowest >= worst) and (mean is None or middle >= mean)
    wanted = " and ".join(
        text for text, bound in ((f"every {worst}", worst), (f"mean {mean}", mean)) if bound is not None
    )
    if trials & values.keys():
        wanted = ""
    count = "1 case" if len(values) == 1 else f"{len(values)} cases"  # a run of some rows says what it rests on
    found = f"{middle:.3f} (lowest {lowest:.3f}, {case}, {tokens}), {count}"
    return [f"- {what}: {found}" + (f"; wanted {wanted}: {'met' if met else 'not met'}" if wanted else "")]


XLA_DEFAULT = "XLA's default flags"


def plot(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Limit over time of every implementation, a group of bars per case, a panel per set of XLA's flags.

    Raises ValueError where no row has a limit.
    """
    rows, given = [row for row in rows if "limit_ms" in row], len(rows)
    if not rows:
        raise ValueError(f"expected rows with limits, which are measured on a GPU alone, got {given} rows without")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    where = sorted(cases(rows), key=lambda case: case[1])
    names = list(dict.fromkeys(key(row)[:3] for row in rows))  # without flags: one colour in every panel
    flags = list(dict.fromkeys(row.get("flags", "") for row in rows))
    figure, panels = pyplot.subplots(
        len(flags), figsize=(14, 1.5 + 3.5 * len(flags)), layout="constrained", sharex=True, squeeze=False
    )
    width, colours = 0.85 / len(names), pyplot.get_cmap("tab20")
    for axes, flag in zip(panels[:, 0], flags, strict=True):
        for i, name in enumerate(names):
            found = [row for row in rows if row.get("flags", "") == flag and key(row)[:3] == name]
            at = {(row["case"], row["tokens"]): row["limit_ms"] / row["fwd_bwd_ms"] for row in found}
            places = [(j + i * width, at[case]) for j, case in enumerate(where) if case in at]
            if places:
                label = key(found[0])._replace(flags="").label
                axes.bar(*zip(*places, strict=True), width, label=label, color=colours(i))
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_ylabel("limit / time, fwd + bwd")
        commits = sorted({row["commit"][:10] for row in rows if row.get("flags", "") == flag})
        axes.set_title(f"{flag or XLA_DEFAULT}, te_jax {', '.join(commits)}", fontsize=9)
    ticks = [j + width * (len(names) - 1) / 2 for j in range(len(where))]
    panels[-1, 0].set_xticks(ticks, [f"{c}\n{t} tokens" for c, t in where], fontsize=7)
    figure.suptitle(f"{rows[0]['device']}, jax {rows[0]['jax']}")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), fontsize=8, ncols=5, loc="outside lower center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
