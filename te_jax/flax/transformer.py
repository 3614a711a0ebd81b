"""TransformerLayer: pre-norm attention and MLP, with the residuals inside the chains."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype, Initializer
from jax import Array

from te_jax.flax.attention import MultiHeadAttention
from te_jax.flax.dense import default_bias_init, default_kernel_init
from te_jax.flax.layers import check_array
from te_jax.flax.mlp import LayerNormMLP
from te_jax.fusion.plan import Plans
from te_jax.recipe import Recipe


class TransformerLayer(nn.Module):
    """h = x + attn(norm(x)); y = h + mlp(norm(h)), for x [B, T, C] or [T, C].

    Both residual adds are the last op of a chain, so the GEMM before them accumulates into the residual; the gradients
    are added to those of the norms, in one kernel. Children: ``attn`` (MultiHeadAttention) and ``mlp`` (LayerNormMLP).
    Works in ``nn.remat``, and in ``nn.scan`` over layers with ``variable_axes={"params": 0, te.state.COLLECTION: 0}``
    (and ``te.state.KERNELS: 0`` for ``te.quantize_kernels``, ``te.main_grad.COLLECTION: 0`` for main gradients,
    ``te.health.COLLECTION: 0`` for ``te.health``) inside a module that returns ``(y, None)`` (README).

    Attributes:
      num_heads: query heads.
      hidden_features: the MLP's features between fc1 and fc2.
      num_kv_heads: key and value heads; None: num_heads.
      head_dim: None: C / num_heads.
      activation: the kind of an activation of ``te_jax.ops``: "gelu", "silu", "relu", "quick_gelu", "squared_relu",
        or gated "geglu", "swiglu", "glu", "reglu", "qgeglu", "sreglu", "clamped_swiglu".
      norm: "rmsnorm" or "layernorm".
      epsilon: of the norms.
      use_bias: whether the linears add biases.
      causal: whether position t attends to positions <= t only.
      rope: whether queries and keys are rotated by their positions.
      rope_base: base of the rotary wavelengths.
      dropout_rate: of dropout before each residual add; only with ``deterministic=False``, from the "dropout" stream.
      attention_implementation: as in ``MultiHeadAttention``.
      kernel_init, bias_init: initialisers of all linears.
      tensor_axis, sequence_parallel, overlap: as in ``MultiHeadAttention`` and ``LayerNormMLP``; with sequence
        parallelism the layer's x and y are split along T.
      recipe, dtype, param_dtype: as in ``Dense``.

    Raises:
      ValueError: as ``MultiHeadAttention`` and ``LayerNormMLP``.
    """

    num_heads: int
    hidden_features: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    activation: str = "swiglu"
    norm: str = "rmsnorm"
    epsilon: float = 1e-6
    use_bias: bool = False
    causal: bool = True
    rope: bool = True
    rope_base: float = 10000.0
    dropout_rate: float = 0.0
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
        check_array("TransformerLayer", x)
        h = self._attention(name="attn")(x, positions=positions, deterministic=deterministic)
        return self._mlp(x.shape[-1], name="mlp")(h, deterministic=deterministic)

    def plan(self, x: jax.ShapeDtypeStruct | Array, **options) -> Plans:
        """Plans of the three chains, by name, for x [B, T, C] or [T, C]; options as those of ``Sequential.plan``."""
        attn = self._attention(parent=None).plan(x, **options)
        mlp = self._mlp(x.shape[-1], parent=None).plan(x, **options)
        return Plans({"attn/qkv": attn["qkv"], "attn/proj": attn["proj"], "mlp": mlp})

    @nn.nowrap
    def _attention(self, **kwargs) -> MultiHeadAttention:
        return MultiHeadAttention(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            causal=self.causal,
            rope=self.rope,
            rope_base=self.rope_base,
            attention_implementation=self.attention_implementation,
            **self._shared(),
            **kwargs,
        )

    @nn.nowrap
    def _mlp(self, features: int, **kwargs) -> LayerNormMLP:
        return LayerNormMLP(
            features=features,
            hidden_features=self.hidden_features,
            activation=self.activation,
            **self._shared(),
            **kwargs,
        )

    @nn.nowrap
    def _shared(self) -> dict[str, Any]:
        """The arguments that both children take."""
        return {
            "norm": self.norm,
            "epsilon": self.epsilon,
            "use_bias": self.use_bias,
            "dropout_rate": self.dropout_rate,
            "residual": True,
            "kernel_init": self.kernel_init,
            "bias_init": self.bias_init,
            "tensor_axis": self.tensor_axis,
            "sequence_parallel": self.sequence_parallel,
            "overlap": self.overlap,
            "recipe": self.recipe,
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
        }
