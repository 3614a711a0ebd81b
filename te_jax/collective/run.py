"""Runs a collective matmul the way that was chosen for it, along any dimension but the features."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax import Array

from te_jax import primitives
from te_jax.collective.ring import ring_gemm
from te_jax.primitives import CollectiveGemmOut, CollectiveGemmSpec
from te_jax.primitives.collective_schedule import schedule


@dataclasses.dataclass(frozen=True)
class Along:
    """Where and how a collective matmul moves rows.

    Attributes:
      axis_name: the mesh axis.
      ranks: its size.
      dimension: of [*lead, C], counted from the front.
      path: "overlapped" or "ring".
      always: the custom call, on CUDA, also where it isn't known to be faster than the pair.
      whole: the axis isn't Manual: arrays are whole, and ``te_jax.collective.whole`` runs them.
      reduces: of a whole matmul_reduce_scatter, which is gathered behind it; rows are those of all of lead.
    """

    axis_name: str
    ranks: int
    dimension: int
    path: str = "overlapped"
    always: bool = False
    whole: bool = False
    reduces: bool = False


def run(along: Along, lhs: Array, rhs: Array, *, out_dtype: str, fields: dict[str, Any], **tensors: Array | None):
    """``collective_gemm`` of lhs [*lead, K] along a dimension of lead; out and gathered as [*lead, ...].

    Dimensions behind the one that is scattered are rows of the same rank, and merge with it; those before it are a
    batch, of which a rank's rows lie apart.

    Args:
      lhs, rhs, tensors: the operands of ``collective_gemm``.
      fields: of the spec, beside ``axis_name`` and ``out_dtype``.
    """
    shared = {"axis_name": along.axis_name, "ranks": along.ranks, "bias": "bias" in tensors}
    spec = CollectiveGemmSpec(out_dtype=out_dtype, **shared, **fields)
    batch, behind = lhs.shape[: along.dimension], lhs.shape[along.dimension + 1 : -1]
    flat = lhs.reshape(*batch, -1, lhs.shape[-1])
    if along.path == "ring":
        out = ring_gemm(flat, rhs, spec, **tensors)
    else:
        if along.always:
            chosen = schedule(spec, flat, rhs)
            spec = dataclasses.replace(spec, chunks=chosen.chunks, direct=chosen.direct)
        out = primitives.collective_gemm(flat, rhs, spec, **tensors)

    def unmerged(x: Array) -> Array:
        return x.reshape(*batch, x.shape[-2] // math.prod(behind), *behind, x.shape[-1])

    gathered = None if out.gathered is None else unmerged(out.gathered)
    return CollectiveGemmOut(unmerged(out.out), gathered, out.gathered_scale_inv, out.amax)
