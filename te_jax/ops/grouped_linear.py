"""GroupedLinear: a linear whose tokens are in groups (experts), each with a kernel of its own.

x [T, K], group_sizes i32[G], kernel [G, K, N], cotangent dy [T, N]. Group g is the group_sizes[g] rows behind those of
the groups before it; rows behind the last group belong to none, and are 0 in y and in the cotangent of x.

  fprop  y [T, N]      of each group's rows: Q(x) . Q(w[g])
  dgrad dx [T, K]      Q(dy) . Q(w[g])^T
  wgrad dw [G, K, N]   Q(x)^T . Q(dy) over the rows of each group

Every group has scales of its own, of x and dy as well as of its kernel: experts see different tokens, and one of them
with outliers costs the others no range. With experts on different devices a scale belongs to one device then, and none
has to be agreed on. No shape depends on the sizes: one program serves them all.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.nn import initializers

from te_jax import compat, primitives
from te_jax.errors import check_type, check_value, required
from te_jax.ops import grouped_blocks, main_grad
from te_jax.ops.base import (
    BackwardContext,
    Channel,
    ForwardContext,
    Initializer,
    LinkInfo,
    Op,
    ParamSpec,
    QuantizedKernel,
    Shared,
    TensorType,
)
from te_jax.ops.grouped_product import contracted_product, rows_product, sum_over_groups
from te_jax.ops.linear import check_kernel, gemm_dtype
from te_jax.ops.recording import record_groups
from te_jax.parallel import mesh
from te_jax.primitives.spec import GroupedGemmSpec, GroupedWgradSpec, QuantizeSpec
from te_jax.recipe import BlockScaling, Recipe

# lecun_normal of each expert: the groups are no part of the fan-in.
default_kernel_init = initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=(0,))


@dataclasses.dataclass(frozen=True)
class GroupedLinear(Op):
    """y [T, features] of each group's rows of x [T, K]: x kernel[g] + bias[g].

    Parameters ``kernel`` [num_groups, K, features] and ``bias`` [num_groups, features]. Takes ``group_sizes`` as an
    extra input: integers [num_groups], which may be traced, not differentiated. Their sum may be below T: the rows
    behind belong to no group, and come out as 0. ``sizes`` is a name: linears of a chain with the same one have the
    same groups, and the call is given their sizes once.

    Raises:
      ValueError: sizes whose values can be seen while tracing and that can't be: a negative one, a sum above T. Values
        that can't be seen are an error when the program runs on CPU; on CUDA the results of quantized operands are NaN.
    """

    num_groups: int
    features: int
    use_bias: bool = True
    sizes: str | None = dataclasses.field(default=None, kw_only=True)
    kernel_init: Initializer = dataclasses.field(default=default_kernel_init, kw_only=True)
    bias_init: Initializer = dataclasses.field(default=initializers.zeros, kw_only=True)

    roles: ClassVar[tuple[str, ...]] = ("x", "kernel", "dy")
    has_main_grad: ClassVar[bool] = True
    num_extra_inputs: ClassVar[int] = 1

    def __post_init__(self) -> None:
        for name in ("num_groups", "features"):
            value = getattr(self, name)
            ok = isinstance(value, int) and not isinstance(value, bool) and value > 0
            check_value(ok, "GroupedLinear", name, "a positive int", repr(value))
        ok = self.sizes is None or (isinstance(self.sizes, str) and self.sizes != "")
        check_type(ok, "GroupedLinear", "sizes", "None or a name", repr(self.sizes))
        for init in (self.kernel_init, self.bias_init):
            check_type(callable(init), "GroupedLinear", "initialiser", "a function of key, shape and dtype", repr(init))

    @property
    def groups(self) -> int:
        return self.num_groups

    def params(self, x: TensorType) -> tuple[ParamSpec, ...]:
        check_value(x.shape[-1] > 0, "GroupedLinear", "x", "at least one feature", f"shape {x.shape}")
        kernel = ParamSpec("kernel", (self.num_groups, x.shape[-1], self.features), self.kernel_init)
        bias = ParamSpec("bias", (self.num_groups, self.features), self.bias_init)
        return (kernel, bias) if self.use_bias else (kernel,)

    def out_type(self, x: TensorType) -> TensorType:
        check_value(len(x.shape) == 2, "GroupedLinear", "x", "2 dimensions, [tokens, features]", f"shape {x.shape}")
        return TensorType((x.shape[0], self.features), x.dtype)

    def saves_input(self, info: LinkInfo) -> bool:
        return not info.quantized

    def why_unquantized(self, x: TensorType, recipe: Recipe | None) -> str | None:
        """Tokens are of any number: what has to be aligned is padded where a transposed copy is written."""
        if recipe is None:
            return "recipe None"
        for name, size in (("input features", x.shape[-1]), ("output features", self.features)):
            if size % primitives.support.ALIGNMENT:
                return f"{name}: {size} is not a multiple of {primitives.support.ALIGNMENT}"
        return "tokens: 0" if x.shape[0] == 0 else None

    def note(self, info: LinkInfo) -> str | None:
        if not (info.quantized and isinstance(info.recipe, BlockScaling)):
            return None
        return "block scaling: groups have no kernels of ours yet, so the jnp reference runs the three GEMMs"

    def extra_input_types(self, x: TensorType) -> tuple[TensorType, ...]:
        return (TensorType((self.num_groups,), jnp.dtype(jnp.int32)),)

    def extra_input_channels(self) -> tuple[Channel | Shared, ...]:
        return (None if self.sizes is None else Shared(self.sizes),)

    def check_extra_inputs(self, x: TensorType, inputs: tuple[Any, ...]) -> None:
        values = _seen(inputs[0])
        if values is None:
            return
        negative = np.flatnonzero(values < 0)
        got = ", ".join(f"group_sizes[{g}] = {values[g]}" for g in negative)
        check_value(not negative.size, "GroupedLinear", "group_sizes", "no negative size", got)
        total = sum(map(int, values))
        expected = f"sizes that add up to {x.shape[0]} (the tokens of x) at most"
        check_value(total <= x.shape[0], "GroupedLinear", "group_sizes", expected, total)

    def quantize_kernel(self, ctx: ForwardContext) -> QuantizedKernel:
        """The kernel as ``forward`` would quantize it."""
        if isinstance(ctx.info.recipe, BlockScaling):
            return grouped_blocks.quantize_kernel(ctx)
        out = _quantize(ctx, "kernel", ctx.params["kernel"], train=ctx.train)
        return {name: value for name, value in out._asdict().items() if value is not None}

    def forward(self, ctx: ForwardContext, x: Array | GroupedTensor) -> Array:
        return forward(ctx, x)

    def backward(self, ctx: BackwardContext, dy: Array | GroupedTensor) -> Array:
        return backward(ctx, dy)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedTensor:
    """An FP8 tensor [T, C] with a scale for each group, as a producer hands it to a GroupedLinear."""

    data: Array | None = None
    data_t: Array | None = None  # [C, T rounded up to 16]
    scale_inv: Array | None = None  # f32[G]


def _seen(sizes: Any) -> np.ndarray | None:
    """The values of sizes that the host has; None for a traced array, or one whose values would have to be fetched."""
    if sizes is None or isinstance(sizes, jax.core.Tracer | jax.ShapeDtypeStruct):
        return None
    if isinstance(sizes, jax.Array):
        on_host = sizes.is_fully_addressable and all(device.platform == "cpu" for device in sizes.devices())
        if not on_host:
            return None
    return np.asarray(sizes)


def quantizing(info: LinkInfo, role: str, *, train: bool = True) -> dict[str, Any]:
    """The fields of a QuantizingSpec by which a producer writes this op's operand of that role."""
    recipe, groups = info.quantizing_recipe, required(info.op.groups, info.label, "groups")
    return {
        "format": recipe.format(role).name,
        "data": train or role != "kernel",
        "data_t": train or role == "kernel",
        "amax": train and recipe.stateful,
        "amax_of_part": True,  # reduced with all others, where the state is written
        "seeded": info.initial_scale(role) is not None,
        "margin": recipe.margin,
        "power_of_two": recipe.power_of_two,
        "scaling": "leading" if role == "kernel" else "group",
        "groups": groups,
    }


