"""Linear ops: y = x w (+ bias), quantized as the recipe says.

x [*lead, K], w [K, N], cotangent dy [*lead, N]. The three GEMMs of a linear, all operands K-major:

  fprop  y [*lead, N] = Q(x) [*lead, K] . Q(w)^T [N, K]
  dgrad dx [*lead, K] = Q(dy) [*lead, N] . Q(w) [K, N]
  wgrad dw [K, N]     = Q(x)^T [K, *lead] . Q(dy)^T [N, *lead]

Under BlockScaling the operand that wgrad contracts over tokens is quantized by itself, in blocks along tokens: Q(x)^T
isn't the transpose of Q(x), and has its own scales.

Between forward and backward it saves Q(x)^T and Q(w) (FP8), or x alone where it runs in high precision.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax
from jax.nn import initializers
from jax.sharding import PartitionSpec

from te_jax import primitives
from te_jax.errors import check_type, check_value, required
from te_jax.ops import main_grad
from te_jax.ops.base import (
    BackwardContext,
    ForwardContext,
    Initializer,
    LinkInfo,
    Op,
    ParamSpec,
    QuantizedKernel,
    TensorType,
    tokens,
)
from te_jax.ops.bias import Bias
from te_jax.ops.gathering import whole
from te_jax.ops.recording import record
from te_jax.ops.residual import add_cotangents, addable
from te_jax.parallel import explicit, mesh
from te_jax.primitives.spec import GemmSpec, QuantizeSpec
from te_jax.quant.format import MAX_SCALE
from te_jax.quant.tensor import QTensor
from te_jax.recipe import BlockScaling, Recipe


@dataclasses.dataclass(frozen=True)
class BasicLinear(Op):
    """y = x w. Parameter ``kernel`` [K, features].

    ``out_sharding``: a PartitionSpec for the result, on an Auto or Explicit mesh; default: what x and kernel imply.
    ``kept_features``: sizes of which ``features`` is the product: kernel (and bias) are kept as [K, *kept_features], so
    that each part of a fused projection can be split over devices.
    ``devices``: above 1 features come out in the order of so many devices, of halves that are kept as (2, F)
    (te_jax.ops.device_order): of whole arrays, split over that many, each then has its own part of both.
    """

    features: int
    init: Initializer = dataclasses.field(default=initializers.lecun_normal(), kw_only=True)
    out_sharding: PartitionSpec | None = dataclasses.field(default=None, kw_only=True)
    kept_features: tuple[int, ...] | None = dataclasses.field(default=None, kw_only=True)
    devices: int = dataclasses.field(default=1, kw_only=True)

    roles: ClassVar[tuple[str, ...]] = ("x", "kernel", "dy")
    has_main_grad: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_linear("BasicLinear", self.features, self.init)

    def params(self, x: TensorType) -> tuple[ParamSpec, ...]:
        check_value(x.shape[-1] > 0, "Linear", "x", "at least one feature", f"shape {x.shape}")
        kept = None if self.kept_features is None else (x.shape[-1], *self.kept_features)
        return (ParamSpec("kernel", (x.shape[-1], self.features), self.init, kept, self.devices),)

    def out_type(self, x: TensorType) -> TensorType:
        return TensorType((*x.shape[:-1], self.features), x.dtype)

    def saves_input(self, info: LinkInfo) -> bool:
        return not info.quantized

    def why_unquantized(self, x: TensorType, recipe: Recipe | None) -> str | None:
        return why_unquantized(self, x, recipe)

    def quantize_kernel(self, ctx: ForwardContext) -> QuantizedKernel:
        return quantize_kernel(ctx)

    def forward(self, ctx: ForwardContext, x: Array | QTensor) -> Array:
        return forward(ctx, x)

    def backward(self, ctx: BackwardContext, dy: Array | QTensor) -> Array:
        return backward(ctx, dy)

    def __str__(self) -> str:
        return "Linear"


@dataclasses.dataclass(frozen=True)
class Linear(Op):
    """y = x w + bias: a BasicLinear and a Bias that share one scope, so that each parameter exists once."""

    features: int
    use_bias: bool = True
    kernel_init: Initializer = dataclasses.field(default=initializers.lecun_normal(), kw_only=True)
    bias_init: Initializer = dataclasses.field(default=initializers.zeros, kw_only=True)
    out_sharding: PartitionSpec | None = dataclasses.field(default=None, kw_only=True)
    kept_features: tuple[int, ...] | None = dataclasses.field(default=None, kw_only=True)
    devices: int = dataclasses.field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        _check_linear("Linear", self.features, self.kernel_init, self.bias_init)
        kept = self.kept_features
        expected = f"sizes whose product is {self.features}"
        check_value(kept is None or math.prod(kept) == self.features, "Linear", "kept_features", expected, kept)
        ok = self.devices == 1 or (kept is not None and len(kept) == 2 and kept[0] == 2 and not kept[1] % self.devices)
        check_value(ok, "Linear", "devices", "1, or a divisor of F with kept_features=(2, F)", self.devices)

    def expand(self) -> tuple[Op, ...]:
        kept = self.kept_features
        linear = BasicLinear(
            self.features,
            init=self.kernel_init,
            out_sharding=self.out_sharding,
            kept_features=kept,
            devices=self.devices,
            name=self.name,
        )
        return (linear, Bias(self.bias_init, kept, self.devices, name=self.name)) if self.use_bias else (linear,)


def _check_linear(name: str, features: Any, *inits: Any) -> None:
    ok = isinstance(features, int) and not isinstance(features, bool) and features > 0
    check_value(ok, name, "features", "a positive int", repr(features))
    for init in inits:
        check_type(callable(init), name, "initialiser", "a function of key, shape and dtype", repr(init))


def why_unquantized(op: BasicLinear, x: TensorType, recipe: Recipe | None) -> str | None:
    """Why this linear runs as XLA's own dot in high precision; None if it is quantized."""
    if recipe is None:
        return "recipe None"
    # Every one of tokens, K and N is contracted or minor in one of the three GEMMs.
    return primitives.support.why_not_fp8_linear(tokens(x), x.shape[-1], op.features)


