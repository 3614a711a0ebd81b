"""Rows of ``collective.py`` as tables, with what was wanted of them."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterable, Sequence

from te_jax.testing.bench import geomean

Row = dict
OURS, PLAIN, CALL, GEMM, COLLECTIVE = "te_jax overlapped", "te_jax plain", "custom call", "GEMM", "collective"
PEER = "TransformerEngine overlapped"
COLUMNS = (
    OURS, PLAIN, "te_jax ring", PEER, "TransformerEngine plain", "XLA", "XLA windowed einsum",
    CALL, "GEMM and collective", GEMM, COLLECTIVE,
)  # fmt: skip
CLOCKS = {"us": "full clocks (bursts)", "sustained_us": "sustained, under the power cap"}
WANTED_PEER, WANTED_ROW, WANTED_HIDDEN = 1.15, 0.97, 0.85
TITLES = {"rs": "GEMM + RS", "ag": "AG + GEMM"}

Case = tuple[str, int, int, int]


def read(path: pathlib.Path) -> list[Row]:
    """The newest row of every case, mode and contestant. Raises ValueError where they aren't such rows."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        newest = {(row["section"], row["recipe"], row["mode"], case(row), row["impl"]): row for row in rows}
        return list(newest.values())
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path}: expected lines of collective.py --out, got {error!r}") from error


def case(row: Row) -> Case:
    return row["op"], row["m"], row["k"], row["n"]


def hidden(times: dict[str, float]) -> float | None:
    """The share of the collective's time that the call hides: 1 - (call - GEMM alone) / collective alone."""
    if not {CALL, GEMM, COLLECTIVE} <= times.keys():
        return None
    return 1 - (times[CALL] - times[GEMM]) / times[COLLECTIVE]


def by_case(rows: Iterable[Row], figure: str) -> dict[Case, dict[str, float]]:
    """{case: {contestant: microseconds}}, in the order of rows.

    Differences of two runs may be anything where a call takes less than the clock's jitter: none below 0.
    """
    found: dict[Case, dict[str, float]] = {}
    for row in rows:
        if row.get(figure, 0) > 0:
            found.setdefault(case(row), {})[row["impl"]] = row[figure]
    return found


def text(rows: Sequence[Row]) -> str:
    """All tables. Markdown."""
    lines: list[str] = []
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        for mode in dict.fromkeys(row["mode"] for row in rows):
            here = [row for row in rows if (row["mode"], row["recipe"]) == (mode, recipe)]
            for figure, clock in CLOCKS.items():
                lines += _table(
                    [row for row in here if row["section"] == "table"], figure, f"{mode}, {recipe}, {clock}"
                )
            lines += _small([row for row in here if row["section"] == "small"], f"{mode}, {recipe}")
            lines += _schedules([row for row in here if row["section"] == "schedules"], f"{mode}, {recipe}")
    lines += [f"{r['op']} {r['m']}, {r['k']}, {r['n']}, {r['impl']}: {r['failed']}" for r in rows if "failed" in r]
    return "\n".join(lines)


def _markdown(table: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in (table[0], ["---"] * len(table[0]), *table[1:])]


def _table(rows: Sequence[Row], figure: str, title: str) -> list[str]:
    cases = by_case(rows, figure)
    if not cases:
        return []
    columns = [name for name in COLUMNS if any(name in times for times in cases.values())]
    table = [["", "M, K, N", *columns, "hidden"]]
    for (op, *sizes), times in cases.items():
        share = hidden(times)
        cells = [f"{times[name]:.1f}" if name in times else "" for name in columns]
        table.append([TITLES[op], ", ".join(map(str, sizes)), *cells, "" if share is None else f"{share:.0%}"])
    return [f"**{title}**, microseconds a call", "", *_markdown(table), "", *summary(rows, figure), ""]


