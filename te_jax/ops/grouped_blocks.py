"""A GroupedLinear in block scaling, in jnp: there are no kernels of ours for it.

x and dy are quantized in 1x128 blocks as for a Linear: along features where these are contracted, along the tokens of
each group (padded to whole blocks, so that none holds tokens of two groups) where tokens are; each kernel in 128x128
blocks. The products are those of the dequantized values, accumulated in fp32.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from te_jax.errors import check_value
from te_jax.ops import main_grad
from te_jax.ops.base import BackwardContext, ForwardContext, QuantizedKernel
from te_jax.ops.recording import record_groups
from te_jax.parallel import mesh
from te_jax.quant import grouped_reference as grouped
from te_jax.quant.block_reference import BLOCK, BLOCK_1X128, BLOCK_128X128, dequantize_block, quantize_block
from te_jax.recipe import Recipe


def quantize_kernel(ctx: ForwardContext) -> QuantizedKernel:
    """``data`` [G, K, N] and ``scale_inv`` of its blocks."""
    recipe = ctx.info.quantizing_recipe
    data, scale_inv = _quantize(ctx.params["kernel"], BLOCK_128X128, recipe, "kernel")
    _record(ctx, "kernel", ctx.params["kernel"], data, scale_inv, None)
    return {"data": data, "scale_inv": scale_inv}


def _quantize(x: Array, block: tuple[int, int], recipe: Recipe, role: str) -> tuple[Array, Array]:
    return quantize_block(x, block, format=recipe.format(role), power_of_two=recipe.power_of_two)


def _record(
    ctx: ForwardContext | BackwardContext, role: str, x: Array, data: Array, scale_inv: Array, sizes: Array | None
) -> None:
    record_groups(ctx.info, role, x, data, scale=None, scale_inv=scale_inv, group_sizes=sizes)


def _along_tokens(x: Array, sizes: Array, recipe: Recipe, role: str) -> tuple[Array, Array]:
    """x [T, C] transposed, every group padded to whole blocks, with the scales of its 1x128 blocks."""
    padded, _ = grouped.to_whole_blocks(x, sizes, BLOCK)
    return _quantize(padded.T, BLOCK_1X128, recipe, role)


def forward(ctx: ForwardContext, x: Array) -> Array:
    """y [T, N]."""
    explicit = mesh.regime(x, ctx.params["kernel"]).explicit
    expected = f"a recipe with one scale for each group on a mesh whose axes {explicit} are Explicit"
    check_value(not explicit, ctx.info.label, "recipe", expected, type(ctx.info.recipe).__name__)
    (sizes,), recipe, bias = ctx.extra_inputs, ctx.info.quantizing_recipe, ctx.params.get("bias")
    kernel_q = ctx.quantized_kernel
    if kernel_q is None:
        made = quantize_kernel(ctx)
        kernel_q = {
            "data": ctx.named(made["data"], "kernel"),
            "scale_inv": ctx.named(made["scale_inv"], "kernel_scale"),
        }
    x_q = _quantize(x, BLOCK_1X128, recipe, "x")
    _record(ctx, "x", x, *x_q, sizes)
    wide = dequantize_block(*x_q, BLOCK_1X128)
    kernel = dequantize_block(kernel_q["data"], kernel_q["scale_inv"], BLOCK_128X128)
    y = _poisoned(grouped.rows_product(wide, kernel, sizes, rhs_contract_first=True), sizes, x.shape[0])
    if bias is not None:
        y = y + grouped.by_row(bias.astype(jnp.float32), sizes, x.shape[0])
    x_t = _along_tokens(x, sizes, recipe, "x") if ctx.train else (None, None)
    x_t = ctx.named(x_t[0], "input"), ctx.named(x_t[1], "input_scale")
    ctx.saved = (sizes, *x_t, kernel_q["data"], kernel_q["scale_inv"])
    return y.astype(x.dtype)


def backward(ctx: BackwardContext, dy: Array) -> Array:
    """dx [T, K]; dw [G, K, N] goes to ``ctx.param_grads``."""
    recipe = ctx.info.quantizing_recipe
    sizes, x_t, x_scale_inv, kernel_data, kernel_scale_inv = ctx.saved
    dy_q = _quantize(dy, BLOCK_1X128, recipe, "dy")
    _record(ctx, "dy", dy, *dy_q, sizes)
    wide = dequantize_block(*dy_q, BLOCK_1X128)
    kernel_wide = dequantize_block(kernel_data, kernel_scale_inv, BLOCK_128X128)
    dx = grouped.rows_product(wide, kernel_wide, sizes, rhs_contract_first=False)

    x_wide = dequantize_block(x_t, x_scale_inv, BLOCK_1X128)
    dy_wide = dequantize_block(*_along_tokens(dy, sizes, recipe, "dy"), BLOCK_1X128)
    padded_sizes = -(-sizes // BLOCK) * BLOCK
    dw = _poisoned(grouped.contracted_product(x_wide.T, dy_wide.T, padded_sizes), sizes, dy.shape[0])
    main_grad.book(ctx, dw)
    return _poisoned(dx, sizes, dy.shape[0]).astype(dy.dtype)


def _poisoned(out: Array, sizes: Array, rows: int) -> Array:
    """NaN where sizes can't be."""
    return jnp.where(grouped.are_valid(sizes, rows), out, jnp.nan)


__all__ = ["backward", "forward", "quantize_kernel"]