def scaling(recipe: Recipe, role: str) -> str:
    """How the operand of that role is scaled, as specs and QTensor spell it."""
    if not isinstance(recipe, BlockScaling):
        return "tensor"
    return "block_128x128" if role == "kernel" else "block_1x128"


def quantizing(info: LinkInfo, role: str, *, train: bool = True) -> dict[str, Any]:
    """The fields of a QuantizingSpec by which a producer writes this linear's operand of that role.

    x is used transposed in wgrad and the kernel as it is in dgrad, so neither is written where no backward follows.
    """
    recipe = info.quantizing_recipe
    return {
        "format": recipe.format(role).name,
        "data": train or role != "kernel",
        "data_t": train or role == "kernel",
        "amax": train and recipe.stateful,
        "amax_of_part": True,  # reduced with all others, where the state is written
        "seeded": info.initial_scale(role) is not None,
        "margin": recipe.margin,
        "power_of_two": recipe.power_of_two,
        "scaling": scaling(recipe, role),
    }


def dbias_of(bias: Array | None) -> dict[str, Any]:
    """The fields of a QuantizingSpec that ask for the gradient of this bias, rounded once to its dtype."""
    return {} if bias is None else {"dbias": True, "dbias_dtype": jnp.dtype(bias.dtype).name}


def as_qtensor(
    ctx: ForwardContext | BackwardContext, role: str, out: primitives.QuantizeOut, dtype: Any, alpha: float = 1.0
) -> QTensor:
    """What a pass wrote for ``role``, with its amax entered in the state's books: that of alpha times the tensor."""
    recipe = ctx.info.quantizing_recipe
    if out.amax is not None:
        # Rounding keeps the order, so this is the amax of the rounded products.
        ctx.used[role] = out.amax if alpha == 1.0 else (out.amax * abs(alpha)).astype(dtype).astype(jnp.float32)
    return QTensor(
        data=out.data,
        data_t=out.data_t,
        scale_inv=out.scale_inv,
        scale_inv_t=out.scale_inv_t,
        format=recipe.format(role).name,
        scaling=scaling(recipe, role),
        dtype=jnp.dtype(dtype).name,
    )


