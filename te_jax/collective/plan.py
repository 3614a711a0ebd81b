"""Which way a collective matmul runs: a pure function of what tracing sees, never of the platform.

overlapped   one custom call, which hides what travels under its GEMMs. Where a platform can't run it the program is
             lowered to the GEMM and the collective, one after the other (``te_jax.primitives.support`` says why)
ring         a GEMM for every rank's rows, and a ``ppermute`` beside each, which XLA's scheduler overlaps: across hosts
plain        the ops as they are: a GEMM, and a collective of XLA
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from te_jax.errors import check_value
from te_jax.primitives import support
from te_jax.primitives.collective_gemm import SMALLEST_MEASURED
from te_jax.primitives.collective_schedule import MAX_RANKS, arena_bytes, schedule, slot_bytes
from te_jax.primitives.quantizing import ALIGNMENT
from te_jax.primitives.spec import CollectiveGemmSpec

OVERLAPS = ("auto", "overlapped", "ring", "plain")
"""What a user may ask for. "auto": overlapped where that pays, otherwise plain."""


@dataclasses.dataclass(frozen=True)
class Product:
    """One rank's product [rows, contracted] . [contracted, columns], beside or behind the collective.

    ``rows``: of all ranks together, in either kind; ``dtype``: of what is multiplied, float8_e4m3fn for any FP8.
    """

    kind: str  # of CollectiveGemmSpec
    ranks: int
    rows: int
    contracted: int
    columns: int
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"

    @property
    def multiplications(self) -> int:
        return self.rows * self.contracted * self.columns

    @property
    def schedule(self) -> str:
        """How the custom call moves it, as the plan prints it."""
        fp8 = self.dtype.startswith("float8")
        spec = CollectiveGemmSpec(kind=self.kind, axis_name="", ranks=self.ranks, fp8=fp8, out_dtype=self.out_dtype)
        rows = self.rows // self.ranks if spec.gathers else self.rows
        lhs, rhs = (
            jax.ShapeDtypeStruct((size, self.contracted), jnp.dtype(self.dtype)) for size in (rows, self.columns)
        )
        return str(schedule(spec, lhs, rhs))


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which way a product runs, and why."""

    path: str  # "overlapped", "ring" or "plain"
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def choose(product: Product, overlap: str = "auto", *, host: int | None = None) -> Choice:
    """The way this product runs.

    Args:
      overlap: what the user asks for.
      host: devices that reach each other's memory at most; None: all do.

    Raises:
      ValueError: not one of ``OVERLAPS``.
    """
    check_overlap(product.kind, overlap)
    if overlap == "plain":
        return Choice("plain", "asked for")
    if (reason := why_not(product)) is not None:
        return Choice("plain", reason)
    if overlap == "ring":
        return Choice("ring", "asked for")
    if product.ranks > MAX_RANKS:
        return Choice("ring", f"{product.ranks} devices, the custom call is for {MAX_RANKS} at most")
    gflop = f"{2e-9 * product.multiplications:.2g} GFLOP a device"
    if overlap == "auto" and product.multiplications < SMALLEST_MEASURED:
        return Choice("plain", f"{gflop}, overlap is known to pay from {2e-9 * SMALLEST_MEASURED:.2g}")
    if host is not None and product.ranks > host:
        return Choice("ring", f"{product.ranks} devices, of which {host} at most reach each other's memory")
    return Choice("overlapped", f"{product.schedule}; {gflop}" + (", asked for" if overlap == "overlapped" else ""))


def platform_notes(calls: Sequence[tuple[CollectiveGemmSpec, Sequence[Any]]], platform: str) -> list[str]:
    """What a platform makes of custom calls, by spec and operands' types: the memory they take, or why it has none."""
    notes, slots = [], {}
    for spec, operands in calls:
        reason = support.why_not(spec, *operands, platform=platform)
        if reason is not None:
            notes.append(f"on {platform}: {spec.kind} runs as the GEMM and the collective: {reason}")
        elif platform == "cuda":
            slot = slot_bytes(spec, *operands[:2])
            slots[spec.axis_name, spec.ranks] = max(slot, slots.get((spec.axis_name, spec.ranks), 0))
    for (axis_name, ranks), slot in slots.items():
        mib = arena_bytes(ranks, slot) / 2**20
        notes.append(
            f"on cuda: axis {axis_name!r} has an arena of {mib:.0f} MiB on each device, outside of jax's memory"
        )
    return list(dict.fromkeys(notes))


def check_overlap(op: str, overlap: object) -> None:
    """Raises ValueError unless it is one of ``OVERLAPS``."""
    check_value(isinstance(overlap, str) and overlap in OVERLAPS, op, "overlap", f"one of {OVERLAPS}", repr(overlap))


def why_not(product: Product) -> str | None:
    """Why neither the custom call nor the ring takes this product; None if they do."""
    if product.ranks == 1:
        return "one device"
    if product.rows == 0:
        return "no tokens"
    if product.rows % product.ranks:
        return f"{product.rows} tokens are not a multiple of {product.ranks} devices"
    for name, size in (("contracted", product.contracted), ("output", product.columns)):
        if size == 0 or size % ALIGNMENT:
            return f"{size} {name} features are not a multiple of {ALIGNMENT}"
    return None
