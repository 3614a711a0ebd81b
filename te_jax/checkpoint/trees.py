"""Trees on their way to and from orbax: what may be stored, and whether what is stored is what is wanted.

Orbax casts silently to the dtype of the target, from FP8 without its scale too, joins paths with "." so that two leaves
can collide, and fills what it doesn't find with placeholders. None of it can happen here: names, shapes and dtypes
are compared before anything is read.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from te_jax.errors import check_type, check_value, message

_SHOWN = 6  # leaves named in an error


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves by their paths, joined by "/"."""
    return {"/".join(keys(path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def storable(op: str, item: str, tree: Any) -> Any:
    """The tree with leaves that orbax stores: typed random keys as their data, NumPy scalars as arrays.

    Raises:
      TypeError: a leaf is not an array of a dtype that can be stored, or a number.
      ValueError: a name contains ".", an array is empty, or an int has more than 64 bits.
    """

    def convert(path: Any, leaf: Any) -> Any:
        name = f"{item}/{'/'.join(keys(path))}"
        check_value(not any("." in key for key in keys(path)), op, name, "names without '.'", name)
        if _is_key(leaf):
            return jax.random.key_data(leaf)
        if isinstance(leaf, np.generic):
            leaf = np.asarray(leaf)
        if isinstance(leaf, int):  # True and False too
            check_value(-(2**63) <= leaf < 2**63, op, name, "an int of 64 bits", leaf)
        if isinstance(leaf, (int, float)):
            return leaf
        ok = isinstance(leaf, (jax.Array, np.ndarray)) and not isinstance(leaf, jax.core.Tracer)
        check_type(ok, op, name, "an array or a number (bool, int, float)", type(leaf).__name__)
        check_type(_is_storable(leaf.dtype), op, name, "an array of a dtype that orbax stores", str(leaf.dtype))
        check_value(leaf.size > 0, op, name, "an array with elements", f"shape {list(leaf.shape)}")
        return leaf

    return jax.tree_util.tree_map_with_path(convert, tree)


def _is_storable(dtype: Any) -> bool:
    try:
        tensorstore.dtype(np.dtype(dtype))
    except (ValueError, AttributeError, TypeError):  # whatever it says of one that it doesn't know
        return False
    return np.dtype(dtype) != np.dtype(object)


def abstract(tree: Any) -> Any:
    """What orbax is asked for: shapes, dtypes and shardings of the target; NumPy arrays and numbers as they are.

    A `jax.ShapeDtypeStruct` without sharding is put on the default device.
    """

    def convert(leaf: Any) -> Any:
        if _is_key(leaf):
            data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
            # A key's data has one dimension more, which no mesh axis splits.
            named = isinstance(leaf.sharding, jax.sharding.NamedSharding)
            return jax.ShapeDtypeStruct(
                data.shape, data.dtype, sharding=leaf.sharding if named else _default_sharding()
            )
        if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or _default_sharding())
        return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf

    return jax.tree.map(convert, tree)


def restored(tree: Any, target: Any) -> Any:
    """The tree as the target has it: random keys typed again, on the target's sharding."""

    def convert(leaf: Any, wanted: Any) -> Any:
        if _is_key(wanted):
            keys = jax.random.wrap_key_data(leaf, impl=_key_impl(wanted))
            return jax.device_put(keys, wanted.sharding) if wanted.sharding else keys
        return leaf[()] if isinstance(wanted, np.generic) else leaf

    return jax.tree.map(convert, tree, target)


def check_matches(op: str, item: str, metadata: Any, target: Any, hint: str = "") -> None:
    """Raises a ValueError naming each leaf where the stored item and the target differ in name, shape or dtype.

    Args:
      hint: what to do about it, a last line of the error.
    """
    stored, wanted = named_leaves(metadata), named_leaves(target)
    problems = [
        message(op, f"{item}/{name}", f"{_describe(stored[name])} (checkpoint)", "no such leaf (target)")
        for name in stored.keys() - wanted.keys()
    ]
    problems += [
        message(op, f"{item}/{name}", "no such leaf (checkpoint)", f"{_describe(wanted[name])} (target)")
        for name in wanted.keys() - stored.keys()
    ]
    for name in stored.keys() & wanted.keys():
        have, want = _describe(stored[name]), _describe(wanted[name])
        if have != want:
            problems.append(message(op, f"{item}/{name}", f"{have} (checkpoint)", f"{want} (target)"))
    check_none(sorted(problems), hint)


def check_none(problems: list[str], hint: str = "") -> None:
    """Raises a ValueError with the first of them unless there are none."""
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise ValueError("\n".join(problems[:_SHOWN] + more + ([hint] if hint else [])))


def check_concrete(op: str, item: str, tree: Any) -> None:
    """Raises unless every leaf is there: orbax has placeholders for some that it doesn't find."""
    for name, leaf in named_leaves(tree).items():
        if isinstance(leaf, jax.ShapeDtypeStruct) or leaf is ...:
            raise RuntimeError(message(op, f"{item}/{name}", "an array", repr(leaf)))


def _describe(leaf: Any) -> str:
    """dtype[shape], the same for a stored leaf's metadata and for what it was; numbers by their kind."""
    if isinstance(leaf, bool):
        return "bool"
    if isinstance(leaf, int):
        return "int"
    if isinstance(leaf, float):
        return "float"
    # Orbax's metadata of Python numbers, which it stores as 64 bits.
    if type(leaf).__name__ == "ScalarMetadata":
        return {"b": "bool", "i": "int", "f": "float"}[np.dtype(leaf.dtype).kind]
    return f"{jnp.dtype(leaf.dtype).name}{list(leaf.shape)}"


def keys(path: Any) -> list[str]:
    """Names of a path, the same for dict keys, attributes, named tuples and positions."""
    return [str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", None)))) for entry in path]


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_impl(leaf: Any) -> Any:
    """The random number generator of a typed key, which may be abstract."""
    impl = []
    jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), leaf)
    return impl[0]


def _default_sharding() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