def scale_of(ctx: ForwardContext | BackwardContext, role: str, alpha: float = 1.0) -> Array | None:
    """f32[]: the scale to quantize with; 0 (derive it from this tensor) without history; None if blocks have theirs.

    The state's scale is that of alpha times the tensor: the tensor itself may be quantized with abs(alpha) times it.
    """
    if isinstance(ctx.info.recipe, BlockScaling):
        return None
    scale = ctx.scales.get(role)
    initial = ctx.info.initial_scale(role)
    if scale is None:
        scale = jnp.float32(initial or 0.0)
    if alpha == 1.0:
        return scale
    scale = jnp.minimum(scale * abs(alpha), MAX_SCALE)
    return scale if initial is None else jnp.maximum(scale, 1 / MAX_SCALE)  # never 0, as ``quantizing`` says then


def quantize_operand(
    ctx: ForwardContext | BackwardContext,
    role: str,
    x: Array,
    *,
    train: bool = True,
    bias: Array | None = None,
    alpha: float = 1.0,
) -> tuple[QTensor, Array | None]:
    """Quantizes one operand by itself; given a ``bias`` also its gradient, the sum over the leading dimensions.

    ``alpha``: the operand is alpha x, and the GEMMs that take x multiply by it.
    """
    out = _quantize(ctx, role, x, train=train, bias=bias, alpha=alpha)
    return as_qtensor(ctx, role, out, x.dtype, alpha), out.dbias


def _quantize(
    ctx: ForwardContext | BackwardContext,
    role: str,
    x: Array,
    *,
    train: bool,
    bias: Array | None = None,
    alpha: float = 1.0,
) -> primitives.QuantizeOut:
    spec = QuantizeSpec(**dbias_of(bias), **quantizing(ctx.info, role, train=train))
    scale = scale_of(ctx, role, alpha)
    out = primitives.quantize(x, scale, spec, amax_axes=mesh.amax_axes(x, scale, ctx.info.recipe))
    record(ctx.info, role, x, out)
    return out


def quantize_kernel(ctx: ForwardContext) -> QuantizedKernel:
    """The kernel as ``forward`` would quantize it, for ``ForwardContext.quantized_kernel`` of other calls."""
    out = _quantize(ctx, "kernel", ctx.params["kernel"], train=ctx.train)
    return {name: value for name, value in out._asdict().items() if value is not None}


def check_kernel(ctx: ForwardContext, quantized: QuantizedKernel) -> None:
    """Raises a ValueError where a call is differentiated whose kernel is kept for fprop alone."""
    expected, got = "a kernel that gradients can go through", "one in FP8 for inference (te.quantize_params)"
    check_value("data" in quantized or not ctx.train, ctx.info.label, "kernel", expected, got)


def quantized_kernel(ctx: ForwardContext) -> QTensor:
    """The kernel of this call: quantized before it, or now."""
    quantized = quantize_kernel(ctx) if ctx.quantized_kernel is None else ctx.quantized_kernel
    check_kernel(ctx, quantized)
    kernel_q = as_qtensor(ctx, "kernel", primitives.QuantizeOut(**quantized), ctx.info.x_type.dtype)
    # One that is given isn't this call's to save again.
    return kernel_q if ctx.quantized_kernel is not None else named(ctx, kernel_q, "kernel", data="data")


