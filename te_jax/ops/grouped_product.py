"""The products of a GroupedLinear in high precision: bilinear, and differentiable as often as one likes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from te_jax import primitives
from te_jax.ops.linear import gemm_dtype
from te_jax.primitives.spec import GroupedGemmSpec, GroupedWgradSpec


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _rows(lhs: Array, rhs: Array, bias: Array | None, group_sizes: Array, rhs_contract_first: bool) -> Array:
    spec = GroupedGemmSpec(
        fp8=False,
        out_dtype=gemm_dtype(lhs.dtype),
        rhs_contract_first=rhs_contract_first,
        bias=bias is not None,
    )
    bias = None if bias is None else bias.astype(gemm_dtype(bias.dtype))
    return primitives.grouped_gemm(lhs, rhs, group_sizes, spec, bias=bias).astype(lhs.dtype)


def _rows_fwd(lhs, rhs, bias, group_sizes, rhs_contract_first):
    return _rows(lhs, rhs, bias, group_sizes, rhs_contract_first), (lhs, rhs, bias, group_sizes)


def _rows_bwd(rhs_contract_first, saved, dout):
    lhs, rhs, bias, sizes = saved
    dlhs = _rows(dout, rhs, None, sizes, not rhs_contract_first)
    drhs = _contracted(lhs, dout, sizes, rhs.dtype) if rhs_contract_first else _contracted(dout, lhs, sizes, rhs.dtype)
    return dlhs, drhs, None if bias is None else sum_over_groups(dout, sizes).astype(bias.dtype), None


_rows.defvjp(_rows_fwd, _rows_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _contracted(lhs: Array, rhs: Array, group_sizes: Array, dtype: Any) -> Array:
    spec = GroupedWgradSpec(groups=group_sizes.shape[0], fp8=False, out_dtype=gemm_dtype(dtype))
    return primitives.grouped_wgrad(lhs, rhs, group_sizes, spec).astype(dtype)


def _contracted_fwd(lhs, rhs, group_sizes, dtype):
    return _contracted(lhs, rhs, group_sizes, dtype), (lhs, rhs, group_sizes)


def _contracted_bwd(dtype, saved, dout):
    lhs, rhs, sizes = saved
    dout = dout.astype(lhs.dtype)
    return _rows(rhs, dout, None, sizes, False), _rows(lhs, dout, None, sizes, True), None


_contracted.defvjp(_contracted_fwd, _contracted_bwd)


def rows_product(
    lhs: Array, rhs: Array, group_sizes: Array, *, rhs_contract_first: bool, bias: Array | None = None
) -> Array:
    """[T, N] in lhs's dtype: lhs [T, K] times the rhs [G, N, K] (or [G, K, N]) of each row's group, + bias [G, N].

    0 in rows that belong to no group.
    """
    return _rows(lhs, rhs, bias, group_sizes, rhs_contract_first)


def contracted_product(lhs: Array, rhs: Array, group_sizes: Array, dtype: Any) -> Array:
    """[G, M, N] in ``dtype``: the product of the rows of each group of lhs [T, M] and rhs [T, N]."""
    return _contracted(lhs, rhs, group_sizes, jnp.dtype(dtype))


def sum_over_groups(x: Array, group_sizes: Array) -> Array:
    """f32 [G, N]: the sum of the rows of each group of x [T, N].

    A product with ones: deterministic, and a scatter-add of T rows is not.
    """
    ones = jnp.ones((x.shape[0], primitives.support.ALIGNMENT), x.dtype)
    return _contracted(ones, x, group_sizes, jnp.dtype(jnp.float32))[:, 0]
