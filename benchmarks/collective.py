"""Two GPUs of one host: matmuls with a collective, overlapped and not, te_jax, XLA and TransformerEngine.

    python benchmarks/collective.py --out benchmarks/results/collective_jax.jsonl       # both modes, 8 minutes at most
    python benchmarks/collective.py --report benchmarks/results/collective_jax.jsonl
    python benchmarks/collective.py --platform cpu --shapes 64,128,96 --quick            # a trial, on CPU devices

Modes are one process for each GPU (``jax.distributed`` on localhost) and one process with all of them; this program
starts and ends the processes of both. In each come the rows of the table, then a sweep of small sizes, which finds
from where on the overlapped call is the faster one, and one of schedules.

A program is 10 calls, each of which waits for the result of the one before. All contestants of a row are timed in
turns. "burst": after 30 ms of idling, at full clocks, two runs of a program less one run of it, so that starting costs
nothing; "sustained": programs without a pause, after a second of it, which is under the power cap. Both are in
microseconds a call. Before that every result is compared with a fp32 reference (``collective_contestants.py``).

``TE_SITE=folder`` adds NVIDIA's TransformerEngine for JAX from that folder, in the mode of one process for each GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import collective_report
import report

from te_jax.testing import processes

SHAPES = ((8192, 8192, 8192), (8192, 4096, 4096), (8192, 16384, 8192), (8192, 14336, 4096))
SMALL = tuple(
    (m, features, features) for features in (1024, 2048, 4096, 8192) for m in (256, 512, 1024, 2048, 4096, 8192)
)  # those beyond the smallest of the table are left out
MODES = {"processes": "a process for each GPU", "devices": "one process"}
SECTIONS = ("table", "small", "schedules")
TURNS = "all in turns"  # what a worker says when it times
STALL_S = 150.0  # without a word: XLA and NCCL start, a row compiles


def shape(text: str) -> tuple[int, int, int]:
    sizes = tuple(int(size) for size in text.split(","))
    if len(sizes) != 3 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"expected M,K,N, got {text!r}")
    return sizes


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="rows are appended, as they come")
    parser.add_argument("--report", type=pathlib.Path, help="print the tables of these results instead")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--devices", type=int, default=2, help="along the axis")
    parser.add_argument("--recipe", choices=("delayed", "none"), default="delayed", help="none: all in bfloat16")
    parser.add_argument("--shapes", type=shape, nargs="+", default=SHAPES, help="M,K,N of the table, of all devices")
    parser.add_argument("--small", type=shape, nargs="*", help="M,K,N of the sweep of small sizes")
    parser.add_argument("--ops", nargs="+", choices=("rs", "ag"), default=["rs", "ag"])
    parser.add_argument("--calls", type=int, default=10, help="in a program")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--impls", nargs="+", help="names of contestants, if not all")
    parser.add_argument("--without", nargs="*", default=[], help="names of contestants that are left out")
    parser.add_argument("--quick", action="store_true", help="3 rounds, 2 calls, no pauses: a trial")
    parser.add_argument("--budget", type=float, default=225.0, help="seconds for a mode; what is left then is skipped")
    parser.add_argument("--require-peer", action="store_true", help="TransformerEngine that isn't there is an error")
    parser.add_argument("--worker", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--done", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def environment(args: argparse.Namespace, mode: str, scratch: str) -> dict[str, str]:
    """Of the processes that measure."""
    env = dict(os.environ)
    here = pathlib.Path(__file__).parent
    paths = [str(here.parent), env.get("PYTHONPATH", "")]
    if args.platform == "cpu":
        count = 1 if mode == "processes" else args.devices
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}".strip()
        env |= {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}
    else:
        # Multicast stays off. Arenas, NCCL's buffers and TransformerEngine's lie outside of jax's pool.
        env |= {"NCCL_NVLS_ENABLE": "0", "UB_SKIPMC": "1", "NVTE_JAX_NCCL_FILE_PATH": scratch}
        env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    if site := env.get("TE_SITE"):
        libraries = [str(found) for path in sys.path for found in pathlib.Path(path or ".").glob("nvidia/*/lib")]
        env["LD_LIBRARY_PATH"] = ":".join([*libraries, env.get("LD_LIBRARY_PATH", "")])
        paths.append(site)
    return env | {"PYTHONPATH": ":".join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


class Listener:
    """Hears the first process: keeps its rows, and where it is."""

    def __init__(self, out: pathlib.Path | None):
        self.out, self.rows, self.cases, self.at = out, [], 0, ""

    def __call__(self, rank: int, line: str) -> None:
        if rank == 0 and line.startswith("{"):
            self.rows.append(json.loads(line))
            report.append(self.out, self.rows[-1:])
        elif rank == 0 and line.startswith("#"):
            self.at = line[1:].strip().removeprefix("case done")
            self.cases += line.startswith("# case done")
        if line.startswith("# case") or not line.startswith(("{", "#")):
            print(f"[{rank}] {line}", end="", file=sys.stderr, flush=True)


def measure(args: argparse.Namespace, mode: str, argv: list[str]) -> tuple[list[dict], bool]:
    """Rows of a mode, and whether all went well.

    Where its processes fail or are stuck, they start once more from there, without the contestant whose turn it was.
    """
    listener = Listener(args.out)
    without, ok, start = list(args.without), False, time.monotonic()
    for _ in range(2):
        budget = max(args.budget / 4, args.budget - (time.monotonic() - start))
        with tempfile.TemporaryDirectory() as scratch:
            shared = [*argv, "--worker", mode, "--port", str(processes.free_port()), "--done", str(listener.cases)]
            shared += ["--budget", str(budget), "--without", *without]
            ranks = args.devices if mode == "processes" else 1
            commands = [[sys.executable, str(pathlib.Path(__file__)), *shared, "--rank", str(r)] for r in range(ranks)]
            patience = 1 if args.platform == "cuda" else 4  # CPU devices may be anything
            ended = processes.run_together(
                commands,
                timeout_s=patience * (budget + 60),
                stall_s=patience * STALL_S,
                env=environment(args, mode, scratch),
                echo=listener,
            )
        ok = all(process.returncode == 0 for process in ended)
        if ok:
            break
        codes = ", ".join("killed" if p.returncode is None else str(p.returncode) for p in ended)
        print(f"{MODES[mode]}: ended with {codes} at: {listener.at}", file=sys.stderr, flush=True)
        contestant = listener.at.rpartition(": ")[2]
        if not listener.at or contestant in without:
            break
        if contestant == TURNS:  # whose turn it was isn't known
            listener.cases += 1
        without.append(contestant)
    return listener.rows, ok


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if args.report:
        try:
            print(collective_report.text(collective_report.read(args.report)))
        except (OSError, ValueError) as error:
            parser.error(f"--report: {error}")
        return
    if args.worker:
        import collective_worker

        collective_worker.main(args)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("collective.py: terminated"))  # so that its processes are too
    rows, failed = [], False
    for mode in args.modes:
        found, ok = measure(args, mode, sys.argv[1:])
        rows, failed = rows + found, failed or not ok
    print(collective_report.text(rows))
    if failed:
        sys.exit("collective.py: some of it failed, see above")


if __name__ == "__main__":
    main()