def as_grouped(ctx: ForwardContext | BackwardContext, role: str, out: primitives.QuantizeOut) -> GroupedTensor:
    """What a pass wrote for ``role``, with its amax entered in the state's books."""
    if out.amax is not None:
        ctx.used[role] = out.amax
    return GroupedTensor(data=out.data, data_t=out.data_t, scale_inv=out.scale_inv)


def scale_of(ctx: ForwardContext | BackwardContext, role: str) -> Array:
    """f32[G]: the scales to quantize with; 0 (derive it from this tensor) without history.

    Zeros vary over the manual axes that groups differ over, where both kernels and sizes do: no amax is reduced there.
    """
    if role in ctx.scales:
        return ctx.scales[role]
    groups = required(ctx.info.op.groups, ctx.info.label, "groups")
    scale = jnp.full((groups,), ctx.info.initial_scale(role) or 0.0, jnp.float32)
    return compat.pvary(scale, _axes_of_groups(ctx))


def _axes_of_groups(ctx: ForwardContext | BackwardContext) -> frozenset[str]:
    """The manual axes over which devices have different groups, not parts of the same."""
    if isinstance(ctx, ForwardContext) and not ctx.extra_inputs:  # te.quantize_kernels, which sees no sizes
        return frozenset()
    kernels = jax.tree.leaves(ctx.params.get("kernel"))
    axes = (compat.varying_axes(array) for array in kernels)
    return compat.varying_axes(group_sizes_of(ctx)).intersection(*axes) if kernels else frozenset()