def forward(
    ctx: ForwardContext, x: Array | QTensor, bias: Array | None = None, c: Array | None = None, alpha: float = 1.0
) -> Array:
    """y [*lead, N] = alpha x w (+ bias [N]) (+ c [*lead, N]), rounded once; x may come quantized from its producer."""
    info = ctx.info
    if not info.quantized:
        assert not isinstance(x, QTensor)
        assert bias is None
        assert c is None
        assert alpha == 1.0
        return _high_precision_forward(ctx, x)
    dtype, recipe = info.x_type.dtype, info.quantizing_recipe
    x_q = x if isinstance(x, QTensor) else quantize_operand(ctx, "x", x, train=ctx.train)[0]
    x_q = named(ctx, x_q, "input", data="data_t")
    kernel_q = quantized_kernel(ctx)
    spec = GemmSpec(
        out_dtype=gemm_dtype(dtype),
        bias=bias is not None,
        alpha=alpha,
        beta=0.0 if c is None else 1.0,
        fast_accumulation=recipe.fast_accumulation("fprop"),
        lhs_scaling=scaling(recipe, "x"),
        rhs_scaling=scaling(recipe, "kernel"),
    )
    y, _ = primitives.gemm(
        required(x_q.data, "linear", "x.data"),
        required(kernel_q.data_t, "linear", "kernel.data_t"),
        spec,
        lhs_scale_inv=x_q.scale_inv,
        rhs_scale_inv=kernel_q.data_t_scale_inv,
        bias=None if bias is None else bias.astype(jnp.bfloat16),  # the type cuBLASLt's FP8 epilogue takes
        c=c,
    )
    ctx.saved = (x_q.data_t, x_q.data_t_scale_inv, kernel_q.data, kernel_q.scale_inv)
    return constrained(info, y.astype(dtype))


def named(ctx: ForwardContext, q: QTensor, tensor: str, *, data: str) -> QTensor:
    """q, with names on what the backward pass reads of it: one of its two layouts, ``data``, and its scales."""
    scale = "scale_inv_t" if data == "data_t" and q.scaling != "tensor" else "scale_inv"
    fields = {data: ctx.named(getattr(q, data), tensor), scale: ctx.named(getattr(q, scale), f"{tensor}_scale")}
    return dataclasses.replace(q, **fields)


def backward(ctx: BackwardContext, dy: Array | QTensor, c: Array | None = None, alpha: float = 1.0) -> Array:
    """dx [*lead, K] (+ c) of y's cotangent alpha dy; dw [K, N] goes to ``ctx.param_grads`` or into the main gradient.

    dy may come quantized from its producer. Otherwise it is quantized here with the scale that alpha dy has, times
    alpha: the same FP8 numbers, but for the rounding of alpha dy, and the same state.
    """
    info = ctx.info
    if not info.quantized:
        assert not isinstance(dy, QTensor)
        assert c is None
        assert alpha == 1.0
        return _high_precision_backward(ctx, dy)
    dtype, recipe = info.x_type.dtype, info.quantizing_recipe
    _, _, kernel_data, kernel_scale_inv = ctx.saved
    dy_q = dy if isinstance(dy, QTensor) else quantize_operand(ctx, "dy", dy, alpha=alpha)[0]
    dy_data, dy_t = required(dy_q.data, "linear", "dy.data"), required(dy_q.data_t, "linear", "dy.data_t")
    scales = {"lhs_scale_inv": dy_q.scale_inv, "rhs_scale_inv": kernel_scale_inv}
    in_gemm = c is not None and addable(c, dy_data, kernel_data, *scales.values())
    dgrad = GemmSpec(
        out_dtype=gemm_dtype(dtype),
        alpha=alpha,
        beta=1.0 if in_gemm else 0.0,
        fast_accumulation=recipe.fast_accumulation("dgrad"),
        lhs_scaling=scaling(recipe, "dy"),
        rhs_scaling=scaling(recipe, "kernel"),
    )
    dx, _ = primitives.gemm(dy_data, kernel_data, dgrad, c=c if in_gemm else None, **scales)
    wgrad(ctx, dy_t, dy_q.data_t_scale_inv, alpha)
    dx = dx.astype(dtype)
    return dx if c is None or in_gemm else add_cotangents(dx, c)


