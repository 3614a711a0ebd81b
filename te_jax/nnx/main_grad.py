"""Buffers of main gradients (te_jax.main_grad) on their way to the linears of nnx modules: Variables beside kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx, traverse_util

from te_jax.ops.main_grad import MainGrad

_NAME = "kernel_main_grad"


class MainGradBuffer(nnx.Variable):
    """The ``MainGrad`` of the kernel beside it. So whatever nnx does to the kernel, as in a scan, it does to it too."""


def attach(model: Any, buffers: Mapping[str, Any]) -> None:
    """Puts buffers beside their kernels.

    Args:
      model: an nnx module that is new in this trace.
      buffers: the collection ``main_grad``.
    """
    nodes = {tuple(map(str, path)): node for path, node in nnx.iter_graph(model)}
    flat: Any = traverse_util.flatten_dict(dict(buffers), is_leaf=lambda _, node: isinstance(node, MainGrad))
    for path, buffer in flat.items():
        setattr(nodes[path[:-1]], _NAME, MainGradBuffer(buffer))


def collection(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The collection ``main_grad`` of a module's tree of buffers."""
    if isinstance(found := tree.get(_NAME), MainGradBuffer):
        return {"kernel": found.get_raw_value()}
    return {name: collection(inner) for name, inner in tree.items()}