def summary(rows: Sequence[Row], figure: str) -> list[str]:
    """Geometric means, the worst rows, and whether that is what was wanted (of H200s, at full size)."""
    cases = by_case(rows, figure)
    trial = not rows or "H200" not in rows[0]["device"] or figure != "us"
    lines = []

    def ratios(other: str, ours: str = OURS) -> dict[Case, float]:
        return {c: times[other] / times[ours] for c, times in cases.items() if {other, ours} <= times.keys()}

    def line(what: str, found: dict[Case, float], wanted: Callable[[list[float]], bool] | None, aim: str) -> None:
        if not found:
            return
        worst = min(found, key=found.__getitem__)
        words = f"- {what}: {geomean(found.values()):.3f} (lowest {found[worst]:.3f}, {' '.join(map(str, worst))})"
        met = "" if wanted is None or trial else f"; wanted {aim}: {'met' if wanted([*found.values()]) else 'NOT MET'}"
        lines.append(words + met)

    def against_peer(found: list[float]) -> bool:
        return geomean(found) >= WANTED_PEER and min(found) >= WANTED_ROW

    line(f"{PEER} / {OURS}", ratios(PEER), against_peer, f"{WANTED_PEER}, no row below {WANTED_ROW}")
    line(f"{PLAIN} / {OURS}", ratios(PLAIN), lambda found: min(found) >= WANTED_ROW, f"no row below {WANTED_ROW}")
    for other in ("XLA windowed einsum", "XLA"):
        line(f"{other} / {OURS}", ratios(other), None, "")
    line(f"GEMM and collective / {CALL}", ratios("GEMM and collective", CALL), None, "")
    shares = {c: share for c, times in cases.items() if (share := hidden(times)) is not None}
    large = {c: share for c, share in shares.items() if c[1] * c[2] * c[3] >= 8192**3}
    if large:
        worst = min(large, key=large.__getitem__)
        met = "" if trial else f"; wanted {WANTED_HIDDEN:.0%}: {'met' if large[worst] >= WANTED_HIDDEN else 'NOT MET'}"
        lines.append(f"- hidden at 8192 cubed and above: {large[worst]:.0%} at least{met}")
    return lines


def threshold(rows: Iterable[Row], noise: float = 0.03) -> int | None:
    """The smallest product of a device from which on no row's overlapped call is slower than its pair beyond noise.

    None: no such size, the largest is slower.
    """
    found = []
    for row_case, times in by_case(rows, "us").items():
        if {OURS, PLAIN} <= times.keys():
            products = [row["product"] for row in rows if case(row) == row_case]
            found.append((products[0], times[OURS] <= times[PLAIN] * (1 + noise)))
    smallest = None
    for product in sorted({p for p, _ in found}, reverse=True):
        if not all(wins for p, wins in found if p == product):
            break
        smallest = product
    return smallest


def _small(rows: Sequence[Row], title: str) -> list[str]:
    cases = by_case(rows, "us")
    if not cases:
        return []
    table = [["", "M, K, N", "product of a device", OURS, PLAIN, "plain / overlapped"]]
    products = {case(row): row["product"] for row in rows}
    for row_case, times in sorted(cases.items(), key=lambda item: (item[0][0], products[item[0]])):
        op, *sizes = row_case
        both = {OURS, PLAIN} <= times.keys()
        cells = [f"{times[name]:.1f}" if name in times else "" for name in (OURS, PLAIN)]
        ratio = f"{times[PLAIN] / times[OURS]:.2f}" if both else ""
        table.append([TITLES[op], ", ".join(map(str, sizes)), str(products[row_case]), *cells, ratio])
    lines = [f"**{title}, small sizes**, microseconds a call at full clocks", "", *_markdown(table), ""]
    for op in dict.fromkeys(row["op"] for row in rows):
        found = threshold([row for row in rows if row["op"] == op])
        lines.append(f"- {TITLES[op]}: overlapped is not slower from a product of {found} on; now {_now(rows)}")
    return [*lines, ""]


def _now(rows: Sequence[Row]) -> str:
    return f"SMALLEST_MEASURED = {rows[0].get('smallest_measured')}"


def _schedules(rows: Sequence[Row], title: str) -> list[str]:
    cases = by_case(rows, "us")
    if not cases:
        return []
    lines = [f"**{title}, schedules**, microseconds a call at full clocks, operands quantized before", ""]
    for op in dict.fromkeys(row["op"] for row in rows):
        here = {row_case: times for row_case, times in cases.items() if row_case[0] == op}
        columns = list(dict.fromkeys(name for times in here.values() for name in times))
        table = [["", "M, K, N", *columns, "best"]]
        for (_, *sizes), times in here.items():
            cells = [f"{times[name]:.1f}" if name in times else "" for name in columns]
            tried = {name: us for name, us in times.items() if name != GEMM}
            best = min(tried, key=tried.__getitem__) if tried else ""
            table.append([TITLES[op], ", ".join(map(str, sizes)), *cells, best])
        lines += [*_markdown(table), ""]
    return lines