def group_sizes_of(ctx: ForwardContext | BackwardContext) -> Array:
    """i32[G]."""
    return ctx.extra_inputs[0] if isinstance(ctx, ForwardContext) else ctx.saved[0]


def _quantize(
    ctx: ForwardContext | BackwardContext, role: str, x: Array, *, train: bool = True
) -> primitives.QuantizeOut:
    scale, sizes = scale_of(ctx, role), None if role == "kernel" else group_sizes_of(ctx)
    out = primitives.quantize(
        x,
        scale,
        QuantizeSpec(**quantizing(ctx.info, role, train=train)),
        group_sizes=sizes,
        amax_axes=mesh.amax_axes(x, scale, ctx.info.recipe),
    )
    record_groups(ctx.info, role, x, out.data, scale=out.scale, scale_inv=out.scale_inv, group_sizes=sizes)
    return out


def forward(ctx: ForwardContext, x: Array | GroupedTensor) -> Array:
    """y [T, N]; x may come quantized from its producer."""
    info, bias = ctx.info, ctx.params.get("bias")
    (sizes,) = ctx.extra_inputs
    dtype = info.x_type.dtype
    if not info.quantized:
        assert not isinstance(x, GroupedTensor)
        ctx.saved = (sizes, x)
        return rows_product(x, ctx.params["kernel"].astype(dtype), sizes, rhs_contract_first=True, bias=bias)
    if isinstance(info.recipe, BlockScaling):
        assert not isinstance(x, GroupedTensor)
        return grouped_blocks.forward(ctx, x)
    recipe = info.quantizing_recipe
    x_q = x if isinstance(x, GroupedTensor) else as_grouped(ctx, "x", _quantize(ctx, "x", x, train=ctx.train))
    quantized = info.op.quantize_kernel(ctx) if ctx.quantized_kernel is None else ctx.quantized_kernel
    check_kernel(ctx, quantized)
    kernel_q = as_grouped(ctx, "kernel", primitives.QuantizeOut(**quantized))
    x_q = dataclasses.replace(
        x_q, data_t=ctx.named(x_q.data_t, "input"), scale_inv=ctx.named(x_q.scale_inv, "input_scale")
    )
    if ctx.quantized_kernel is None:  # one that is given isn't this call's to save again
        data, scale_inv = ctx.named(kernel_q.data, "kernel"), ctx.named(kernel_q.scale_inv, "kernel_scale")
        kernel_q = dataclasses.replace(kernel_q, data=data, scale_inv=scale_inv)
    spec = GroupedGemmSpec(
        out_dtype=gemm_dtype(dtype), bias=bias is not None, fast_accumulation=recipe.fast_accumulation("fprop")
    )
    y = primitives.grouped_gemm(
        required(x_q.data, "GroupedLinear", "x.data"),
        required(kernel_q.data_t, "GroupedLinear", "kernel.data_t"),
        sizes,
        spec,
        lhs_scale_inv=x_q.scale_inv,
        rhs_scale_inv=kernel_q.scale_inv,
        bias=None if bias is None else bias.astype(gemm_dtype(bias.dtype)),
    )
    ctx.saved = (sizes, x_q.data_t, x_q.scale_inv, kernel_q.data, kernel_q.scale_inv)
    return y.astype(dtype)


