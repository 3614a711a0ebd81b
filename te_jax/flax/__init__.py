"""Flax linen modules on op chains. Every linear in them takes a recipe; recipe=None leaves it unquantized."""

from te_jax.flax.attention import MultiHeadAttention
from te_jax.flax.dense import Dense, DenseGeneral, LayerNormDense
from te_jax.flax.fused_projections import join_projections, split_projections
from te_jax.flax.grouped import GroupedDense
from te_jax.flax.mlp import LayerNormMLP
from te_jax.flax.rotary import apply_rotary
from te_jax.flax.stack import LayerStack
from te_jax.flax.train_state import TrainState
from te_jax.flax.transformer import TransformerLayer

__all__ = [
    "Dense",
    "DenseGeneral",
    "GroupedDense",
    "LayerNormDense",
    "LayerNormMLP",
    "LayerStack",
    "MultiHeadAttention",
    "TrainState",
    "TransformerLayer",
    "apply_rotary",
    "join_projections",
    "split_projections",
]
