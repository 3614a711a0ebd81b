"""The three GEMMs of a linear under BlockScaling, through the jnp reference (te_jax.quant.block_reference).

Operands are quantized along the dimension that their GEMM contracts, so x, dy and the kernel are each quantized twice:
1x128 blocks of x along K for fprop and along tokens for wgrad, of dy along N and along tokens; the kernel in 128x128
blocks, whose transpose is the same blocks. Between forward and backward it saves FP8, as the other recipes do.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array

from te_jax.ops.base import BackwardContext, ForwardContext
from te_jax.quant.block_reference import BLOCK_1X128, BLOCK_128X128, gemm_block, quantize_block
from te_jax.recipe import Recipe


def _quantize(recipe: Recipe, x: Array, role: str, block: tuple[int, int]) -> tuple[Array, Array]:
    return quantize_block(x, block, format=recipe.format(role), power_of_two=recipe.power_of_two)


def _by_tokens(x: Array) -> Array:
    """[*lead, C] -> [C, tokens]: the blocks of wgrad's operands run along all tokens."""
    return x.reshape(-1, x.shape[-1]).T


def block_forward(ctx: ForwardContext, x: Array) -> Array:
    """y [*lead, N] = Q(x) Q(w), accumulated in fp32."""
    quantize = functools.partial(_quantize, ctx.info.quantizing_recipe)
    x_data, x_scale = quantize(x, "x", BLOCK_1X128)
    w_data, w_scale = quantize(ctx.params["kernel"], "kernel", BLOCK_128X128)
    ctx.saved = (quantize(_by_tokens(x), "x", BLOCK_1X128) if ctx.train else None, w_data, w_scale)
    return gemm_block(x_data, x_scale, BLOCK_1X128, w_data.T, w_scale.T, BLOCK_128X128, out_dtype=x.dtype)


def block_backward(ctx: BackwardContext, dy: Array) -> Array:
    """dx [*lead, K] = Q(dy) Q(w)^T; dw [K, N] = Q(x)^T Q(dy) goes to ``ctx.param_grads``."""
    quantize = functools.partial(_quantize, ctx.info.quantizing_recipe)
    (xt_data, xt_scale), w_data, w_scale = ctx.saved
    dy_data, dy_scale = quantize(dy, "dy", BLOCK_1X128)
    dyt_data, dyt_scale = quantize(_by_tokens(dy), "dy", BLOCK_1X128)
    dtype = ctx.params["kernel"].dtype
    dw = gemm_block(xt_data, xt_scale, BLOCK_1X128, dyt_data, dyt_scale, BLOCK_1X128, out_dtype=jnp.float32)
    ctx.param_grads["kernel"] = dw.astype(dtype)
    return gemm_block(dy_data, dy_scale, BLOCK_1X128, w_data, w_scale, BLOCK_128X128, out_dtype=ctx.info.x_type.dtype)
