"""Parameters of fused projections, from modules without a ``tensor_axis`` to modules with one, and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from te_jax.errors import check_value
from te_jax.flax.layers import is_gated

_NAMES = ("kernel", "bias")


def split_projections(
    params: Any, *, num_heads: int, num_kv_heads: int | None = None, activation: str = "swiglu"
) -> Any:
    """The same parameters in the shapes that modules with a ``tensor_axis`` keep (docs/collective.md).

    Args:
      params: a tree of dicts, as of ``TransformerLayer``, stacked over layers or not; or one of the same structure in
        it, such as an optimizer's state. Only leaves of ``qkv_linear`` and ``fc1`` change.
      num_heads, num_kv_heads, activation: those of the layers.

    Raises:
      ValueError: a leaf that has no such parts.
    """
    groups = num_heads if num_kv_heads is None else num_kv_heads

    def qkv(path: str, x: Any) -> Any:
        *lead, features = x.shape
        heads = num_heads + 2 * groups
        check_value(features % heads == 0, "split_projections", path, f"a multiple of {heads} features", features)
        x = x.reshape(*lead, heads, features // heads)
        query, key, value = jnp.split(x, (num_heads, num_heads + groups), axis=-2)
        query = query.reshape(*lead, groups, num_heads // groups, features // heads)
        return jnp.concatenate([query, key[..., None, :], value[..., None, :]], axis=-2)

    def halves(path: str, x: Any) -> Any:
        *lead, features = x.shape
        check_value(features % 2 == 0, "split_projections", path, "an even number of features", features)
        return x.reshape(*lead, 2, features // 2)

    return _map(params, qkv, halves if is_gated(activation) else None)


def join_projections(
    params: Any, *, num_heads: int, num_kv_heads: int | None = None, activation: str = "swiglu"
) -> Any:
    """The reverse of ``split_projections``; arguments as there."""
    groups = num_heads if num_kv_heads is None else num_kv_heads

    def qkv(path: str, x: Any) -> Any:
        expected = f"[..., {groups}, {num_heads // groups + 2}, head_dim]"
        ok = x.ndim >= 3 and x.shape[-3:-1] == (groups, num_heads // groups + 2)
        check_value(ok, "join_projections", path, expected, f"shape {x.shape}")
        *lead, _, _, head_dim = x.shape
        query = x[..., :-2, :].reshape(*lead, num_heads, head_dim)
        x = jnp.concatenate([query, x[..., -2, :], x[..., -1, :]], axis=-2)
        return x.reshape(*lead, -1)

    def halves(path: str, x: Any) -> Any:
        ok = x.ndim >= 2 and x.shape[-2] == 2
        check_value(ok, "join_projections", path, "[..., 2, hidden_features]", f"shape {x.shape}")
        return x.reshape(*x.shape[:-2], -1)

    return _map(params, qkv, halves if is_gated(activation) else None)


def _map(params: Any, qkv: Any, fc1: Any) -> Any:
    """``params`` with the functions applied to kernels and biases below these names."""
    functions = {"qkv_linear": qkv, "fc1": fc1}

    def leaf(path: Any, x: Any) -> Any:
        keys = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        function = functions.get(keys[-2]) if len(keys) > 1 and keys[-1] in _NAMES else None
        return x if function is None else function("/".join(keys), x)

    return jax.tree_util.tree_map_with_path(leaf, params)
