"""MultiHeadAttention: projections as op chains around ``jax.nn.dot_product_attention``."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype, Initializer
from jax import Array

from te_jax import ops
from te_jax.errors import check_value
from te_jax.flax.core_attention import core_attention, why_not_cudnn
from te_jax.flax.dense import default_bias_init, default_kernel_init
from te_jax.flax.layers import check_array, norm_op
from te_jax.flax.rotary import apply_rotary, check_positions
from te_jax.flax.tensor_parallel import TensorParallel
from te_jax.fusion.plan import Plans
from te_jax.recipe import Recipe
from te_jax.sequential import Sequential


class MultiHeadAttention(nn.Module):
    """Self-attention: y = attn_proj(attention(qkv_linear([norm] x))) [+ x], for x [B, T, C] or [T, C].

    Two chains: ``qkv`` (``attn_norm``, ``qkv_linear``) and ``proj`` (``attn_proj`` and the residual). The fused
    projection's kernel is [C, (num_heads + 2 * num_kv_heads) * head_dim]: queries, keys, values, head-major.

    Attributes:
      num_heads: query heads H.
      num_kv_heads: key and value heads G, a divisor of H (grouped-query attention); None: H.
      head_dim: D, a multiple of 2 with ``rope``; None: C / num_heads.
      causal: whether position t attends to positions <= t only.
      rope: whether queries and keys are rotated by their positions.
      rope_base: base of the rotary wavelengths.
      norm: "rmsnorm", "layernorm" or None (x is used as it is).
      epsilon: of the norm.
      use_bias: whether both linears add biases.
      dropout_rate: of dropout on the projection's output; only with ``deterministic=False``, from the "dropout" stream.
      residual: whether x is added to the output.
      attention_implementation: "xla", "cudnn", or None: cuDNN where it takes the dtype (bfloat16, float16) and
        head_dim (a multiple of 8 up to 128), an error with "cudnn" where it doesn't. That is for programs lowered for
        CUDA; lowered for another platform the same program has the same maths from XLA. Attention that may be cuDNN's
        has first derivatives in reverse mode only. ``attention_plan`` says what runs.
      kernel_init, bias_init: initialisers of both linears.
      tensor_axis: the mesh axis of tensor parallelism: ``qkv_linear`` is column-, ``attn_proj`` row-parallel, inside of
        ``shard_map`` over it (docs/collective.md), and a device has G / t groups of heads. The kernel of ``qkv_linear``
        is then kept as [C, G, H / G + 2, head_dim], its bias without C: of each group queries, key, value.
      sequence_parallel: x and y are split along T over the axis; otherwise they are the same on all of its devices.
        ``positions`` are those of all tokens.
      overlap: as of ``te.ops.AllGather``.
      recipe, dtype, param_dtype: as in ``Dense``; attention itself runs in ``dtype``.

    Raises:
      ValueError: heads that don't divide, odd head_dim with rope, x of another rank, unknown norm or implementation.
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    causal: bool = False
    rope: bool = False
    rope_base: float = 10000.0
    norm: str | None = None
    epsilon: float = 1e-6
    use_bias: bool = False
    dropout_rate: float = 0.0
    residual: bool = False
    attention_implementation: Literal["xla", "cudnn"] | None = None
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init
    tensor_axis: str | None = None
    sequence_parallel: bool = False
    overlap: str = "auto"
    recipe: Recipe | None = None
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array, *, positions: Array | None = None, deterministic: bool = True) -> Array:
        """x [B, T, C] or [T, C], positions [B, T] or [T] (default 0..T-1) -> the shape of x, in ``dtype``."""
        heads, kv_heads, head_dim = self._head_shapes(x)
        features = x.shape[-1]
        tensor = self._tensor()
        own_heads, own_kv_heads = tensor.share("num_heads", heads), tensor.share("num_kv_heads", kv_heads)

        qkv = self._chain(*self._qkv_ops(heads, kv_heads, head_dim), name="qkv")(x)
        qkv, *residual = qkv if self.residual else (qkv,)
        lead = qkv.shape[:-1]  # all tokens, and this device's heads, from here to the projection
        query, key, value = self._split_heads(qkv, own_heads, own_kv_heads, head_dim)  # [*lead, H | G | G, D]
        if positions is not None:
            positions = jnp.asarray(positions)
            check_positions("MultiHeadAttention", positions, tuple(lead[:-1]), lead[-1])
        if self.rope:
            positions = jnp.arange(lead[-1]) if positions is None else positions
            query, key = (apply_rotary(t, positions, base=self.rope_base) for t in (query, key))

        implementation = self.attention_implementation
        context = core_attention(query, key, value, causal=self.causal, implementation=implementation)
        context = context.reshape(*lead, own_heads * head_dim)

        proj = self._chain(*self._proj_ops(features), name="proj")
        return proj(context, *residual, deterministic=deterministic)

    def plan(self, x: jax.ShapeDtypeStruct | Array, **options) -> Plans:
        """The plans, by name, of both chains for x [B, T, C] or [T, C]; options as those of ``Sequential.plan``."""
        heads, kv_heads, head_dim = self._head_shapes(x)
        tensor = self._tensor()
        *batch, tokens = x.shape[:-1]
        tokens *= tensor.ranks if self.sequence_parallel else 1
        features = tensor.share("num_heads", heads) * head_dim
        context = jax.ShapeDtypeStruct((*batch, tokens, features), self.dtype or x.dtype)
        qkv = self._chain(*self._qkv_ops(heads, kv_heads, head_dim), parent=None)
        proj = self._chain(*self._proj_ops(x.shape[-1]), parent=None)
        return Plans(
            qkv=qkv.plan(x, **options),
            proj=proj.plan(context, *((x,) if self.residual else ()), **options),
        )

    @nn.nowrap
    def attention_plan(self, x: jax.ShapeDtypeStruct | Array, *, platform: str | None = None) -> str:
        """What runs the attention between the projections on ``platform`` and why not cuDNN; None: on CUDA."""
        heads, kv_heads, head_dim = self._head_shapes(x)
        query, key = (
            jax.ShapeDtypeStruct((*x.shape[:-1], n, head_dim), self.dtype or x.dtype) for n in (heads, kv_heads)
        )
        asked = "attention_implementation='xla'" if self.attention_implementation == "xla" else None
        reason = asked or why_not_cudnn(query, key, platform)
        return f"attention: XLA: {reason}" if reason else "attention: cuDNN flash attention"

    @nn.nowrap
    def _tensor(self) -> TensorParallel:
        return TensorParallel("MultiHeadAttention", self.tensor_axis, self.sequence_parallel, self.overlap)

    @nn.nowrap
    def _split_heads(self, qkv: Array, heads: int, kv_heads: int, head_dim: int) -> tuple[Array, Array, Array]:
        """Queries [*lead, H, D], keys and values [*lead, G, D]."""
        lead = qkv.shape[:-1]
        if self.tensor_axis is None:
            qkv = qkv.reshape(*lead, heads + 2 * kv_heads, head_dim)
            query, key, value = jnp.split(qkv, (heads, heads + kv_heads), axis=-2)
            return query, key, value
        qkv = qkv.reshape(*lead, kv_heads, heads // kv_heads + 2, head_dim)
        return qkv[..., :-2, :].reshape(*lead, heads, head_dim), qkv[..., -2, :], qkv[..., -1, :]

    @nn.nowrap
    def _qkv_ops(self, heads: int, kv_heads: int, head_dim: int):
        norm = (norm_op(self.norm, self.epsilon, name="attn_norm", caller="MultiHeadAttention"),) if self.norm else ()
        residual = (ops.MakeExtraOutput(),) if self.residual else ()
        tensor, parts = self._tensor(), (kv_heads, heads // kv_heads + 2, head_dim)
        features = (heads + 2 * kv_heads) * head_dim
        linear = tensor.linear(features, "column", parts=parts, name="qkv_linear", **self._linear_options())
        return *residual, *norm, *tensor.before(), linear

    @nn.nowrap
    def _proj_ops(self, features: int):
        dropout = (ops.Dropout(self.dropout_rate),) if self.dropout_rate else ()
        residual = (ops.AddExtraInput(),) if self.residual else ()
        tensor = self._tensor()
        linear = tensor.linear(features, "row", name="attn_proj", **self._linear_options())
        return linear, *tensor.behind(), *dropout, *residual

    @nn.nowrap
    def _linear_options(self) -> dict[str, Any]:
        return {"use_bias": self.use_bias, "kernel_init": self.kernel_init, "bias_init": self.bias_init}

    @nn.nowrap
    def _chain(self, *chain, **kwargs) -> Sequential:
        return Sequential(chain, recipe=self.recipe, dtype=self.dtype, param_dtype=self.param_dtype, **kwargs)

    @nn.nowrap
    def _head_shapes(self, x: jax.ShapeDtypeStruct | Array) -> tuple[int, int, int]:
        """Checked (H, G, D)."""
        name = "MultiHeadAttention"
        check_array(name, x)
        check_value(x.ndim in (2, 3), name, "x", "[B, T, C] or [T, C]", f"shape {x.shape}")
        heads = self.num_heads
        kv_heads = heads if self.num_kv_heads is None else self.num_kv_heads
        check_value(isinstance(heads, int) and heads > 0, name, "num_heads", "a positive int", repr(heads))
        ok = isinstance(kv_heads, int) and kv_heads > 0 and heads % kv_heads == 0
        check_value(ok, name, "num_kv_heads", f"a divisor of num_heads={heads}", self.num_kv_heads)
        ok = self.head_dim is not None or x.shape[-1] % heads == 0
        check_value(ok, name, "num_heads", f"a divisor of x.shape[-1]={x.shape[-1]} (or head_dim given)", heads)
        head_dim = x.shape[-1] // heads if self.head_dim is None else self.head_dim
        check_value(isinstance(head_dim, int) and head_dim > 0, name, "head_dim", "a positive int", repr(head_dim))
        asked = self.attention_implementation
        check_value(
            asked in (None, "xla", "cudnn"), name, "attention_implementation", "None, 'xla' or 'cudnn'", repr(asked)
        )
        check_value(not self.rope or head_dim % 2 == 0, name, "head_dim", "an even number with rope=True", head_dim)
        return heads, kv_heads, head_dim
