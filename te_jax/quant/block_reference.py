"""Block scaling in plain jnp: the definition of what a block-scaled kernel computes, and what runs without one.

x and dy have one scale per 1x128 block along the contracted dimension, the kernel one per 128x128 block. The last
block of a dimension that is not a multiple of 128 is shorter.

Scales are [.., M, blocks of K] here, next to their data. The primitives, and QTensor, hold them as a GEMM reads them
(`gemm_layout`): cuBLASLt and the tile of a kernel want the scales of one step of K side by side.

  block    | next to data [*kept, *contracted]   | as a GEMM reads them
  1x128    | [*kept, *contracted in blocks]      | [*contracted in blocks, *kept]
  128x128  | [ceil(M/128), ceil(K/128)]          | the same

Several dimensions are contracted where a transposed copy [C, *lead] is: blocks run along the last of them, which is
padded to whole blocks (`transposed`), so that none crosses from one sequence into the next.

A transposed copy is quantized from the transposed tensor: its 1x128 blocks run along lead, so it has its own data and
scales, whereas the scales of 128x128 blocks are just transposed. That is TransformerEngine's "columnwise" data.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from te_jax import compat, errors
from te_jax.quant.division import divide
from te_jax.quant.format import E4M3, Format, format_of
from te_jax.quant.reference import amax, cast, scale_from_amax

BLOCK = 128
BLOCK_1X128 = (1, BLOCK)
BLOCK_128X128 = (BLOCK, BLOCK)
BLOCKS = {"block_1x128": BLOCK_1X128, "block_128x128": BLOCK_128X128}
SCALINGS = ("tensor", *BLOCKS)
"""How a quantized tensor is scaled, as specs and QTensor spell it."""


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
    scale = scale_from_amax(amax(blocks, axes), fmt.max, power_of_two=power_of_two)
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
    varying = frozenset().union(*map(compat.varying_axes, (lhs, rhs, lhs_scale_inv, rhs_scale_inv)))
    out = compat.pvary(jnp.zeros((*lhs.shape[:-1], rhs.shape[0]), jnp.float32), varying)

    def add_block(out: jax.Array, k: jax.Array) -> tuple[jax.Array, None]:
        part = jnp.einsum("...k,nk->...n", a[..., k, :], b[:, k], precision=jax.lax.Precision.HIGHEST)
        # One scale after the other: the product of two small ones would be subnormal, which is flushed to 0.
        return out + part * a_scale[..., k, None] * b_scale[:, k], None

    out, _ = jax.lax.scan(add_block, out, jnp.arange(blocks))
    return out.astype(out_dtype)


def gemm_layout(scale_inv: jax.Array, block: tuple[int, int], contract_dims: int = 1) -> jax.Array:
    """The scales of data [*kept, *contracted] as a GEMM reads them: those of 1x128 blocks contracted ones first."""
    if block == BLOCK_128X128:
        return scale_inv
    kept = scale_inv.ndim - contract_dims
    return jnp.transpose(scale_inv, (*range(kept, scale_inv.ndim), *range(kept)))


def from_gemm_layout(scale_inv: jax.Array, block: tuple[int, int], contract_dims: int = 1) -> jax.Array:
    """The inverse of `gemm_layout`."""
    return gemm_layout(scale_inv, block, scale_inv.ndim - contract_dims)


def gemm_scale_shape(shape: tuple[int, ...], block: tuple[int, int], contract_dims: int = 1) -> tuple[int, ...]:
    """The shape in `gemm_layout` of the scales of data of `shape` [*kept, *contracted]."""
    natural = scale_shape(shape, block)
    kept = len(shape) - contract_dims
    return natural if block == BLOCK_128X128 else natural[kept:] + natural[:kept]


def transposed_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The shape of the transposed copy of a tensor [*lead, C]: [C, *lead], 1x128 blocks padded to whole ones."""
    *lead, cols = shape
    if block == BLOCK_1X128:
        lead[-1] += -lead[-1] % BLOCK
    return (cols, *lead)


def transposed(x: jax.Array, block: tuple[int, int]) -> jax.Array:
    """x [*lead, C] in `transposed_shape`, padded with 0."""
    x = jnp.moveaxis(x, -1, 0)
    return _pad(x, -1) if block == BLOCK_1X128 else x


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
        return x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
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
