"""Where the device's time goes: kernels of a jax.profiler trace, by class, with the gaps between them."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence

import jax

CLASSES = (
    ("attention (cuDNN)", r"cudnn|fmha|flash|sdpa"),
    ("te_jax passes", r"te_jax|WriteKernel|AmaxKernel|DbiasKernel|NormStatsKernel|FinishAmax|DequantizeKernel"),
    ("TransformerEngine passes", r"transformer_engine|nvte"),
    ("GEMM", r"nvjet|gemm|cutlass|cublas|splitK|xmma"),
    ("copy, fill", r"memcpy|memset|fill"),
    ("XLA", r"."),
)
"""Kernel classes and what their names match, first match wins."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    name: str
    start_ns: float
    duration_ns: float

    @property
    def end_ns(self) -> float:
        return self.start_ns + self.duration_ns


def class_of(name: str) -> str:
    return next(kind for kind, pattern in CLASSES if re.search(pattern, name, re.IGNORECASE))


def record(call: Callable[[], object], calls: int) -> list[Kernel]:
    """The kernels of ``calls`` calls in flight together. Warm up before."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            out = None
            for _ in range(calls):
                out = call()
            jax.block_until_ready(out)
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        return read(file)


def read(file: pathlib.Path) -> list[Kernel]:
    """The device events of a trace, in order of their start."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the reader's own types
        data = jax.profiler.ProfileData.from_file(str(file))
        planes = [plane for plane in data.planes if plane.name.startswith("/device:GPU")]
        lines = [line for plane in planes for line in plane.lines if line.name.startswith("Stream")]
        if planes and not lines:
            raise ValueError(f"{file.name}: expected lines of streams, got {[x.name for p in planes for x in p.lines]}")
        kernels = [Kernel(e.name, e.start_ns, e.duration_ns) for line in lines for e in line.events]
    return sorted(kernels, key=lambda k: k.start_ns)


def busy_ns(kernels: Iterable[Kernel]) -> float:
    """Time in which at least one kernel runs."""
    total, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda k: k.start_ns):
        total += max(0.0, kernel.end_ns - max(kernel.start_ns, until))
        until = max(until, kernel.end_ns)
    return total


@dataclasses.dataclass(frozen=True)
class Profile:
    """Device time of one call, ms. ``span`` is from the first kernel to the last one's end; ``idle`` is what no kernel
    fills of it. Recording itself makes launches slower: ``span`` may exceed the unprofiled time."""

    span_ms: float
    busy_ms: float
    launches: float
    by_class: dict[str, tuple[float, float]]  # ms, launches
    by_kernel: dict[str, tuple[float, float]]

    @property
    def idle_ms(self) -> float:
        return self.span_ms - self.busy_ms


def profile(kernels: Sequence[Kernel], calls: int) -> Profile:
    if not kernels:
        raise ValueError(
            "kernel_trace.profile: kernels: expected a trace with device events, got none (is CUPTI there?)"
        )
    span = max(k.end_ns for k in kernels) - min(k.start_ns for k in kernels)
    tables = []
    for name_of in (class_of, lambda name: name):
        table: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
        for kernel in kernels:
            row = table[name_of(kernel.name)]
            row[0] += kernel.duration_ns / 1e6 / calls
            row[1] += 1 / calls
        tables.append({k: (ms, n) for k, (ms, n) in sorted(table.items(), key=lambda item: -item[1][0])})
    return Profile(span / 1e6 / calls, busy_ns(kernels) / 1e6 / calls, len(kernels) / calls, *tables)


def table(title: str, found: Profile, *, kernels: int = 12) -> str:
    """Markdown: classes, then the longest kernels."""
    lines = [
        f"{title}: {found.busy_ms:.3f} ms busy of {found.span_ms:.3f} ms, idle {found.idle_ms:.3f} ms, "
        f"{found.launches:.1f} launches",
        "",
        "| what | ms | share | launches |",
        "| --- | --- | --- | --- |",
    ]
    rows = list(found.by_class.items()) + [(f"`{n[:110]}`", v) for n, v in list(found.by_kernel.items())[:kernels]]
    lines += [f"| {name} | {ms:.4f} | {ms / found.busy_ms:.1%} | {n:.1f} |" for name, (ms, n) in rows]
    return "\n".join(lines) + "\n"