def backward(ctx: BackwardContext, dy: Array | GroupedTensor) -> Array:
    """dx [T, K]; dw [G, K, N] (and dbias [G, N]) go to ``ctx.param_grads``. dy may come quantized from its producer."""
    info, kernel = ctx.info, ctx.params["kernel"]
    ctx.extra_input_grads = (None,)
    sizes = ctx.saved[0]
    if "bias" in ctx.params:
        assert not isinstance(dy, GroupedTensor)
        ctx.param_grads["bias"] = sum_over_groups(dy, sizes).astype(ctx.params["bias"].dtype)
    dtype = info.x_type.dtype
    if not info.quantized:
        assert not isinstance(dy, GroupedTensor)
        _, x = ctx.saved
        dw_dtype = kernel.dtype if info.main_grad is None else jnp.float32
        main_grad.book(ctx, contracted_product(x, dy, sizes, dw_dtype))
        return rows_product(dy, kernel.astype(dtype), sizes, rhs_contract_first=False)
    if isinstance(info.recipe, BlockScaling):
        assert not isinstance(dy, GroupedTensor)
        return grouped_blocks.backward(ctx, dy)
    recipe = info.quantizing_recipe
    _, x_t, x_scale_inv, kernel_data, kernel_scale_inv = ctx.saved
    dy_q = dy if isinstance(dy, GroupedTensor) else as_grouped(ctx, "dy", _quantize(ctx, "dy", dy))
    dx = primitives.grouped_gemm(
        required(dy_q.data, "GroupedLinear", "dy.data"),
        kernel_data,
        sizes,
        GroupedGemmSpec(out_dtype=gemm_dtype(dtype), fast_accumulation=recipe.fast_accumulation("dgrad")),
        lhs_scale_inv=dy_q.scale_inv,
        rhs_scale_inv=kernel_scale_inv,
    )
    dy_t = required(dy_q.data_t, "GroupedLinear", "dy.data_t")
    buffer = main_grad.addend(ctx, x_t, dy_t, sizes, x_scale_inv, dy_q.scale_inv)
    dw = primitives.grouped_wgrad(
        x_t,
        dy_t,
        sizes,
        GroupedWgradSpec(
            groups=required(info.op.groups, info.label, "groups"),
            out_dtype=main_grad.wgrad_dtype(ctx, gemm_dtype(kernel.dtype)),
            fast_accumulation=recipe.fast_accumulation("wgrad"),
            accumulate=buffer is not None,
        ),
        lhs_scale_inv=x_scale_inv,
        rhs_scale_inv=dy_q.scale_inv,
        c=buffer,
    )
    main_grad.book(ctx, dw, added=buffer is not None)
    return dx.astype(dtype)


__all__ = ["GroupedLinear", "GroupedTensor", "as_grouped", "backward", "forward", "quantizing"]
