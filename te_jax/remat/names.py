"""The names of what a backward pass reads: remat policies choose by them.

A module of a chain is known by the last part of its Flax path (an op's ``name``; of a module whose parameters are its
own, that module's). What it saves has the names

  <module>_input        what it saves of its input: Q(x)^T in FP8 of a quantized linear, x itself of others
  <module>_input_scale  the scales and the amax of an ``_input`` in FP8: small, kept on the device wherever it goes
  <module>_input_stats  a norm's mean and 1 / standard deviation: 4 bytes a token, always kept on the device
  <module>_kernel       Q(kernel) in FP8, unless it was quantized before the call (te.quantize_kernels)
  <module>_kernel_scale its scales and its amax

and attention has ``core_attn_input`` (query, key and value as it reads them) and ``context`` (its result and softmax
statistics). MaxText's names of the same tensors are understood too.
"""

from __future__ import annotations

from typing import TypeVar

from te_jax import compat
from te_jax.errors import check_value

T = TypeVar("T")

LINEARS = ("qkv_linear", "attn_proj", "fc1", "fc2", "router_fc1", "expert_fc1", "expert_fc2")
MODULES = ("attn_norm", "core_attn", "mlp_norm", "act", "moe_act", *LINEARS)
CONTEXT = "context"

# MaxText's spelling -> the tensor here. A sum with the residual is computed in the GEMM before it, so what MaxText
# names before the sum is here the sum itself.
MAXTEXT = {
    "decoder_layer_input": "attn_norm_input",
    "query_proj": "core_attn_input",
    "key_proj": "core_attn_input",
    "value_proj": "core_attn_input",
    "qkv_proj": "core_attn_input",
    "out_proj": "mlp_norm_input",
    "attention_out": "mlp_norm_input",
    "mlpwi": "act_input",
    "mlpwi_0": "act_input",
    "mlpwi_1": "act_input",
    "moe_mlpwi_0": "moe_act_input",
    "moe_mlpwi_1": "moe_act_input",
}
# Spellings of MaxText's of which a model has one, with fused projections or without; and two of its tensors that are
# one here. So "remat" of one says nothing against keeping the other.
_FUSED_AND_APART = (
    (("qkv_proj",), ("query_proj", "key_proj", "value_proj")),
    (("mlpwi",), ("mlpwi_0", "mlpwi_1")),
    (("out_proj",), ("attention_out",)),
)
ALTERNATIVES = (*_FUSED_AND_APART, *((apart, fused) for fused, apart in _FUSED_AND_APART))
# What linears return, MaxText's names too. No op here reads it in its backward pass, so it has the name only where
# te.remat.name gives it: in a mixture of experts, whose weights' gradient reads it.
RESULTS = ("mlpwo", "moe_mlpwo")

TENSORS = (*(f"{m}_input" for m in MODULES), *(f"{m}_kernel" for m in LINEARS), CONTEXT, *RESULTS)
NAMES: tuple[str, ...] = tuple(sorted({*MODULES, *TENSORS, *MAXTEXT}))
"""Every name that ``te.remat.policy`` knows: of modules (meaning their inputs), of tensors, and MaxText's."""


def named(x: T, module: str, tensor: str) -> T:
    """x (an array, or a tree of them), named ``<module>_<tensor>`` for remat policies."""
    return compat.checkpoint_name(x, f"{module}_{tensor}")


def name(x: T, name: str) -> T:
    """x (an array, or a tree of them) under a name that policies choose by.

    For what is no op: a router in plain Flax, a function between chains. A module's name is that of its input:
    ``te.remat.name(x, "router_fc1")``. Use the result in the place of x: what is computed from x itself isn't
    recomputed from a tensor that was saved.
    """
    check_value(isinstance(name, str) and name != "", "remat.name", "name", "a name", repr(name))
    return compat.checkpoint_name(x, tensor_of(name))


def tensor_of(name: str) -> str:
    """The tensor that a name means: a module's is its input."""
    return f"{name}_input" if name in MODULES else MAXTEXT.get(name, name)


def scale_of(tensor: str) -> str:
    """The name of the scales and the amax that belong to a tensor."""
    return f"{tensor}_scale"


def are_stats(tensor: str) -> bool:
    """Whether these are the statistics of a norm, for which alone the norm would run again."""
    return tensor.endswith("_input_stats")
