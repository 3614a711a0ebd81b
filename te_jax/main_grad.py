"""Main gradients: float32 buffers that wgrad GEMMs accumulate weight gradients in. See docs/numerics.md.

``te.accumulate_gradients(..., main_grad=True)`` does all of it. For loops of one's own, a call at a time:

  buffers = te.main_grad.init(variables["params"])  # overwritten by the first call
  for microbatch in microbatches:
      grads = jax.grad(loss)({**variables, "main_grad": buffers}, microbatch)
      sums = ...  # of the other gradients, as ever
      buffers = te.main_grad.following(grads["main_grad"])  # the next call adds to them
  grads = te.main_grad.merge(sums, buffers)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util
from flax.core import unfreeze
from jax import Array

from te_jax import compat
from te_jax.errors import check_type, check_value
from te_jax.ops.main_grad import MARK, MainGrad, Mode, is_main_grad
from te_jax.quant.state import MAIN_GRAD as COLLECTION
from te_jax.quant.state_trees import rebuild

__all__ = ["COLLECTION", "MARK", "MainGrad", "Mode", "following", "init", "is_kernel", "merge"]


def is_kernel(path: tuple[str, ...], leaf: Any) -> bool:
    """Whether a parameter may be the kernel of a linear: its name is ``kernel``, it is of a floating dtype."""
    return path[-1] == "kernel" and hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def init(params: Any, mode: Mode = "overwrite") -> dict[str, Any]:
    """Buffers for all kernels, the collection ``main_grad`` of variables.

    Those of kernels that no te_jax linear uses, or several, have to be taken out again: a call leaves zeros in a buffer
    that it does not use, and a second use in a call is an error. So have those of kernels that the loss computes with
    before a linear gets them (frozen, scaled, adapted by LoRA): what is in a buffer is the gradient of what the linear
    was given. ``te.accumulate_gradients`` finds that out by itself.

    Args:
      params: the collection ``params``.
      mode: what the first call does with them, see ``MainGrad``.

    Returns:
      A ``MainGrad`` of zeros at the place of each ``kernel``, sharded as it is.
    """
    flat = traverse_util.flatten_dict(unfreeze(params))
    kernels = {path: nn.meta.unbox(leaf) for path, leaf in flat.items()}
    return traverse_util.unflatten_dict(
        {
            path: MainGrad(compat.zeros_like(kernel, jnp.float32), mode)
            for path, kernel in kernels.items()
            if is_kernel(path, kernel)
        }
    )


def following(buffers: Any, mode: Mode = "add") -> Any:
    """The buffers that the next call is given: the cotangents of those that the last one was given."""
    return jax.tree.map(lambda node: MainGrad(node.buffer, mode), buffers, is_leaf=is_main_grad)


def merge(grads: Mapping[str, Any], buffers: Any) -> Any:
    """Gradients for an optimizer: in the place of each kernel's the sum of its buffer and of what it has beside it.

    Args:
      grads: gradients of variables, by collection, summed as the buffers are; their own ``main_grad`` is dropped.
      buffers: the collection ``main_grad``.

    Raises:
      ValueError: a buffer without a gradient in ``grads``.
    """
    check_type(isinstance(grads, Mapping), "main_grad.merge", "grads", "a dict of collections", type(grads).__name__)
    flat = traverse_util.flatten_dict(unfreeze(grads["params"]))
    nodes: dict[Any, Any] = traverse_util.flatten_dict(unfreeze(buffers), is_leaf=lambda _, x: is_main_grad(x))
    for path, node in nodes.items():
        name = "/".join(("params", *path))
        check_value(path in flat, "main_grad.merge", "grads", f"one of {name}, which has a buffer", "none")
        add = functools.partial(_add, buffer=node.buffer)
        flat[path] = jax.tree.map(add, flat[path])  # a leaf, or a box around one
    rest = {name: value for name, value in grads.items() if name != COLLECTION}
    return rebuild(grads, {**rest, "params": rebuild(grads["params"], traverse_util.unflatten_dict(flat))})


def _add(grad: Array, buffer: Array) -> Array:
    return (grad.astype(jnp.float32) + buffer).astype(grad.dtype)
