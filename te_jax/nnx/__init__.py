"""Native flax.nnx modules on op chains, with the plans, parameters and checkpoints of ``te_jax.flax``.

FP8 state is updated by calls of the modules: ``nnx.grad`` and ``nnx.Optimizer(wrt=nnx.Param)`` work as with any module,
and then dy has current scaling. With ``te.nnx.grad`` in place of ``nnx.grad`` it has delayed scaling too. docs/nnx.md.
"""

from te_jax.nnx.accumulate import accumulate_gradients
from te_jax.nnx.grad import grad, value_and_grad
from te_jax.nnx.grouped import GroupedDense
from te_jax.nnx.layers import Dense, DenseGeneral, LayerNormDense, LayerNormMLP
from te_jax.nnx.module import Module
from te_jax.nnx.sequential import Sequential
from te_jax.nnx.stack import LayerStack
from te_jax.nnx.state import FP8State
from te_jax.nnx.transformer import MultiHeadAttention, TransformerLayer
from te_jax.nnx.variables import to_variables, update

__all__ = [
    "Dense",
    "DenseGeneral",
    "FP8State",
    "GroupedDense",
    "LayerNormDense",
    "LayerNormMLP",
    "LayerStack",
    "Module",
    "MultiHeadAttention",
    "Sequential",
    "TransformerLayer",
    "accumulate_gradients",
    "grad",
    "to_variables",
    "update",
    "value_and_grad",
]
