"""One process of ``collective.py``: compiles, checks and times contestants together with the others."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import os
import statistics
import sys
import time

import collective as program
import collective_contestants as contestants
import collective_peer
import jax
import jax.numpy as jnp
import numpy as np
from collective_problem import Problem, make_arrays, reference
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from single_gpu import environment

from te_jax.primitives.collective_gemm import SMALLEST_MEASURED
from te_jax.testing import bench, hlo

IDLE_S, SOAK_S, SUSTAINED_S = 0.03, 1.0, 0.05


class Ranks:
    """All processes of a run. In each the same calls are made in the same order."""

    def __init__(self, args: argparse.Namespace):
        self.first = args.rank == 0
        if args.worker == "processes":
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(
                f"localhost:{args.port}",
                num_processes=args.devices,
                process_id=args.rank,
                local_device_ids=[args.rank] if args.platform == "cuda" else [0],
                initialization_timeout=60,
            )
        devices = jax.devices()
        if len(devices) < args.devices or devices[0].platform not in (args.platform, "gpu"):
            sys.exit(f"expected {args.devices} devices of {args.platform}, got {devices}")
        # With an axis for data, as TransformerEngine wants one.
        self.mesh = jax.sharding.Mesh(np.array(devices[: args.devices]).reshape(1, -1), ("data", "tp"))
        everywhere = NamedSharding(self.mesh, PartitionSpec("tp"))
        ones = jax.make_array_from_callback((args.devices,), everywhere, lambda index: np.ones(1, np.float32))
        add = jax.jit(jnp.sum).lower(ones).compile()
        self._meet = lambda: jax.block_until_ready(add(ones))

    def meet(self) -> None:
        """Returns in all processes at once, give or take some microseconds. Devices are idle."""
        self._meet()

    def agreed(self, values) -> np.ndarray:
        """The first process's numbers, in all of them."""
        values = np.asarray(values)
        return values if jax.process_count() == 1 else np.asarray(multihost_utils.broadcast_one_to_all(values))

    def all(self, ok: bool) -> bool:
        if jax.process_count() == 1:
            return ok
        return bool(np.all(multihost_utils.process_allgather(np.asarray(ok))))

    def say(self, text: str) -> None:
        if self.first:
            print(text, flush=True)


def wall_s(ranks: Ranks, run: contestants.Program, times: int, idle_s: float) -> float:
    time.sleep(idle_s)
    ranks.meet()
    start = time.perf_counter()
    y = None
    for _ in range(times):
        y = run()
    jax.block_until_ready(y)
    return time.perf_counter() - start


def bursts(ranks: Ranks, programs: dict, rounds: int, calls: int, idle_s: float) -> dict[str, dict]:
    """Of each: microseconds of a call between two runs in flight ("us"), and those of a run by itself ("wall_us")."""
    found = {name: ([], []) for name in programs}
    names = list(programs)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            one, two = (wall_s(ranks, programs[name], times, idle_s) for times in (1, 2))
            found[name][0].append((two - one) / calls)
            found[name][1].append(one / calls)
    return {
        name: {"us": _us(between), "us_noise": bench.spread(between), "wall_us": _us(alone)}
        for name, (between, alone) in found.items()
    }


def sustained(ranks: Ranks, programs: dict, rounds: int, calls: int, soak_s: float, burst_s: float) -> dict[str, dict]:
    """Of each: microseconds of a call where nothing rests."""
    names, counts = list(programs), []
    for name in names:
        took = min(wall_s(ranks, programs[name], 2, 0) / 2 for _ in range(2))
        counts.append(max(2, math.ceil(burst_s / took)))
    counts = [int(count) for count in ranks.agreed(counts)]
    bursts_s = burst_s * len(names)
    soak = max(0, math.ceil(soak_s / bursts_s)) if soak_s else 0
    found: dict[str, list[float]] = {name: [] for name in names}
    for i in range(-soak, rounds):
        for j in range(len(names)):
            name, count = names[(i + j) % len(names)], counts[(i + j) % len(names)]
            took = wall_s(ranks, programs[name], count, 0) / count / calls
            if i >= 0:
                found[name].append(took)
    return {name: {"sustained_us": _us(s), "sustained_noise": bench.spread(s)} for name, s in found.items()}


def _us(seconds) -> float:
    return round(statistics.median(seconds) * 1e6, 2)


def row_of(problem: Problem, section: str, mode: str, contestant: contestants.Contestant) -> dict:
    row = {"section": section, "op": problem.op, "m": problem.m, "k": problem.k, "n": problem.n}
    row |= {"ranks": problem.ranks, "recipe": problem.recipe, "mode": mode, "impl": contestant.name}
    return row | {"operands": contestant.operands, "product": problem.product}


