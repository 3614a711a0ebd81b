"""Collective matmuls in programs that XLA sees through: a GEMM for every rank's rows, and a ``ppermute`` beside each.

Every block goes from its source to its owner directly, so partial sums are rounded once and added in the order of
ranks, as in the custom call: a sum that travels along a ring would be rounded at every stop. What is to travel is
issued before the GEMM that hides it; XLA's latency hiding scheduler does the rest.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from te_jax import compat, primitives
from te_jax.errors import check_value, required
from te_jax.parallel import mesh
from te_jax.primitives import CollectiveGemmOut, CollectiveGemmSpec
from te_jax.primitives.collective_gemm import gemm_spec
from te_jax.quant.format import is_fp8

_ROWS = -2  # of [*B, M, K]


def ring_gemm(
    lhs: Array,
    rhs: Array,
    spec: CollectiveGemmSpec,
    *,
    lhs_scale_inv: Array | None = None,
    rhs_scale_inv: Array | None = None,
    bias: Array | None = None,
) -> CollectiveGemmOut:
    """As ``te_jax.primitives.collective_gemm``, for a result in high precision and scales of whole tensors."""
    high = not is_fp8(jnp.dtype(spec.out_dtype)) and not spec.amax
    check_value(high, "collective.ring", "out_dtype", "high precision, no amax", spec.out_dtype)
    check_value(not spec.blocks, "collective.ring", "lhs_scaling", "tensor", spec.lhs_scaling)
    axis = mesh.named_axis("collective.ring", spec.axis_name, lhs)
    manual = axis is not None and spec.axis_name in mesh.manual_axes()
    check_value(manual, "collective.ring", "axis_name", "an axis of the surrounding shard_map", repr(spec.axis_name))
    assert axis is not None
    run = _gather_and_multiply if spec.gathers else _multiply_and_scatter
    lhs = _varying(lhs, spec.axis_name)
    lhs_scale_inv = None if lhs_scale_inv is None else _varying(lhs_scale_inv, spec.axis_name)
    return run(dataclasses.replace(spec, ranks=axis.size), lhs, rhs, lhs_scale_inv, rhs_scale_inv, bias)


def _multiply_and_scatter(spec, lhs, rhs, lhs_scale_inv, rhs_scale_inv, bias) -> CollectiveGemmOut:
    """Other ranks' blocks first, the own one last."""
    ranks, rank, rows = spec.ranks, lax.axis_index(spec.axis_name), lhs.shape[_ROWS] // spec.ranks
    bare = dataclasses.replace(gemm_spec(spec), bias=False)
    arrived = None
    for by in (*range(1, ranks), 0):
        owner = (rank + by) % ranks
        block = lax.dynamic_slice_in_dim(lhs, owner * rows, rows, lhs.ndim + _ROWS)
        (part, _) = primitives.gemm(block, rhs, bare, lhs_scale_inv=lhs_scale_inv, rhs_scale_inv=rhs_scale_inv)
        arrived = _put(arrived, ranks, _shift(part, spec.axis_name, ranks, by), (rank - by) % ranks)
    arrived = required(arrived, "collective.ring", "ranks")
    total = functools.reduce(jnp.add, (arrived[i].astype(jnp.float32) for i in range(ranks)))
    if bias is not None:
        total = total + bias.astype(jnp.float32)
    return CollectiveGemmOut(total.astype(spec.out_dtype))


def _gather_and_multiply(spec, lhs, rhs, lhs_scale_inv, rhs_scale_inv, bias) -> CollectiveGemmOut:
    """The own block first, then the others, each of which travels under the GEMMs before its own."""
    ranks, rank = spec.ranks, lax.axis_index(spec.axis_name)
    shifts = [functools.partial(_shift, axis_name=spec.axis_name, ranks=ranks, by=-by) for by in range(ranks)]
    blocks = [shift(lhs) for shift in shifts]
    scales = None if lhs_scale_inv is None else [shift(lhs_scale_inv) for shift in shifts]
    multiply = functools.partial(primitives.gemm, rhs_scale_inv=rhs_scale_inv, bias=bias)

    def in_order(parts: list[Array]) -> Array:
        """[ranks, ...] in the order of ranks."""
        out = None
        for by, part in enumerate(parts):
            out = _put(out, ranks, part, (rank + by) % ranks)
        return required(out, "collective.ring", "ranks")

    products = [
        multiply(block, rhs, gemm_spec(spec), lhs_scale_inv=None if scales is None else scales[by])[0]
        for by, block in enumerate(blocks)
    ]
    out = _in_rows(in_order(products))
    if not spec.keep_gathered:
        return CollectiveGemmOut(out)
    return CollectiveGemmOut(out, _in_rows(in_order(blocks)), None if scales is None else in_order(scales))


def _varying(x: Array, axis_name: str) -> Array:
    """x, typed as one device's own."""
    return compat.pvary(x, (axis_name,)) if compat.checks_varying_axes() else x


def _as_bytes(move: Callable[[Array], Array], x: Array) -> Array:
    """``move(x)``; FP8 travels as bytes, as not every backend's collectives know its types."""
    if not is_fp8(x.dtype):
        return move(x)
    return lax.bitcast_convert_type(move(lax.bitcast_convert_type(x, jnp.uint8)), x.dtype)


def _shift(x: Array, axis_name: str, ranks: int, by: int) -> Array:
    """x of the rank ``by`` places before this one."""
    if by % ranks == 0:
        return x
    pairs = [(rank, (rank + by) % ranks) for rank in range(ranks)]
    return _as_bytes(lambda x: lax.ppermute(x, axis_name, pairs), x)


def _put(into: Array | None, ranks: int, part: Array, index: Array) -> Array:
    """``into`` [ranks, ...] with ``part`` [...] at ``index``; None: nothing is there yet."""
    if into is None:
        into = compat.pvary(jnp.zeros((ranks, *part.shape), part.dtype), compat.varying_axes(part))
    return lax.dynamic_update_index_in_dim(into, part, index, 0)


def _in_rows(x: Array) -> Array:
    """[ranks, *B, m, C] as [*B, ranks * m, C]."""
    x = jnp.moveaxis(x, 0, -3)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])
