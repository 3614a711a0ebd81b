"""A decoder-only transformer in which every linear is a te_jax op chain."""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen as nn
from flax.typing import Dtype
from jax import Array

import te_jax as te

# What a layer of the stack has of its own.
STACKED = ("params", te.state.COLLECTION, te.state.KERNELS, te.main_grad.COLLECTION, te.health.COLLECTION)


class LanguageModel(nn.Module):
    """tokens [B, T] -> logits [B, T, vocabulary], float32.

    Embedding, ``layers`` pre-norm transformer layers under one ``nn.scan`` (parameters and FP8 state stacked over
    layers), final norm and an untied head.
    """

    vocabulary: int
    layers: int
    width: int
    heads: int
    kv_heads: int | None = None
    hidden_features: int | None = None
    """Of the MLPs; None: ``mlp_features(width)``."""
    recipe: te.Recipe | None = None
    dtype: Dtype = jnp.bfloat16
    remat: bool = False
    tensor_axis: str | None = None
    """Inside of ``shard_map`` over it the layers' linears are split over its devices, and tokens [B, T / devices] are
    each device's own. Embedding and head are the same on all."""
    overlap: str = "auto"
    """Of the layers' collectives, as of ``te.ops.AllGather``."""

    @nn.compact
    def __call__(self, tokens: Array, *, deterministic: bool = True) -> Array:
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype, name="embed")(tokens)  # [B, T, C]
        layer = nn.remat(ScanLayer, prevent_cse=False, static_argnums=(2,)) if self.remat else ScanLayer
        layers = nn.scan(
            layer,
            length=self.layers,
            variable_axes=dict.fromkeys(STACKED, 0),
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            metadata_params={nn.PARTITION_NAME: None},
        )(**layer_config(self), name="layers")
        x, _ = layers(x, deterministic)
        head = te.flax.LayerNormDense(
            self.vocabulary, use_bias=False, recipe=self.recipe, dtype=self.dtype, name="head"
        )
        return head(x).astype(jnp.float32)


def layer_config(model: LanguageModel) -> dict:
    """The arguments of one of the model's transformer layers."""
    return {
        "num_heads": model.heads,
        "num_kv_heads": model.kv_heads,
        "hidden_features": model.hidden_features or mlp_features(model.width),
        "recipe": model.recipe,
        "dtype": model.dtype,
        "tensor_axis": model.tensor_axis,
        "sequence_parallel": model.tensor_axis is not None,
        "overlap": model.overlap,
    }


class ScanLayer(te.flax.TransformerLayer):
    """A transformer layer as nn.scan wants it: (carry, ...) -> (carry, output)."""

    @nn.compact
    def __call__(self, x: Array, deterministic: bool) -> tuple[Array, None]:
        return super().__call__(x, deterministic=deterministic), None


def mlp_features(width: int) -> int:
    """About 8/3 of the width, as a gated MLP wants to have the size of a plain 4x one, in multiples of 128."""
    return max(128, round(8 * width / 3 / 128) * 128)
