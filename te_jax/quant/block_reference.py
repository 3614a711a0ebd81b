"""Block scaling in plain jnp: the definition of what a block-scaled kernel computes, and what runs without one.

x and dy have one scale per 1x128 block along the contracted dimension, the kernel one per 128x128 block. The last
block of a dimension that is not a multiple of 128 is shorter; nothing in memory is padded.

Shapes of scale_inv here, and in the layout that cuBLASLt (>= 12.9) reads, for data [M, K] (`cublas_layout`):

  block    | here                       | cuBLASLt
  1x128    | [M, ceil(K/128)]           | [ceil(K/128), M padded to 4]
  128x128  | [ceil(M/128), ceil(K/128)] | [ceil(M/128), ceil(K/128) padded to 4]

A transposed copy [K, M] is quantized from the transposed tensor: 1x128 blocks of it run along M, so it has its own
scales, whereas the scales of 128x128 blocks are just transposed. That is TransformerEngine's "columnwise" data.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from te_jax import errors
from te_jax.quant.division import divide
from te_jax.quant.format import E4M3, Format, format_of
from te_jax.quant.reference import cast, scale_from_amax

BLOCK = 128
BLOCK_1X128 = (1, BLOCK)
BLOCK_128X128 = (BLOCK, BLOCK)


@functools.partial(jax.jit, static_argnames=("block", "format", "power_of_two"), inline=True)
def quantize_block(
    x: jax.Array, block: tuple[int, int], *, format: Format | str = E4M3, power_of_two: bool = True
) -> tuple[jax.Array, jax.Array]:
    """FP8 data and the inverse scale of each block.

    Args:
      x: [*lead, M, K] float; [K] is allowed for 1x128.
      block: (1, 128) or (128, 128), over the last two dimensions.
      format: FP8 format of the data.
      power_of_two: floor each scale to a power of two, so that scaling is exact.

    Returns:
      data: FP8, in x's shape. Values that are not finite are NaN.
      scale_inv: f32, [*lead, M, ceil(K/128)] or [*lead, ceil(M/128), ceil(K/128)]. 1 where the block's amax is 0 or not
        finite.
    """
    _check_block("quantize_block", x, block)
    fmt = format_of(format)
    blocks = _to_blocks(x, block)  # [*lead, M', rows, K', cols]
    axes = _block_axes(blocks, block)
    scale = scale_from_amax(jnp.abs(blocks).max(axes).astype(jnp.float32), fmt.max, power_of_two=power_of_two)
    data = cast(x, _expand(scale, x.shape, block), fmt)
    return data, divide(1.0, scale)


@functools.partial(jax.jit, static_argnames=("block", "dtype"), inline=True)
def dequantize_block(
    data: jax.Array, scale_inv: jax.Array, block: tuple[int, int], dtype: jax.typing.DTypeLike = jnp.float32
) -> jax.Array:
    """float32(data) * scale_inv of its block, rounded to `dtype`. The inverse of `quantize_block`."""
    _check_block("dequantize_block", data, block)
    _check_scales("dequantize_block", "scale_inv", data, scale_inv, block)
    return (data.astype(jnp.float32) * _expand(scale_inv, data.shape, block)).astype(dtype)


@functools.partial(jax.jit, static_argnames=("lhs_block", "rhs_block", "out_dtype"), inline=True)
def gemm_block(
    lhs: jax.Array,
    lhs_scale_inv: jax.Array,
    lhs_block: tuple[int, int],
    rhs: jax.Array,
    rhs_scale_inv: jax.Array,
    rhs_block: tuple[int, int],
    *,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> jax.Array:
    """out [*lead, N] = lhs [*lead, K] . rhs [N, K], both K-major, block-scaled.

    Every 128 steps of K are contracted in fp32, multiplied by the scales of their two blocks, and added in fp32 in
    the order of K. Two 128x128 operands are refused, as by cuBLASLt.

    Raises:
      ValueError: shapes or blocks that don't fit.
    """
    op = "gemm_block"
    _check_block(op, lhs, lhs_block)
    _check_block(op, rhs, rhs_block)
    errors.check_value(rhs.ndim == 2, op, "rhs", "shape [N, K]", rhs.shape)
    errors.check_value(lhs.shape[-1] == rhs.shape[-1], op, "rhs", f"[N, {lhs.shape[-1]}]", rhs.shape)
    both = lhs_block == BLOCK_128X128 and rhs_block == BLOCK_128X128
    errors.check_value(not both, op, "blocks", "1x128 for at least one operand", "128x128 for both")
    _check_scales(op, "lhs_scale_inv", lhs, lhs_scale_inv, lhs_block)
    _check_scales(op, "rhs_scale_inv", rhs, rhs_scale_inv, rhs_block)

    blocks = -(-lhs.shape[-1] // BLOCK)
    a, b = (_pad(x.astype(jnp.float32), -1).reshape(*x.shape[:-1], blocks, BLOCK) for x in (lhs, rhs))
    a_scale = _expand_rows(lhs_scale_inv, lhs.shape, lhs_block)  # [*lead, K']
    b_scale = _expand_rows(rhs_scale_inv, rhs.shape, rhs_block)  # [N, K']
    out = jnp.zeros((*lhs.shape[:-1], rhs.shape[0]), jnp.float32)

    def add_block(out: jax.Array, k: jax.Array) -> tuple[jax.Array, None]:
        part = jnp.einsum("...k,nk->...n", a[..., k, :], b[:, k], precision=jax.lax.Precision.HIGHEST)
        # One scale after the other: the product of two small ones would be subnormal, which is flushed to 0.
        return out + part * a_scale[..., k, None] * b_scale[:, k], None

    out, _ = jax.lax.scan(add_block, out, jnp.arange(blocks))
    return out.astype(out_dtype)


def cublas_layout(scale_inv: jax.Array, block: tuple[int, int]) -> jax.Array:
    """scale_inv of 2-D data in the shape that cuBLASLt reads (see the top of this file); padding is 0."""
    errors.check_value(scale_inv.ndim == 2, "cublas_layout", "scale_inv", "2 dimensions", scale_inv.shape)
    if block == BLOCK_1X128:
        scale_inv = scale_inv.T
    return jnp.pad(scale_inv, ((0, 0), (0, -scale_inv.shape[1] % 4)))


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The shape of scale_inv for data of `shape`."""
    cols = -(-shape[-1] // BLOCK)
    if block == BLOCK_1X128:
        return (*shape[:-1], cols)
    return (*shape[:-2], -(-shape[-2] // BLOCK), cols)


def _check_block(op: str, x: jax.Array, block: tuple[int, int]) -> None:
    known = block in (BLOCK_1X128, BLOCK_128X128)
    errors.check_value(known, op, "block", f"{BLOCK_1X128} or {BLOCK_128X128}", block)
    rank = 1 if block == BLOCK_1X128 else 2
    errors.check_value(x.ndim >= rank, op, "x", f"at least {rank} dimensions for block {block}", x.shape)


def _check_scales(op: str, name: str, data: jax.Array, scale_inv: jax.Array, block: tuple[int, int]) -> None:
    expected = scale_shape(data.shape, block)
    errors.check_value(scale_inv.shape == expected, op, name, expected, scale_inv.shape)


def _pad(x: jax.Array, axis: int) -> jax.Array:
    """Zeros up to a multiple of 128 along `axis`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % BLOCK)
    return jnp.pad(x, widths)


def _to_blocks(x: jax.Array, block: tuple[int, int]) -> jax.Array:
    """[*lead, M, K', 128] for 1x128, [*lead, M', 128, K', 128] for 128x128, zero-padded."""
    x = _pad(x, -1)
    if block == BLOCK_1X128:
        return x.reshape(*x.shape[:-1], -1, BLOCK)
    x = _pad(x, -2)
    return x.reshape(*x.shape[:-2], x.shape[-2] // BLOCK, BLOCK, x.shape[-1] // BLOCK, BLOCK)


def _block_axes(blocks: jax.Array, block: tuple[int, int]) -> tuple[int, ...]:
    return (blocks.ndim - 1,) if block == BLOCK_1X128 else (blocks.ndim - 3, blocks.ndim - 1)


def _expand_rows(scale: jax.Array, shape: tuple[int, ...], block: tuple[int, int]) -> jax.Array:
    """[*lead, M, K'] from the scales of blocks."""
    if block == BLOCK_1X128:
        return scale
    return jnp.repeat(scale, BLOCK, axis=-2)[..., : shape[-2], :]


def _expand(scale: jax.Array, shape: tuple[int, ...], block: tuple[int, int]) -> jax.Array:
    """One scale per element of data of `shape`."""
    return jnp.repeat(_expand_rows(scale, shape, block), BLOCK, axis=-1)[..., : shape[-1]]
