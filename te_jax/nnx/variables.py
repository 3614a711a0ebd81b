"""Between an nnx model and linen's dict of collections, which is what checkpoints hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from te_jax.errors import check_type, check_value, message
from te_jax.nnx.state import ANY_FP8_STATE
from te_jax.quant.state import COLLECTION

_SHOWN = 6  # variables named in an error


def to_variables(model: Any) -> dict[str, Any]:
    """The model's variables as linen has them: {"params": ..., "_overwrite_with_gradient": ..., ...}, plain dicts.

    For ``te.checkpoint`` and plain orbax: a checkpoint of this is that of the linen model with the same module names.
    Random streams (``nnx.RngState``) are left out, as linen keeps none: save ``nnx.state(model, nnx.RngState)`` among
    the checkpoint's extras if dropout is to go on where it was.

    Args:
      model: an nnx module, also one of ``nnx.eval_shape``, whose leaves are ``jax.ShapeDtypeStruct``.

    Returns:
      Collection (``params`` for nnx.Param, FP8 state for FP8State, nnx's name for other types) -> path -> array.
    """
    collections: dict[str, Any] = {}
    for path, variable in _flat(model).items():
        collection = _collection(variable)
        if collection is None:
            continue
        node = collections.setdefault(collection, {})
        for key in path[:-1]:
            node = node.setdefault(str(key), {})
        node[str(path[-1])] = variable.get_raw_value()
    return collections


def update(model: Any, variables: Mapping[str, Any]) -> None:
    """Puts variables, such as `to_variables` gives or linen's ``init``, into the model. All are checked first.

    Args:
      model: an nnx module. Random streams are left as they are.
      variables: a dict of collections with arrays of the model's paths, shapes and dtypes.

    Raises:
      ValueError: a variable is missing, or isn't one of the model's, or has another shape or dtype.
    """
    op = "nnx.update"
    ok = isinstance(variables, Mapping) and not isinstance(variables, nnx.State)
    expected = "a dict of collections (nnx.update takes an nnx.State)"
    check_type(ok, op, "variables", expected, type(variables).__name__)
    have: dict[tuple[str, ...], Any] = {}
    for path, variable in _flat(model).items():
        collection = _collection(variable)
        if collection is not None:
            have[collection, *map(str, path)] = variable
    given = {
        tuple(str(getattr(entry, "key", entry)) for entry in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(dict(variables))
    }
    problems = []
    for path in sorted({*have, *given}):
        expected, got = (_describe(leaves.get(path)) for leaves in (have, given))
        if expected != got:
            problems.append(message(op, "/".join(path), f"{expected} (model)", f"{got} (variables)"))
    more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    if problems:
        raise ValueError("\n".join(problems[:_SHOWN] + more))
    for path, variable in have.items():
        variable.set_value(given[path])


def _flat(model: Any) -> dict[tuple[Any, ...], nnx.Variable]:
    nodes = {path: node for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable)}
    check_value(len(nodes) > 0, "nnx.to_variables", "model", "an nnx module with variables", type(model).__name__)
    return nodes


def _collection(variable: nnx.Variable) -> str | None:
    """Linen's name for the collection of a variable; None for random streams."""
    if isinstance(variable, nnx.RngState):
        return None
    if isinstance(variable, nnx.Param):
        return "params"
    if isinstance(variable, ANY_FP8_STATE):
        return COLLECTION
    return nnx.variable_name_from_type(type(variable), allow_register=True)


def _describe(leaf: Any) -> str:
    if leaf is None:
        return "no such variable"
    leaf = leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
    return f"{leaf.dtype}{list(leaf.shape)}"
