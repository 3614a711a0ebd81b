"""A linear and the collective beside it as one product: what the steps of te_jax/fusion/rules/collective.py run.

With a tensor-parallel axis of t devices, x [*lead, K] and y [*lead, N] with one dimension of lead split over it where
that is said. Shapes are those of a device's parts, as Manual mode has them; Auto and Explicit axes have whole arrays:

                       forward                                         backward
  column-parallel      gather_forward: y [N/t] = gathered x . w        gather_backward: dx, split, = sum of dy . w^T
                       w [K, N/t], x split
  row-parallel         scatter_forward: y, split, = sum of x . w       scatter_backward: dx [K/t] = gathered dy . w^T
                       w [K/t, N], x [K/t]
  row-parallel         reduce_forward: y, whole, = sum of x . w        that of a linear

What a linear saves is the same as where no collective is fused with it, so that forward and backward steps are chosen
independently. FP8 operands are quantized before they are gathered, with the scale that the whole has; wgrad reads the
transpose of what was gathered, which holds the same numbers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from te_jax import compat, primitives
from te_jax.collective.run import Along, run
from te_jax.collective.whole import run_whole
from te_jax.errors import required
from te_jax.ops import linear
from te_jax.ops.base import BackwardContext, ForwardContext
from te_jax.ops.gathering import Part
from te_jax.ops.recording import record
from te_jax.parallel import explicit, mesh
from te_jax.primitives.spec import QuantizeSpec
from te_jax.quant.tensor import QTensor


def gather_forward(
    ctx: ForwardContext, x: Array | QTensor, along: Along, bias: Array | None = None, *, keep: bool = True
) -> Array:
    """y [*lead, N/t] of x [*lead, K], its dimension gathered. ``keep``: gathered x is kept for wgrad, not x."""
    keep_gathered = keep and ctx.train
    fields = {"kind": "all_gather_matmul", "keep_gathered": keep_gathered}
    if not ctx.info.quantized:
        assert not isinstance(x, QTensor)
        x = x if keep_gathered else ctx.named(x, "input")
        kernel = ctx.params["kernel"].astype(x.dtype)
        fields |= {"fp8": False, "rhs_contract_first": True}
        out = _run(along, x, kernel, out_dtype=_name(x), fields=fields, **_bias(bias, x.dtype))
        if keep_gathered:
            ctx.saved = ctx.named(required(out.gathered, ctx.info.label, "gathered"), "input")
        else:
            ctx.saved = Part(x, along.axis_name, along.dimension, transposed=False)
        return linear.constrained(ctx.info, _as_kernel(ctx, out.out))
    dtype = ctx.info.x_type.dtype
    x_q = x if isinstance(x, QTensor) else _quantize_part(ctx, "x", x, along)[0]
    x_q = dataclasses.replace(x_q, scale_inv=ctx.named(x_q.scale_inv, "input_scale"))
    x_q = x_q if keep_gathered else dataclasses.replace(x_q, data=ctx.named(x_q.data, "input"))
    kernel_q = linear.quantized_kernel(ctx)
    fields |= {"fast_accumulation": ctx.info.quantizing_recipe.fast_accumulation("fprop")}
    data = required(x_q.data, ctx.info.label, "x.data")
    out = _run(
        along,
        data,
        required(kernel_q.data_t, ctx.info.label, "kernel.data_t"),
        out_dtype=linear.gemm_dtype(dtype),
        fields=fields,
        lhs_scale_inv=x_q.scale_inv,
        rhs_scale_inv=kernel_q.data_t_scale_inv,
        **_bias(bias, jnp.bfloat16),
    )
    if keep_gathered:
        x_t = ctx.named(jnp.moveaxis(required(out.gathered, ctx.info.label, "gathered"), -1, 0), "input")
    else:
        x_t = Part(data, along.axis_name, along.dimension, transposed=True)
    ctx.saved = (x_t, x_q.scale_inv, kernel_q.data, kernel_q.scale_inv)
    return linear.constrained(ctx.info, _as_kernel(ctx, out.out.astype(dtype)))


def gather_backward(ctx: BackwardContext, dy: Array | QTensor, along: Along) -> Array:
    """dx [*lead, K], its dimension split, of dy [*lead, N/t]; dw goes to ``ctx.param_grads``."""
    fields = {"kind": "matmul_reduce_scatter"}
    if not ctx.info.quantized:
        assert not isinstance(dy, QTensor)
        kernel = ctx.params["kernel"].astype(dy.dtype)
        out = _run(along, dy, kernel, out_dtype=_name(dy), fields=fields | {"fp8": False})
        linear.high_precision_wgrad(ctx, dy)
        return out.out
    dtype = ctx.info.x_type.dtype
    dy_q = dy if isinstance(dy, QTensor) else linear.quantize_operand(ctx, "dy", dy)[0]
    out = _dgrad(ctx, dy_q, along, fields)
    linear.wgrad(ctx, required(dy_q.data_t, ctx.info.label, "dy.data_t"), dy_q.data_t_scale_inv)
    return out.out.astype(dtype)


def scatter_forward(ctx: ForwardContext, x: Array | QTensor, along: Along, bias: Array | None = None) -> Array:
    """y [*lead, N], its dimension split, of x [*lead, K/t]; the bias is added once."""
    fields = {"kind": "matmul_reduce_scatter"}
    if not ctx.info.quantized:
        assert not isinstance(x, QTensor)
        kernel = ctx.params["kernel"].astype(x.dtype)
        ctx.saved = x
        fields |= {"fp8": False, "rhs_contract_first": True}
        y = _run(along, x, kernel, out_dtype=_name(x), fields=fields, **_bias(bias, x.dtype)).out
        return _as_kernel(ctx, y)
    dtype = ctx.info.x_type.dtype
    x_q = x if isinstance(x, QTensor) else linear.quantize_operand(ctx, "x", x, train=ctx.train)[0]
    x_q = linear.named(ctx, x_q, "input", data="data_t")
    kernel_q = linear.quantized_kernel(ctx)
    out = _run(
        along,
        required(x_q.data, ctx.info.label, "x.data"),
        required(kernel_q.data_t, ctx.info.label, "kernel.data_t"),
        out_dtype=linear.gemm_dtype(dtype),
        fields=fields | {"fast_accumulation": ctx.info.quantizing_recipe.fast_accumulation("fprop")},
        lhs_scale_inv=x_q.scale_inv,
        rhs_scale_inv=kernel_q.data_t_scale_inv,
        **_bias(bias, jnp.bfloat16),
    )
    ctx.saved = (x_q.data_t, x_q.data_t_scale_inv, kernel_q.data, kernel_q.scale_inv)
    return _as_kernel(ctx, out.out.astype(dtype))


def reduce_forward(ctx: ForwardContext, x: Array | QTensor, along: Along, bias: Array | None = None) -> Array:
    """y [*lead, N] of x [*lead, K/t], the same on all devices: ``scatter_forward`` over all tokens, then gathered."""
    if along.whole:
        return scatter_forward(ctx, x, dataclasses.replace(along, reduces=True), bias)
    *lead, features = ctx.info.y_type.shape
    tokens = dataclasses.replace(along, dimension=0)
    y = scatter_forward(ctx, _flat(x), tokens, bias)
    ctx.saved = _unflat_saved(ctx.saved, tuple(lead))
    y = compat.pvary(y, (along.axis_name,)) if compat.checks_varying_axes() else y
    to = "invarying" if compat.checks_varying_axes() else "varying"
    return lax.all_gather(y, along.axis_name, axis=0, tiled=True, to=to).reshape(*lead, features)


def scatter_backward(
    ctx: BackwardContext, dy: Array | QTensor, along: Along, bias_ctx: BackwardContext | None = None
) -> Array:
    """dx [*lead, K/t] of dy [*lead, N], its dimension gathered, which wgrad reads too."""
    fields = {"kind": "all_gather_matmul", "keep_gathered": True}
    bias = None if bias_ctx is None else bias_ctx.params["bias"]
    if not ctx.info.quantized:
        assert not isinstance(dy, QTensor)
        assert bias is None
        kernel = ctx.params["kernel"].astype(dy.dtype)
        out = _run(along, dy, kernel, out_dtype=_name(dy), fields=fields | {"fp8": False})
        linear.high_precision_wgrad(ctx, required(out.gathered, ctx.info.label, "gathered"))
        return explicit.retyped(out.out, explicit.spec_entries(ctx.saved)[-1])
    dtype = ctx.info.x_type.dtype
    if isinstance(dy, QTensor):
        dy_q = dy
    else:
        dy_q, dbias = _quantize_part(ctx, "dy", dy, along, bias)
        if bias_ctx is not None:
            bias_ctx.param_grads["bias"] = required(dbias, ctx.info.label, "dbias")
    out = _dgrad(ctx, dy_q, along, fields)
    linear.wgrad(ctx, jnp.moveaxis(required(out.gathered, ctx.info.label, "gathered"), -1, 0), dy_q.scale_inv)
    return explicit.retyped(out.out.astype(dtype), explicit.spec_entries(ctx.saved[0])[0])


def fp8_result(
    ctx: ForwardContext, x: Array, along: Along, bias: Array | None, out_dtype: Any, out_scale: Array, *, gathers: bool
) -> Array:
    """y times ``out_scale`` in FP8, rounded once, of a quantized linear behind a gather or before a scatter.

    Nothing is saved, and a bias is added in bfloat16, as the GEMM's epilogue takes it.
    """
    x_q = _quantize_part(ctx, "x", x, along)[0]
    kernel_q = linear.quantized_kernel(ctx)
    fast = ctx.info.quantizing_recipe.fast_accumulation("fprop")
    kind = "all_gather_matmul" if gathers else "matmul_reduce_scatter"
    return _run(
        along,
        required(x_q.data, ctx.info.label, "x.data"),
        required(kernel_q.data_t, ctx.info.label, "kernel.data_t"),
        out_dtype=jnp.dtype(out_dtype).name,
        fields={"kind": kind, "fast_accumulation": fast},
        lhs_scale_inv=x_q.scale_inv,
        rhs_scale_inv=kernel_q.data_t_scale_inv,
        out_scale=out_scale,
        **_bias(bias, jnp.bfloat16),
    ).out


def _dgrad(ctx: BackwardContext, dy_q: QTensor, along: Along, fields: dict[str, Any]) -> primitives.CollectiveGemmOut:
    _, _, kernel_data, kernel_scale_inv = ctx.saved
    return _run(
        along,
        required(dy_q.data, ctx.info.label, "dy.data"),
        kernel_data,
        out_dtype=linear.gemm_dtype(ctx.info.x_type.dtype),
        fields=fields | {"fast_accumulation": ctx.info.quantizing_recipe.fast_accumulation("dgrad")},
        lhs_scale_inv=dy_q.scale_inv,
        rhs_scale_inv=kernel_scale_inv,
    )


def _quantize_part(
    ctx: ForwardContext | BackwardContext, role: str, x: Array, along: Along, bias: Array | None = None
) -> tuple[QTensor, Array | None]:
    """This device's part of an operand in FP8, not transposed; given a ``bias``, also the part's sum over tokens."""
    fields = linear.quantizing(ctx.info, role) | {"data_t": False} | linear.dbias_of(bias)
    scale = linear.scale_of(ctx, role)
    axes = mesh.amax_axes(x, scale, ctx.info.recipe)
    if not along.whole:
        axes = axes if along.axis_name in axes else (*axes, along.axis_name)
        x = compat.pvary(x, (along.axis_name,)) if compat.checks_varying_axes() else x
    out = primitives.quantize(x, scale, QuantizeSpec(**fields), amax_axes=axes)
    record(ctx.info, role, x, out)
    return linear.as_qtensor(ctx, role, out, x.dtype), out.dbias


def _run(along: Along, *operands: Array, **options: Any) -> primitives.CollectiveGemmOut:
    return (run_whole if along.whole else run)(along, *operands, **options)


def _as_kernel(ctx: ForwardContext, y: Array) -> Array:
    """y with the type that an Explicit kernel gives its features where nothing is fused."""
    return explicit.retyped(y, explicit.spec_entries(ctx.params["kernel"])[-1])


def _name(x: Array) -> str:
    return jnp.dtype(x.dtype).name


def _bias(bias: Array | None, dtype: Any) -> dict[str, Array]:
    """The operand, if there is one, in the dtype of the GEMM's epilogue."""
    return {} if bias is None else {"bias": bias.astype(dtype)}


def _flat(x: Array | QTensor) -> Array | QTensor:
    """x [*lead, K] as [tokens, K], and its transpose as [K, tokens]."""
    if not isinstance(x, QTensor):
        return x.reshape(-1, x.shape[-1])
    data, data_t = x.data, x.data_t
    return dataclasses.replace(
        x,
        data=None if data is None else data.reshape(-1, data.shape[-1]),
        data_t=None if data_t is None else data_t.reshape(data_t.shape[0], -1),
    )


def _unflat_saved(saved: Any, lead: tuple[int, ...]) -> Any:
    if not isinstance(saved, tuple):
        return saved.reshape(*lead, saved.shape[-1])
    x_t, *rest = saved
    return (None if x_t is None else x_t.reshape(x_t.shape[0], *lead), *rest)