def wgrad(ctx: BackwardContext, dy_t: Array, dy_t_scale_inv: Array | None, alpha: float = 1.0) -> None:
    """dw [K, N] = alpha x^T dy, of dy_t FP8 [N, *lead] and what ``forward`` has saved.

    Goes to ``ctx.param_grads`` or into the main gradient.
    """
    info, kernel = ctx.info, ctx.params["kernel"]
    recipe = info.quantizing_recipe
    x_t, x_scale_inv, *_ = ctx.saved
    x_t = whole(x_t)
    scales = {"lhs_scale_inv": x_scale_inv, "rhs_scale_inv": dy_t_scale_inv}
    buffer = main_grad.addend(ctx, x_t, dy_t, *scales.values())
    spec = GemmSpec(
        contract_dims=len(info.x_type.shape) - 1,
        out_dtype=main_grad.wgrad_dtype(ctx, gemm_dtype(kernel.dtype)),
        alpha=alpha,
        beta=0.0 if buffer is None else 1.0,
        in_place=buffer is not None,
        fast_accumulation=recipe.fast_accumulation("wgrad"),
        lhs_scaling=scaling(recipe, "x"),
        rhs_scaling=scaling(recipe, "dy"),
    )
    dw, _ = primitives.gemm(x_t, dy_t, spec, c=buffer, **scales)
    main_grad.book(ctx, dw, added=buffer is not None)


def backward_with_bias(
    ctx: BackwardContext, bias_ctx: BackwardContext, dy: Array, c: Array | None = None, alpha: float = 1.0
) -> Array:
    """As ``backward`` of alpha x w + bias; the bias gradient is a by-product of quantizing dy, which is read once."""
    dy_q, dbias = quantize_operand(ctx, "dy", dy, bias=bias_ctx.params["bias"], alpha=alpha)
    bias_ctx.param_grads["bias"] = required(dbias, "linear", "dbias")
    return backward(ctx, dy_q, c, alpha)


def gemm_dtype(dtype: Any) -> str:
    """The output type a GEMM writes for a tensor of this dtype: float16 goes through float32."""
    return "bfloat16" if jnp.dtype(dtype) == jnp.bfloat16 else "float32"


def _high_precision_forward(ctx: ForwardContext, x: Array) -> Array:
    """y [*lead, N] by XLA's dot, as flax.linen.Dense has it."""
    kernel = ctx.params["kernel"].astype(x.dtype)
    ctx.saved = x
    out = (*explicit.spec_entries(x)[:-1], explicit.spec_entries(kernel)[-1])
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    y = lax.dot_general(x, kernel, dims, out_sharding=explicit.out_sharding(out, x, kernel))
    return constrained(ctx.info, y)


def constrained(info: LinkInfo, y: Array) -> Array:
    """y, split as the op says, if it does."""
    spec = getattr(info.op, "out_sharding", None)
    return y if spec is None else explicit.constrain(y, spec)


def _high_precision_backward(ctx: BackwardContext, dy: Array) -> Array:
    ctx.saved = x = whole(ctx.saved)
    kernel = ctx.params["kernel"]
    dx = lax.dot_general(
        dy,
        kernel.astype(x.dtype),
        (((dy.ndim - 1,), (1,)), ((), ())),
        out_sharding=explicit.out_sharding(explicit.spec_entries(x), x, dy),
    )
    high_precision_wgrad(ctx, dy)
    return dx


def high_precision_wgrad(ctx: BackwardContext, dy: Array) -> None:
    """dw [K, N] = x^T dy, of dy [*lead, N] and what ``forward`` has saved, into ``ctx.param_grads``, by XLA's dot."""
    x, kernel = whole(ctx.saved), ctx.params["kernel"]
    lead = tuple(range(x.ndim - 1))
    dw = lax.dot_general(
        x,
        dy,
        ((lead, lead), ((), ())),
        preferred_element_type=kernel.dtype if ctx.info.main_grad is None else jnp.float32,
        out_sharding=explicit.out_sharding(explicit.spec_entries(kernel), x, dy),
    )
    main_grad.book(ctx, dw)


__all__ = ["BasicLinear", "Linear", "backward", "backward_with_bias", "forward", "why_unquantized"]
