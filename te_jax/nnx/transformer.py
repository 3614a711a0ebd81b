"""MultiHeadAttention and TransformerLayer as native nnx modules."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer
from jax import Array

from te_jax import flax as linen
from te_jax.flax.dense import default_bias_init, default_kernel_init
from te_jax.nnx.initializers import wrapped
from te_jax.nnx.layers import check_features, row
from te_jax.nnx.module import Module
from te_jax.recipe import Recipe


class _OnSequences(Module):
    """A module on sequences of tokens.

    Attributes:
      in_features: C, of x and of y.
    """

    in_features: int

    def __call__(
        self,
        x: Array,
        *,
        positions: Array | None = None,
        deterministic: bool | None = None,
        use_running_average: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
    ) -> Array:
        """x [B, T, C] or [T, C], positions [B, T] or [T] (default 0..T-1) -> the shape of x, in ``dtype``.

        Other arguments as in ``LayerNormMLP``.
        """
        check_features(type(self).__name__, x, self.in_features)
        deterministic = self._is_deterministic(deterministic)
        frozen = use_running_average
        return self._call(x, positions=positions, deterministic=deterministic, use_running_average=frozen, rngs=rngs)


class MultiHeadAttention(_OnSequences):
    """Self-attention: y = attn_proj(attention(qkv_linear([norm] x))) [+ x], for x [B, T, C] or [T, C].

    Variables: those of ``te.flax.MultiHeadAttention``, under ``qkv`` and ``proj``.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = False,
        rope: bool = False,
        rope_base: float = 10000.0,
        norm: str | None = None,
        epsilon: float = 1e-6,
        use_bias: bool = False,
        dropout_rate: float = 0.0,
        residual: bool = False,
        attention_implementation: Literal["xla", "cudnn"] | None = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        tensor_axis: str | None = None,
        sequence_parallel: bool = False,
        overlap: str = "auto",
        recipe: Recipe | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the variables.

        Args:
          in_features: C, features of x and of y.
          num_heads, ..., attention_implementation: as in ``te.flax.MultiHeadAttention``.
          tensor_axis, sequence_parallel, overlap: as in ``te.flax.MultiHeadAttention``, parameters as in ``Dense``.
          kernel_init, bias_init, recipe, dtype, param_dtype: as in ``Dense``.
          rngs: ``rngs.params()`` initialises; with dropout, ``rngs.dropout`` is forked.

        Raises:
          ValueError: as ``te.flax.MultiHeadAttention``.
        """
        definition = linen.MultiHeadAttention(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            causal=causal,
            rope=rope,
            rope_base=rope_base,
            norm=norm,
            epsilon=epsilon,
            use_bias=use_bias,
            dropout_rate=dropout_rate,
            residual=residual,
            attention_implementation=attention_implementation,
            kernel_init=wrapped(kernel_init),
            bias_init=wrapped(bias_init),
            tensor_axis=tensor_axis,
            sequence_parallel=sequence_parallel,
            overlap=overlap,
            recipe=recipe,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        self.in_features = in_features
        x = row("MultiHeadAttention", in_features, definition)
        super().__init__(definition, x, has_dropout=dropout_rate > 0, rngs=rngs)


class TransformerLayer(_OnSequences):
    """h = x + attn(norm(x)); y = h + mlp(norm(h)), for x [B, T, in_features] or [T, in_features].

    Variables: those of ``te.flax.TransformerLayer``, under ``attn/{qkv,proj}`` and ``mlp``.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        hidden_features: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        activation: str = "swiglu",
        norm: str = "rmsnorm",
        epsilon: float = 1e-6,
        use_bias: bool = False,
        causal: bool = True,
        rope: bool = True,
        rope_base: float = 10000.0,
        dropout_rate: float = 0.0,
        attention_implementation: Literal["xla", "cudnn"] | None = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        tensor_axis: str | None = None,
        sequence_parallel: bool = False,
        overlap: str = "auto",
        recipe: Recipe | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the variables.

        Args:
          in_features: features of x and of y.
          num_heads, hidden_features, ..., attention_implementation: as in ``te.flax.TransformerLayer``.
          tensor_axis, sequence_parallel, overlap: as in ``te.flax.TransformerLayer``, parameters as in ``Dense``.
          kernel_init, bias_init, recipe, dtype, param_dtype: as in ``Dense``.
          rngs: ``rngs.params()`` initialises; with dropout, ``rngs.dropout`` is forked.

        Raises:
          ValueError: as ``te.flax.TransformerLayer``.
        """
        definition = linen.TransformerLayer(
            num_heads=num_heads,
            hidden_features=hidden_features,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            activation=activation,
            norm=norm,
            epsilon=epsilon,
            use_bias=use_bias,
            causal=causal,
            rope=rope,
            rope_base=rope_base,
            dropout_rate=dropout_rate,
            attention_implementation=attention_implementation,
            kernel_init=wrapped(kernel_init),
            bias_init=wrapped(bias_init),
            tensor_axis=tensor_axis,
            sequence_parallel=sequence_parallel,
            overlap=overlap,
            recipe=recipe,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        self.in_features = in_features
        x = row("TransformerLayer", in_features, definition)
        super().__init__(definition, x, has_dropout=dropout_rate > 0, rngs=rngs)
