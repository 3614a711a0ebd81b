"""In which pieces the rows of a collective matmul travel, and how much memory that takes: of spec and shapes alone."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from te_jax.primitives.spec import CollectiveGemmSpec
from te_jax.quant.block_reference import BLOCK
from te_jax.quant.format import is_fp8

MAX_RANKS = 16  # csrc/comm/schedule.h has the same two
MAX_CHUNKS = 16
_ARENA_GRANULARITY = 2 << 20


class Schedule(NamedTuple):
    """In how many pieces a block of rows travels, and whether a GEMM writes it into its owner's memory itself."""

    chunks: int
    direct: bool

    def __str__(self) -> str:
        return f"{'direct' if self.direct else 'copy'}, {self.chunks} piece{'s' if self.chunks > 1 else ''}"


def schedule(spec: CollectiveGemmSpec, lhs, rhs, *rest) -> Schedule:
    """The schedule of operands like these: what the spec says, otherwise what docs/design/0006 found for the shape."""
    if spec.chunks:
        return Schedule(spec.chunks, spec.direct)
    if spec.gathers:
        return Schedule(1, False)
    size = sizes(spec, lhs, rhs)
    travels = size.block_rows * size.n * travelling(spec).itemsize
    if travels < 16 << 20:
        return Schedule(1, True)
    # With more than two ranks nothing waits for a piece before all GEMMs are done, so that blocks are pieces enough.
    long = size.k >= 4096
    return Schedule((2 if long else 4) if spec.ranks == 2 else (1 if long else 2), False)


class Sizes(NamedTuple):
    """Of one rank: its product is [rows, k] . [k, n]; a block is the rows that one rank owns, in ``batch`` runs."""

    rows: int
    n: int
    k: int
    block_rows: int
    batch: int


def sizes(spec: CollectiveGemmSpec, lhs, rhs) -> Sizes:
    n, k = rhs.shape[::-1] if spec.rhs_contract_first else rhs.shape
    batch, rows = math.prod(lhs.shape[:-2]), math.prod(lhs.shape[:-1])
    block = rows if spec.gathers else rows // spec.ranks
    return Sizes(rows * spec.ranks if spec.gathers else rows, n, k, block, batch)


def out_dtype(spec: CollectiveGemmSpec) -> np.dtype:
    return np.dtype(jnp.dtype(spec.out_dtype))


def travelling(spec: CollectiveGemmSpec) -> np.dtype:
    """The dtype of partial products on their way."""
    out = out_dtype(spec)
    return np.dtype(jnp.bfloat16) if is_fp8(out) else out


def slot_bytes(spec: CollectiveGemmSpec, lhs, rhs) -> int:
    """Bytes of one rank's block on its way to another: what a slot of an arena has to hold.

    Block-scaled operands: with room for the scales of its rows behind it.
    """
    size = sizes(spec, lhs, rhs)
    row = size.k * np.dtype(lhs.dtype).itemsize if spec.gathers else size.n * travelling(spec).itemsize
    data = size.block_rows * row
    return -(-data // 256) * 256 + 4 * -(-size.k // BLOCK) * size.block_rows if spec.blocks else data


def arena_bytes(ranks: int, slot: int) -> int:
    """Bytes of device memory, outside of jax's, that a group of ``ranks`` keeps on each device for slots of that size.

    ``ArenaLayout`` in csrc/comm: flags and scratch; for every other rank two slots, each after 256 bytes, and a block
    on its way to it; the own partial product in float32; rounded up to 2 MiB. Calls of a group share it, so ``slot`` is
    the largest of their ``slot_bytes``. The GEMMs' workspace comes on top (32 MiB).
    """
    slot = -(-slot // 256) * 256
    used = ranks * MAX_CHUNKS * 128 + 256 + (ranks - 1) * (2 * (256 + slot) + slot) + 2 * slot
    return -(-used // _ARENA_GRANULARITY) * _ARENA_GRANULARITY
