"""What block scaling means for ``gemm``: its operands' scales, their sharding, and what cuBLASLt takes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from te_jax import errors
from te_jax.parallel.sharding import Factors, in_blocks, splits_in_blocks
from te_jax.primitives.spec import GemmSpec
from te_jax.quant.block_reference import (
    BLOCK,
    BLOCK_1X128,
    BLOCK_128X128,
    BLOCKS,
    from_gemm_layout,
    gemm_block,
    gemm_scale_shape,
)
from te_jax.quant.format import is_fp8


def _scalings(spec: GemmSpec) -> dict[str, str]:
    return {"lhs": spec.lhs_scaling, "rhs": spec.rhs_scaling}


def check(spec: GemmSpec, lhs, rhs, rest: Mapping[str, object]) -> None:
    """Raises ValueError or TypeError for block-scaled operands that no platform takes."""
    for side, scaling in _scalings(spec).items():
        expected = " or ".join(BLOCKS) + " beside a block-scaled operand"
        errors.check_value(scaling in BLOCKS, "gemm", f"{side}_scaling", expected, scaling)
    both = {spec.lhs_scaling, spec.rhs_scaling} == {"block_128x128"}
    errors.check_value(not both, "gemm", "rhs_scaling", "block_1x128 beside block_128x128", spec.rhs_scaling)
    errors.check_value(spec.fp8, "gemm", "fp8", "True for block-scaled operands", spec.fp8)
    precise = not spec.fast_accumulation
    errors.check_value(precise, "gemm", "fast_accumulation", "False for block-scaled operands", not precise)
    high = not is_fp8(jnp.dtype(spec.out_dtype))
    errors.check_value(high, "gemm", "out_dtype", "high precision for block-scaled operands", spec.out_dtype)
    for side, aval in (("lhs", lhs), ("rhs", rhs)):
        _check_side(spec, side, aval, rest[f"{side}_scale_inv"])


def _check_side(spec: GemmSpec, side: str, aval, scale_inv) -> None:
    block, count = BLOCKS[_scalings(spec)[side]], spec.contract_dims
    if block == BLOCK_128X128:
        errors.check_value(len(aval.shape) == 2, "gemm", side, "2 dimensions in 128x128 blocks", f"shape {aval.shape}")
    whole = count == 1 or aval.shape[-1] % BLOCK == 0
    expected = f"a last dimension that is a multiple of {BLOCK}, as {count} are contracted"
    errors.check_value(whole, "gemm", side, expected, f"shape {aval.shape}")
    name, shape = f"{side}_scale_inv", gemm_scale_shape(aval.shape, block, count)
    errors.check_type(scale_inv.dtype == jnp.float32, "gemm", name, "dtype float32", scale_inv.dtype)
    errors.check_value(scale_inv.shape == shape, "gemm", name, f"shape {shape}", scale_inv.shape)


def product(spec: GemmSpec, lhs: jax.Array, rhs: jax.Array, rest: Mapping[str, jax.Array]) -> jax.Array:
    """f32 [*L, *R] = lhs [*L, *C] . rhs [*R, *C] with the scales of their blocks, in jnp."""
    flat = {}
    for side, x in (("lhs", lhs), ("rhs", rhs)):
        block, kept = BLOCKS[_scalings(spec)[side]], x.shape[: x.ndim - spec.contract_dims]
        scale_inv = from_gemm_layout(rest[f"{side}_scale_inv"], block, spec.contract_dims)
        rows = math.prod(kept)
        if block == BLOCK_1X128:
            scale_inv = scale_inv.reshape(rows, -1)
        flat[side] = (x.reshape(rows, -1), scale_inv, block)
    out = gemm_block(*flat["lhs"], *flat["rhs"], out_dtype=jnp.float32)
    return out.reshape(*(n for x in (lhs, rhs) for n in x.shape[: x.ndim - spec.contract_dims]))


def scale_factors(spec: GemmSpec, kept_l: Factors, kept_r: Factors, contracted: Factors) -> dict[str, Factors]:
    """Factors of the two scale operands."""
    blocks = (*contracted[:-1], in_blocks(contracted[-1]))
    known = {}
    for side, kept in (("lhs", kept_l), ("rhs", kept_r)):
        rows_too = _scalings(spec)[side] == "block_128x128"
        known[f"{side}_scale_inv"] = (*map(in_blocks, kept), *blocks) if rows_too else (*blocks, *kept)
    return known


def replicated(spec: GemmSpec, lhs, rhs, kept_l: Factors, kept_r: Factors, contracted: Factors) -> Factors:
    """The factors that can't be split, because they aren't several whole blocks."""
    fixed = () if splits_in_blocks(lhs.shape[-1]) else contracted[-1:]
    for side, aval, kept in (("lhs", lhs, kept_l), ("rhs", rhs, kept_r)):
        if _scalings(spec)[side] == "block_128x128" and not splits_in_blocks(aval.shape[0]):
            fixed += kept
    return fixed


def why_not(spec: GemmSpec, m: int) -> str | None:
    """Why cuBLASLt doesn't take m, the size that isn't a multiple of 16 already."""
    if spec.lhs_scaling == "block_1x128" and m % 8:
        return f"lhs's kept size {m} is not a multiple of 8, as 1x128 blocks want it"
    return None
