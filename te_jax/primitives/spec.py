"""The static choices of every primitive, one frozen dataclass each.

A spec travels whole: it is the only parameter of the JAX primitive, the only attribute of the custom call
(a dictionary, decoded into the struct of the same name in ``csrc/ffi/attrs.h``) and the argument of the jnp
reference. Operands and results that a spec does not ask for do not exist; none is passed as a placeholder.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

ACTIVATIONS = ("gelu", "silu", "relu", "quick_gelu", "squared_relu")
GATED_ACTIVATIONS = ("geglu", "swiglu", "glu", "reglu", "qgeglu", "sreglu", "clamped_swiglu")
NORMS = ("rmsnorm", "layernorm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """Base of all specs: knows how to become the dictionary attribute of a custom call."""

    def attributes(self) -> dict[str, object]:
        """The dictionary attribute: floats as float32, integers as int64, as the C++ structs declare them.

        Fields ``of_mesh`` are not in it: they say what goes on between shards, and a handler runs on one.
        """
        out: dict[str, object] = {}
        for field in dataclasses.fields(self):
            if "of_mesh" in field.metadata:
                continue
            value = getattr(self, field.name)
            if isinstance(value, bool | str):
                out[field.name] = value
            elif isinstance(value, int):
                out[field.name] = np.int64(value)
            elif isinstance(value, float):
                out[field.name] = np.float32(value)
            else:
                raise TypeError(f"{type(self).__name__}.{field.name}: expected bool, str, int or float, got {value!r}")
        return out


def of_mesh(default: bool) -> Any:
    """A field that says what goes on between shards."""
    return dataclasses.field(default=default, metadata={"of_mesh": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizingSpec(Spec):
    """What one pass that can quantize writes. Shared by quantize, norm, activation and activation_grad.

    The tensor that is quantized is called y: [*lead, C], in the dtype of the first operand (a value computed in
    fp32 is rounded to it before it is quantized and before its amax is taken, so that fusing changes nothing).

    Results, in this order, each only if wanted:
      hp        [*lead, C], high precision
      data      [*lead, C], FP8
      data_t    [C, *lead], FP8: the same values, transposed
      scale     f32[]: the scale that was used; with ``data`` or ``data_t``
      scale_inv f32[]: 1 / scale; with ``data`` or ``data_t``
      amax      f32[]: max |y|; NaN if y holds a NaN
      dbias     [C]: sum of y over lead, in fp32 and over all shards, then rounded to ``dbias_dtype``

    In block scaling there is neither a scale operand nor a scale and amax result, and the results are

      hp        as above
      data      [*lead, C], FP8
      data_t    [C, *lead], FP8, quantized by itself in 1x128 blocks along the last dimension, which is padded with 0 to
                whole blocks; for 128x128 blocks the values of ``data``, not padded
      scale_inv f32, of the blocks of ``data``; with it
      scale_inv_t f32, of the blocks of ``data_t``; with it
      dbias     as above

    with scales in the layout that a GEMM reads (``te_jax.quant.block_reference.gemm_layout``).

    With a scale for each of ``groups`` groups (experts) scale, scale_inv and amax are f32[groups], the operand too:

      "leading"  y [groups, R, C], quantize only: a group is an index of the first dimension; data_t [groups, C, R]
      "group"    y [T, C]: group g is the group_sizes[g] rows behind those of the groups before it. group_sizes
                 i32[groups] is an operand, in front of the scale. Rows behind the last group belong to none: they
                 count for no amax and are 0 in data and data_t [C, T rounded up to 16]. Sizes that can't be (a
                 negative one, a sum above T) are an error on CPU. On CUDA only the device knows them: all is NaN then.

    Neither has hp or dbias, and ``if_unseeded`` takes the amax of every group.
    """

    format: str  # "e4m3" or "e5m2"
    hp: bool = False
    data: bool = True
    data_t: bool = False
    amax: bool = False
    dbias: bool = False
    margin: int = 0  # a scale seeded from amax is divided by 2**margin
    power_of_two: bool = False  # a scale seeded from amax is floored to a power of two
    if_unseeded: bool = False  # amax only where the scale operand is 0, otherwise 0 without reading y
    dbias_dtype: str = "float32"  # float32, bfloat16 or float16: that of the parameter
    scaling: str = "tensor"  # "tensor", "block_1x128", "block_128x128" (y [K, N] only), "group" or "leading"
    groups: int = 0  # with "group" and "leading"
    amax_of_part: bool = of_mesh(False)  # in shard_map the amax result is that of this device's part of y
    seeded: bool = of_mesh(False)  # the caller knows that the scale operand is not 0: shards need no common amax first

    @property
    def quantizes(self) -> bool:
        return self.data or self.data_t

    @property
    def blocks(self) -> bool:
        """Whether every block has a scale of its own, instead of the whole tensor one."""
        return self.scaling.startswith("block")

    @property
    def by_group(self) -> bool:
        """Whether every group has a scale of its own."""
        return self.scaling in ("group", "leading")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeSpec(QuantizingSpec):
    """``quantize(x [*lead, C], [group_sizes i32[groups]], [scale f32[]])``. ``hp`` is not allowed (it would be x)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormSpec(QuantizingSpec):
    """``norm(x [*lead, C], gamma [C], [beta [C] for layernorm], [scale f32[]])``.

    After the common results: ``mean f32[*lead]`` (layernorm only) and ``rstd f32[*lead]``, if ``stats``.
    """

    kind: str = "rmsnorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False  # multiply by 1 + gamma
    stats: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormGradSpec(Spec):
    """``norm_grad(dy [*lead, C], x [*lead, C], gamma [C], [mean f32[*lead]], rstd f32[*lead], [dres [*lead, C]])``.

    mean for layernorm only, dres if ``residual``. Results: dx [*lead, C] in x's dtype, dgamma f32[C], and for layernorm
    dbeta f32[C].
    """

    kind: str = "rmsnorm"
    zero_centered_gamma: bool = False  # gamma is that of a norm that multiplied by 1 + gamma
    residual: bool = False  # dx = the norm's gradient + dres, rounded once


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationSpec(QuantizingSpec):
    """``activation(x, [scale f32[]])``: x [*lead, C], or [*lead, 2C] for a gated kind: act(g) * u of its halves g, u.

    act of a gated kind: gelu of geglu, silu of swiglu, sigmoid of glu, relu of reglu, quick_gelu of qgeglu and
    squared_relu of sreglu. quick_gelu is x sigmoid(1.702 x), squared_relu max(x, 0)^2. clamped_swiglu:

      g' = min(g, limit)    u' = max(min(u, limit), -limit)    y = g' sigmoid(alpha g') (u' + linear_offset)

    where a clamp passes a cotangent on up to and including its limit.
    """

    kind: str = "silu"
    gate_second: bool = False  # g is the second half of x
    limit: float = 7.0  # this and the next two: of clamped_swiglu alone, other kinds have the defaults
    alpha: float = 1.702
    linear_offset: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationGradSpec(ActivationSpec):
    """``activation_grad(dy [*lead, F], x, [scale f32[]])``: the cotangent of x, in x's shape (C = F or 2F)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DequantizeSpec(Spec):
    """``dequantize(data, scale_inv f32[])``: float32(data) * scale_inv, rounded to ``out_dtype``."""

    out_dtype: str = "bfloat16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmSpec(Spec):
    """out [*L, *R] = alpha * (lhs [*L, *C] . rhs [*R, *C]) * lhs_scale_inv * rhs_scale_inv + beta * c + bias.

    Both operands have their ``contract_dims`` contracted dimensions last (K-major, the layout Hopper's FP8 GEMM
    takes), unless ``lhs_contract_first``/``rhs_contract_first`` (not for FP8) says that they come first.

    Operands, in this order: lhs, rhs, [lhs_scale_inv, rhs_scale_inv, f32[] or of blocks] if ``fp8``,
    [bias [*R]] if ``bias``, [c [*L, *R]] if ``beta`` != 0, [out_scale f32[]] if out_dtype is FP8.

    Block scaling (``lhs_scaling``, ``rhs_scaling``; both or none, not 128x128 twice): 128 steps of the contraction are
    accumulated, multiplied by the scales of their two blocks, and added in fp32. Precise accumulation only, out in high
    precision. Scales are in ``te_jax.quant.block_reference.gemm_layout``; blocks run along the last contracted
    dimension, a multiple of 128 where there are several.
    Results: out, [amax f32[]] if ``amax`` (FP8 output only: max |out| before the output scale).
    ``in_place`` aliases c with out.
    """

    fp8: bool = True
    contract_dims: int = 1
    lhs_contract_first: bool = False
    rhs_contract_first: bool = False
    out_dtype: str = "bfloat16"  # bfloat16, float32, float8_e4m3fn or float8_e5m2
    bias: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    in_place: bool = False
    amax: bool = False
    fast_accumulation: bool = False
    lhs_scaling: str = "tensor"
    rhs_scaling: str = "tensor"

    @property
    def blocks(self) -> bool:
        """Whether the operands are block-scaled."""
        return self.lhs_scaling != "tensor" or self.rhs_scaling != "tensor"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec(Spec):
    """``attention(q [*lead, T, G, R, D], k [*lead, S, G, D], v)``: out, [f32[*lead, G, R, T] if ``stats``]."""

    causal: bool
    scale: float  # of q k^T
    stats: bool = False  # the logarithm of the softmax's denominators too


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionGradSpec(Spec):
    """``attention_grad(q, k, v, stats, out, dout)``: dq, dk, dv."""

    causal: bool
    scale: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleReadSpec(Spec):
    """``scale_read(amax_history f32[Q, H], scale f32[Q], uses f32[Q, 66])``: the FP8 state of Q quantizers.

    Q results f32[]: the scale that each quantizer quantizes with now (``te_jax.quant.state.read``). They are results of
    their own, as each is an operand of another pass: a stacked one would have to be sliced, a kernel for each.
    """

    formats: str  # "e4m3 e4m3 e5m2": a word for each quantizer
    margin: int = 0
    most_recent: bool = False  # scales come from the newest amax instead of the largest one
    groups: int = 0  # of a grouped linear: leaves [groups, Q, ...], and scales (and amaxes) f32[groups]; 0: none

    @property
    def quantizers(self) -> int:
        return len(self.formats.split(" "))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleWriteSpec(ScaleReadSpec):
    """``scale_write(amax_history, scale, uses, *amaxes f32[])``: what one use writes.

    ``used`` has a "1" for every quantizer that was used, in order; only these have an amax among the operands, and the
    rows of the others are zero. The scale that was used follows from leaves and amax. Results: the three leaves
    (``te_jax.quant.state.write``).
    """

    used: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedGemmSpec(Spec):
    """out [T, N], for the rows of each group: lhs . rhs[g] * lhs_scale_inv[g] * rhs_scale_inv[g] + bias[g].

    Groups are those of "group" scaling in ``QuantizingSpec``; rows that belong to none are 0. Sizes that can't be are
    an error on CPU, and on CUDA NaN for FP8 operands; for bfloat16 ones they are cut off there. Operands, in this
    order: lhs [T, K], rhs [G, N, K] ([G, K, N] if ``rhs_contract_first``, not for FP8), group_sizes i32[G],
    [lhs_scale_inv, rhs_scale_inv f32[G]] if ``fp8``, [bias [G, N]] if ``bias``.
    """

    fp8: bool = True
    rhs_contract_first: bool = False
    out_dtype: str = "bfloat16"  # or float32
    bias: bool = False
    fast_accumulation: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedWgradSpec(Spec):
    """out [G, M, N]: for the rows of each group lhs^T . rhs * lhs_scale_inv[g] * rhs_scale_inv[g] (+ c[g]).

    0 (c) for an empty group. Operands, in this order: lhs [M, T rounded up to 16] and rhs [N, the same] if ``fp8``
    (what a quantizing pass writes as data_t), otherwise lhs [T, M] and rhs [T, N]; group_sizes i32[G],
    [lhs_scale_inv, rhs_scale_inv f32[G]] if ``fp8``, [c [G, M, N] in out's dtype, aliased with it] if ``accumulate``.
    """

    groups: int
    fp8: bool = True
    out_dtype: str = "float32"  # or bfloat16
    fast_accumulation: bool = False
    accumulate: bool = False


COLLECTIVES = ("matmul_reduce_scatter", "all_gather_matmul")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveGemmSpec(Spec):
    """A GEMM and the collective beside it, between the ``ranks`` devices along a mesh axis, as one call.

      "matmul_reduce_scatter"  lhs [*B, M, K of this rank], rhs [N, K of this rank]: the sum over ranks of their
                               products [*B, M, N], of which rank r has rows r M/t to (r + 1) M/t: out [*B, M/t, N]
      "all_gather_matmul"      lhs [*B, M/t, K], rhs [N of this rank, K]: the product of all ranks' rows with this
                               rank's rhs: out [*B, M, N]

    Sums are in fp32 and in the order of ranks; what travels of a sum is rounded once, to ``out_dtype`` (bfloat16 for an
    FP8 one). The bias is added once, to sums.

    Operands, in this order: lhs, rhs ([K, N] if ``rhs_contract_first``, not for FP8), [lhs_scale_inv, rhs_scale_inv as
    for a GEMM, of this rank's operands; they may differ between ranks] if ``fp8``, [bias [N]] if ``bias``,
    [out_scale f32[]] if out_dtype is FP8, place i32[2]: this device's rank and the number of its group among those
    along the axis.

    Results: out, [gathered [*B, M, K], the gathered lhs, and with ``fp8`` its scales: f32[ranks], or those of all
    blocks] if ``keep_gathered`` (all_gather_matmul only), [amax f32[] of this rank's out before ``out_scale``] if
    ``amax`` (FP8 output only).
    """

    kind: str
    axis_name: str
    ranks: int = 0  # of the axis; 0, until the call: found there
    group: str = ""  # the mesh that the axis belongs to, for error messages and between processes; found as ranks is
    fp8: bool = True
    rhs_contract_first: bool = False
    out_dtype: str = "bfloat16"  # bfloat16, float16, float32, float8_e4m3fn or float8_e5m2
    bias: bool = False
    amax: bool = False
    fast_accumulation: bool = False
    lhs_scaling: str = "tensor"
    rhs_scaling: str = "tensor"
    equal_scales: bool = False  # the lhs_scale_inv of all ranks are one; found where types show what varies
    keep_gathered: bool = False
    chunks: int = 0  # pieces in which a block of rows travels; 0: chosen from the shapes, as is ``direct``
    direct: bool = False  # matmul_reduce_scatter: GEMMs write into the memory of the rank whose rows they are
    timeout_ms: int = 120_000  # how long a rank waits for another before the call is an error

    @property
    def gathers(self) -> bool:
        return self.kind == "all_gather_matmul"

    @property
    def blocks(self) -> bool:
        """Whether the operands are block-scaled."""
        return self.lhs_scaling != "tensor" or self.rhs_scaling != "tensor"