def make_programs(ranks: Ranks, problem: Problem, entrants: list, args: argparse.Namespace) -> tuple[dict, dict, dict]:
    """(programs, compiled and checked, their errors, what went wrong with the others)."""
    arrays = make_arrays(problem)
    expected = reference(problem, arrays)
    lowered, wrong = {}, {}

    def attempt(key: str, function, *given):
        try:
            return function(*given)
        except Exception as error:  # a contestant that can't run a case is a result too
            wrong[key] = f"{type(error).__name__}: {error}"[:400]

    by_key = {f"{c.name}/{c.operands}": c for c in entrants}
    for key, c in by_key.items():
        ranks.say(f"# {problem.name}: {c.name}")
        lowered[key] = attempt(key, contestants.lower, c, problem, arrays, args.calls)
    programs, errors = {}, {}
    with concurrent.futures.ThreadPoolExecutor(args.threads) as pool:
        made = {
            key: pool.submit(attempt, key, contestants.compiled, by_key[key], problem, arrays, low)
            for key, low in lowered.items()
            if low is not None
        }
    for key, c in by_key.items():
        ranks.say(f"# {problem.name}: {c.name}")
        run = made[key].result() if key in made else None
        if ranks.all(run is not None):
            errors[key] = attempt(key, run.error, arrays, expected)
            if ranks.all(errors[key] is not None):
                programs[key] = run
        if key not in programs:
            wrong.setdefault(key, "failed in another process")
    return programs, errors, wrong


def case(
    ranks: Ranks, problem: Problem, section: str, entrants: list, args: argparse.Namespace
) -> tuple[list[dict], str]:
    """The rows of a problem, and what took how long."""
    start = time.perf_counter()
    programs, errors, wrong = make_programs(ranks, problem, entrants, args)
    built = time.perf_counter()
    ranks.say(f"# {problem.name}: {program.TURNS}")
    times = bursts(ranks, programs, args.rounds, args.calls, args.idle_s)
    rest = {}
    if section == "table":
        rest = sustained(ranks, programs, args.rounds, args.calls, args.soak_s, args.burst_s)
    rows = []
    for c in entrants:
        key = f"{c.name}/{c.operands}"
        row = row_of(problem, section, program.MODES[args.worker], c)
        if key in programs:
            text = programs[key].compiled.as_text() or ""
            row |= {"error": round(errors[key], 6)} | times[key] | rest.get(key, {})
            row["custom_calls"] = dict(
                hlo.count_custom_calls(text, "te_jax_") + hlo.count_custom_calls(text, "__cublas")
            )
            row["collectives"] = dict(hlo.count_collectives(text))
        else:
            row["failed"] = wrong[key]
        rows.append(row | {"calls": args.calls, "rounds": args.rounds})
    took = f"{built - start:.1f} s to build and check, {time.perf_counter() - built:.1f} s to time"
    return rows, f"{took}; {len(programs)} of {len(entrants)} contestants"


def cases(ranks: Ranks, args: argparse.Namespace) -> list[tuple[str, Problem]]:
    found = []
    for section in args.sections:
        smallest = min(m * k * n for m, k, n in args.shapes)
        sizes = args.shapes
        if section == "small":
            swept = [s for s in program.SMALL if s[0] * s[1] * s[2] < smallest]
            sizes = swept if args.small is None else args.small
        found += [(section, Problem(op, *size, ranks.mesh, args.recipe)) for size in sizes for op in args.ops]
    return found


def main(args: argparse.Namespace) -> None:
    start = time.monotonic()
    args.threads = max(1, min(8, (os.cpu_count() or 1) // 4))
    trial = args.quick or args.platform == "cpu"
    args.idle_s, args.soak_s, args.burst_s = (0.0, 0.0, 0.0) if trial else (IDLE_S, SOAK_S, SUSTAINED_S)
    if args.quick:
        args.calls, args.rounds = min(args.calls, 2), min(args.rounds, 3)
    ranks = Ranks(args)
    where = environment() | {"devices": args.devices, "smallest_measured": SMALLEST_MEASURED}
    peer = peer_or_reason(ranks, args)
    makers = {"table": contestants.contestants, "small": contestants.small, "schedules": contestants.schedules}
    for number, (section, problem) in enumerate(cases(ranks, args)):
        if number < args.done:
            continue
        if ranks.agreed(time.monotonic() - start > args.budget):
            ranks.say(f"# case skipped, {args.budget:.0f} s are over: {section} {problem.name}")
            continue
        entrants = makers[section](problem)
        if section == "table" and not isinstance(peer, str):
            entrants += collective_peer.contestants(problem)
        entrants = [c for c in entrants if c.name not in args.without and c.name in (args.impls or [c.name])]
        rows, took = case(ranks, problem, section, entrants, args)
        for row in rows:
            ranks.say(json.dumps(row | where))
        ranks.say(f"# case done {section} {problem.name}: {took}")
        jax.clear_caches()
    if args.worker == "processes":
        ranks.meet()
        jax.distributed.shutdown()


def peer_or_reason(ranks: Ranks, args: argparse.Namespace) -> str | None:
    """None: TransformerEngine takes part; otherwise why not."""
    if args.worker != "processes" or args.platform != "cuda":
        return "it overlaps with one GPU in each process only"
    reason = None
    try:
        collective_peer.bootstrap()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:400]
    if not ranks.all(reason is None):
        reason = reason or "it failed in another process"
        print(f"TransformerEngine is not here: {reason}", file=sys.stderr, flush=True)
        if args.require_peer:
            sys.exit(1)
    return reason
