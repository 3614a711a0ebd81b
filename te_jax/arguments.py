"""Arguments of a module, for functions that trace it: arrays apart from what is not one, as flags are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


def split_arrays(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """(the arrays of a tree, the function that puts others in their places). ``jax.ShapeDtypeStruct`` counts as one."""
    leaves, structure = jax.tree.flatten(tree)
    is_array = [isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct) for leaf in leaves]

    def rebuild(arrays: Sequence[Any]) -> Any:
        given = iter(arrays)
        return structure.unflatten(next(given) if array else leaf for leaf, array in zip(leaves, is_array, strict=True))

    return [leaf for leaf, array in zip(leaves, is_array, strict=True) if array], rebuild
