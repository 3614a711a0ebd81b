"""Tensors whose rows are in groups (experts), in plain jnp: the definition of what the grouped custom calls compute.

x [T, C] and group_sizes i32[G], which may be traced: group g is the group_sizes[g] rows behind those of the groups
before it. Rows behind the last group belong to none. Nothing has a shape that depends on the values of group_sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from te_jax.quant.division import reciprocal
from te_jax.quant.format import Format, is_fp8
from te_jax.quant.reference import amax, cast, scale_from_amax

ROW_ALIGNMENT = 16
"""A transposed copy [C, T] is padded to rows of whole 16 bytes; csrc/core/grouped_args.h has the same."""


def padded_rows(rows: int) -> int:
    """The length of a row of a transposed copy of ``rows`` rows."""
    return -(-rows // ROW_ALIGNMENT) * ROW_ALIGNMENT


def group_of_row(group_sizes: jax.Array, rows: int) -> jax.Array:
    """i32[rows]: the group of every row, G for one that belongs to none."""
    ends = jnp.cumsum(jnp.maximum(group_sizes, 0))
    return jnp.sum(jnp.arange(rows, dtype=ends.dtype)[:, None] >= ends, axis=1, dtype=jnp.int32)


def are_valid(group_sizes: jax.Array, rows: int) -> jax.Array:
    """bool[]: no size is negative, and their sum is at most ``rows``."""
    ends = jnp.cumsum(group_sizes)  # the first overflow of int32 is a negative end
    return jnp.all((group_sizes >= 0) & (ends >= 0) & (ends <= rows))


class GroupedQuantized(NamedTuple):
    """data as the tensor; scale, scale_inv and amax f32[G]."""

    data: jax.Array
    scale: jax.Array
    scale_inv: jax.Array
    amax: jax.Array


def quantize_rows(
    y: jax.Array, group_sizes: jax.Array, scale: jax.Array, *, format: Format, margin: int, power_of_two: bool
) -> GroupedQuantized:
    """Quantizes y [T, C] with a scale for each group; one of 0 is replaced by the one that the group's amax gives.

    Everything is NaN if sizes can't be.
    """
    rows, groups = y.shape[0], group_sizes.shape[0]
    group = group_of_row(group_sizes, rows)
    of_rows = amax(y, -1)
    group_amax = amax(jnp.where(group == jnp.arange(groups)[:, None], of_rows, 0), -1)
    used = _used(group_amax, scale, format, margin=margin, power_of_two=power_of_two)
    used = jnp.where(are_valid(group_sizes, rows), used, jnp.nan)
    scale_of_row = jnp.append(used, jnp.float32(1))[group][:, None]
    data = jnp.where((group < groups)[:, None], cast(y, scale_of_row, format), jnp.zeros((), format.dtype))
    return GroupedQuantized(data, used, reciprocal(used), group_amax)


def quantize_leading(
    y: jax.Array, scale: jax.Array, *, format: Format, margin: int, power_of_two: bool
) -> GroupedQuantized:
    """The same of y [G, R, C], whose groups are all R rows."""
    group_amax = amax(y, (1, 2))
    used = _used(group_amax, scale, format, margin=margin, power_of_two=power_of_two)
    return GroupedQuantized(cast(y, used[:, None, None], format), used, reciprocal(used), group_amax)


def _used(group_amax, scale, format, *, margin, power_of_two):
    seeded = scale_from_amax(group_amax, format.max, margin=margin, power_of_two=power_of_two)
    return jnp.where(scale == 0, seeded, scale)


def transposed(data: jax.Array) -> jax.Array:
    """[T, C] -> [C, T rounded up to 16], padded with 0."""
    return jnp.pad(data.T, ((0, 0), (0, padded_rows(data.shape[0]) - data.shape[0])))


def rows_product(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, rhs_contract_first: bool) -> jax.Array:
    """f32 [T, N]: lhs [T, K] times the rhs [G, N, K] (or [G, K, N]) of each row's group; 0 for rows without one."""
    contracted = 1 if rhs_contract_first else 2
    lhs = _only_groups(lhs, group_sizes)
    return _ragged_dot(lhs, rhs, group_sizes, (((1,), (contracted,)), ((), ())), rhs_group_dimensions=[0])


def contracted_product(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """f32 [G, M, N]: the product of the rows of each group of lhs [T, M] and rhs [T, N]."""
    lhs, rhs = _only_groups(lhs, group_sizes), _only_groups(rhs, group_sizes)
    return _ragged_dot(lhs, rhs, group_sizes, (((0,), (0,)), ((), ())), rhs_group_dimensions=[])


def _only_groups(x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """x [T, C] with zeros in the rows that belong to no group, where anything may be (NaN too)."""
    belongs = group_of_row(group_sizes, x.shape[0]) < group_sizes.shape[0]
    return jnp.where(belongs[:, None], x, jnp.zeros((), x.dtype))


def _ragged_dot(lhs, rhs, group_sizes, dims, *, rhs_group_dimensions):
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=dims, lhs_ragged_dimensions=[0], rhs_group_dimensions=rhs_group_dimensions
    )
    # FP8 values are exact in bf16 and their products exact in fp32, so only the order of the sum is left open.
    lhs, rhs = (x.astype(jnp.bfloat16) if is_fp8(x.dtype) else x for x in (lhs, rhs))
    return jax.lax.ragged_dot_general(
        lhs,
        rhs,
        group_sizes,
        numbers,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def by_row(values: jax.Array, group_sizes: jax.Array, rows: int) -> jax.Array:
    """[rows, ...]: the entry of ``values`` [G, ...] that belongs to each row's group; 0 for rows without one."""
    none = jnp.zeros((1, *values.shape[1:]), values.dtype)
    return jnp.concatenate([values, none])[group_of_row(group_sizes, rows)]


def to_whole_blocks(x: jax.Array, group_sizes: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """(x [T', C], sizes i32[G]): every group padded with zeros to whole blocks of rows; T' is enough for any sizes."""
    rows, groups = x.shape[0], group_sizes.shape[0]
    padded_sizes = -(-group_sizes // block) * block
    total = (rows + groups * (block - 1)) // block * block
    group = group_of_row(padded_sizes, total)
    moved = jnp.append(jnp.cumsum(group_sizes) - group_sizes - jnp.cumsum(padded_sizes) + padded_sizes, 0)
    source = jnp.arange(total, dtype=jnp.int32) + moved[group]
    ends = jnp.append(jnp.cumsum(group_sizes), 0)  # of no group: nothing
    belongs = source < ends[group]
    padded = jnp.where(belongs[:, None], x[jnp.where(belongs, source, 0)], jnp.zeros((), x.dtype))
    return padded, padded_sizes
