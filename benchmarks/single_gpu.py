"""One GPU: linears and the MLP of a transformer, forward and backward, against the limit and against peers.

    python benchmarks/single_gpu.py --out benchmarks/results/single_gpu.jsonl
    python benchmarks/single_gpu.py --report benchmarks/results/single_gpu.jsonl
    python benchmarks/single_gpu.py --plot benchmarks/results/single_gpu.jsonl -o docs/images/single_gpu.png

Every case runs all implementations in turns in this process, so that clocks and temperature are the same for all, with
the GEMMs alone and a device copy among them: those two make the limit (te_jax/testing/bench.py says how). Values are
checked before anything is timed. Times are medians over rounds of wall time for many calls in flight / calls.

``TE_SITE=folder`` adds NVIDIA's TransformerEngine for JAX from that folder.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import pathlib
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import peers

if __name__ == "__main__":
    peers.te_environment()

import jax
import report

import te_jax as te
from te_jax.primitives import library
from te_jax.testing import bench
from te_jax.testing.bench import Case


def commit() -> str:
    """``TE_JAX_COMMIT``, or git's; "-dirty" where tracked files differ from it."""
    if given := os.environ.get("TE_JAX_COMMIT"):
        return given
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        here = pathlib.Path(__file__).parent
        return subprocess.run(command, cwd=here, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def environment() -> dict:
    import flax

    device = jax.devices()[0]
    where = {"device": device.device_kind, "jax": jax.__version__, "flax": flax.__version__, "commit": commit()}
    where |= {"te_jax": te.__version__, "flags": os.environ.get("XLA_FLAGS", "")}
    if device.platform == "gpu":
        where["cuda"] = library.status("cuda").build_info.get("cuda")
        where["cublas"] = library.cublaslt_status()["version"]
    return where


class Limit:
    """Times of the GEMMs alone and the device copy, as contestants; then limits."""

    def __init__(self, case: Case, *, gpu: bool):
        self.case = case
        self.bursts: dict[str, bench.Burst] = {}
        self.notes: dict = {}
        if not gpu:
            return
        import cublaslt

        for name, fast in (("fast", True), ("precise", False)):
            matmuls = cublaslt.matmuls(case, fast=fast)
            self.bursts[f"gemms {name}"] = cublaslt.burst_of(matmuls)
            self.notes[f"first_over_best_{name}"] = [round(m.first_over_best, 3) for m in matmuls]
            forward = len(case.gemms(backward=False))
            if fast:
                self.bursts["gemms fast fwd"] = cublaslt.burst_of(matmuls[:forward])
        self.bursts["copy"], self.copied = cublaslt.copy_burst()
        self.notes["cublaslt"] = cublaslt.version()

    def row(self, times: dict[str, list[float]]) -> dict:
        """limit_ms and what it is made of; {} without a GPU."""
        if not self.bursts:
            return {}
        case = self.case
        ms = {name: bench.median_ms(times[name]) for name in self.bursts}
        per_ms = self.copied / ms["copy"]  # bytes a millisecond
        moved = {name: case.bytes(current=name == "current") / per_ms for name in ("delayed", "current")}
        return {
            "copy_tbs": round(per_ms / 1e9, 4),
            "gemm_ms": ms["gemms fast"],
            "gemm_precise_ms": ms["gemms precise"],
            "gemm_tflops": round(sum(g.flops for g in case.gemms()) / ms["gemms fast"] / 1e9, 1),
            "bytes": case.bytes(),
            "limit_ms": round(ms["gemms fast"] + moved["delayed"], 5),
            "limit_current_ms": round(ms["gemms fast"] + moved["current"], 5),
            "limit_precise_ms": round(ms["gemms precise"] + moved["delayed"], 5),
            "limit_fwd_ms": round(ms["gemms fast fwd"] + case.bytes(backward=False) / per_ms, 5),
        } | self.notes


def compile_all(case: Case, impls: dict[str, peers.Impl], arrays, threads: int) -> tuple[dict, dict]:
    """Programs by name, and errors of those that can't be built. A peer that can't run a case is a result too.

    XLA picks GEMM algorithms by timing them while it compiles, so programs that it picks for are compiled one by one.
    """
    programs, errors = {}, {}

    def attempt(name, function, *args):
        try:
            return function(*args)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"[:400]

    lowered = {name: attempt(name, peers.lower, impl, case, arrays) for name, impl in impls.items()}
    picked = [name for name in impls if name.startswith(("flax", "fp8"))]
    groups = [picked, *([name] for name in impls if name not in picked)]

    def compile_group(group):
        return {name: attempt(name, lowered[name]) for name in group if lowered[name] is not None}

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for found in pool.map(compile_group, groups):
            programs |= found
    return {name: programs[name] for name in impls if programs.get(name) is not None}, errors


class Clock:
    """What takes how long."""

    def __init__(self) -> None:
        self.last, self.laps = time.perf_counter(), {}

    def lap(self, what: str) -> None:
        now = time.perf_counter()
        self.laps[what], self.last = now - self.last, now

    def __str__(self) -> str:
        return ", ".join(f"{what} {seconds:.1f} s" for what, seconds in self.laps.items())


def measure(case: Case, impls: dict[str, peers.Impl], args) -> list[dict]:
    """Result rows of one case."""
    impls = {name: impl for name, impl in impls.items() if case.kind == "mlp" or name != "flax_split"}
    clock = Clock()
    arrays = case.arrays()
    programs, errors = compile_all(case, impls, arrays, args.threads)
    clock.lap("compiling")
    expected = bench.reference_grads(case, arrays)
    checks = {}
    for name, program in list(programs.items()):
        try:
            for _ in range(3):  # FP8 state of the data
                program.results()
            checks[name] = peers.check(program, expected)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"[:400]
            del programs[name]
    del expected
    clock.lap("checking")
    limit = Limit(case, gpu=jax.devices()[0].platform == "gpu")
    clock.lap("choosing the limit's GEMMs")
    contestants = {("limit", name): burst for name, burst in limit.bursts.items()}
    contestants |= {("fwd", name): program.forward_burst for name, program in programs.items()}
    contestants |= {("fwd_bwd", name): program.both_burst for name, program in programs.items()}
    times = bench.interleaved(contestants, rounds=args.rounds, burst_s=args.burst_ms / 1e3, pause_s=args.pause_ms / 1e3)
    clock.lap("timing")
    common = {"case": case.name, "tokens": case.tokens}
    limits = limit.row({name: t for (kind, name), t in times.items() if kind == "limit"})
    rows = []
    for name, impl in impls.items():
        row = common | {"impl": impl.name, "recipe": impl.recipe, "accumulation": impl.accumulation}
        if name in errors:
            rows.append(row | {"error": errors[name]})
            continue
        fwd, both = times["fwd", name], times["fwd_bwd", name]
        row |= {"fwd_ms": bench.median_ms(fwd), "fwd_bwd_ms": bench.median_ms(both), "noise": bench.spread(both)}
        rows.append(row | limits | {"rounds": args.rounds, "errors": checks[name]})
    print(f"{case.name}, {case.tokens} tokens: {clock}", file=sys.stderr, flush=True)
    return rows


class Parser(argparse.ArgumentParser):
    """Its help ends with what --rows and --impls take, and what tables call the implementations."""

    def format_help(self) -> str:
        impls = peers.implementations()
        width = max(map(len, impls))
        names = [f"  {name:{width}}  {impl.label}" for name, impl in impls.items()]
        self.epilog = "\n".join(["rows:", *row_names(), "", "implementations, and their names in tables:", *names])
        return super().format_help()


def row_names() -> list[str]:
    return [f"  {i}  {case.name}, {case.tokens} tokens" for i, case in enumerate(bench.SINGLE_GPU)]


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines are added to this file")
    parser.add_argument("--impls", nargs="+", help="some of the implementations, see below (default: all)")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=range(len(bench.SINGLE_GPU)), help="some of the rows, see below"
    )
    parser.add_argument("--scale", type=int, default=1, help="divide all sizes, to try the script on a CPU")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--burst-ms", type=float, default=30)
    parser.add_argument("--pause-ms", type=float, default=10)
    parser.add_argument("--threads", type=int, default=4, help="programs compiled at a time")
    parser.add_argument("--report", type=pathlib.Path, help="print the tables of these results instead")
    parser.add_argument("--plot", type=pathlib.Path, help="draw these results instead")
    parser.add_argument("-o", "--image", type=pathlib.Path, default="single_gpu.png")
    args = parser.parse_args()
    if args.report or args.plot:
        option, path = ("--report", args.report) if args.report else ("--plot", args.plot)
        try:
            rows = report.read(path)
            print(report.table(rows)) if args.report else report.plot(rows, args.image)
        except (OSError, ValueError) as error:
            parser.error(f"{option}: {error}")
        return
    if unknown := [i for i in args.rows if not 0 <= i < len(bench.SINGLE_GPU)]:
        parser.error("\n".join([f"--rows: expected some of these, got {unknown}:", *row_names()]))
    known = peers.implementations()
    chosen = args.impls or list(known)
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"--impls: expected some of {list(known)}, got {unknown}")
    where = environment() | {"scale": args.scale}
    rows = []
    for index in args.rows:
        case = bench.SINGLE_GPU[index]
        found = measure(case if args.scale == 1 else case.scaled(args.scale), {n: known[n] for n in chosen}, args)
        found = [row | where for row in found]
        rows += found
        report.append(args.out, found)
    print(report.table(rows))


if __name__ == "__main__":
    main()
