"""Which parameters of another library's tree a te_jax parameter is made of, and back.

Rules map a prefix of te_jax's path to one of the other's, the longest prefix counts, and what isn't mapped has the same
name on both sides: ``{"mlp/fc1": "ffn/up"}``. A tuple concatenates along the output features, in order:
``{"attn/qkv/qkv_linear": ("attn/query", "attn/key", "attn/value")}``. A ``*`` in the other path stands for the layers
that te_jax has stacked along a first dimension, in the order of their numbers: ``{"layers": "layer_*"}``.

Dimensions that are next to one another may be one dimension on te_jax's side: [C, heads, D] is [C, heads * D].
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from te_jax.errors import check_type, check_value
from te_jax.quant.format import is_fp8

Rules = Mapping[str, str | Sequence[str]]


class Part(NamedTuple):
    """Where a parameter, or a part of its output features, is in the other tree: one path, or one for each layer."""

    paths: tuple[str, ...]
    stacked: bool


def flatten(tree: Any) -> dict[str, Any]:
    """Path, joined with "/", -> leaf; partitioning boxes are taken off."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "unbox"))
    unboxed = ((path, leaf.unbox() if hasattr(leaf, "unbox") else leaf) for path, leaf in leaves)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in unboxed}


def check(op: str, rules: Any) -> None:
    """Raises TypeError for rules that are none."""
    check_type(isinstance(rules, Mapping), op, "rules", "a dict of paths", type(rules).__name__)
    for ours, theirs in rules.items():
        many = isinstance(theirs, Sequence) and all(isinstance(path, str) for path in theirs)
        check_type(isinstance(ours, str) and many, op, f"rules[{ours!r}]", "a path or a tuple of paths", repr(theirs))


def check_used(op: str, ours: Mapping[str, Any], rules: Rules) -> None:
    """Raises a ValueError that names each rule that no te_jax parameter is below: a path that is spelled wrong."""
    idle = sorted(repr(key) for key in rules if not any(_is_below(name, key) for name in ours))
    expected = f"paths of te_jax parameters, or prefixes of some; they are {_few(ours)}"
    check_value(not idle, op, "rules", expected, f"{', '.join(idle)}, for which there is none")


def parts(op: str, name: str, other: Mapping[str, Any], rules: Rules) -> list[Part]:
    """The parts of the te_jax parameter ``name`` in the other tree.

    Raises:
      ValueError: one isn't there.
    """
    out = []
    for path in _mapped(name, rules):
        found = (path,) if "*" not in path else tuple(sorted(fnmatch.filter(other, path), key=_numbers))
        ok = all(each in other for each in found) and len(found) > 0
        near = sorted(other, key=lambda each: (-len(set(each.split("/")) & set(path.split("/"))), each))[:4]
        check_value(ok, op, name, f"{path!r} in the other tree (same name, or as the rules say)", f"none; near: {near}")
        out.append(Part(found, "*" in path))
    return out


def _mapped(name: str, rules: Rules) -> list[str]:
    key = _rule_of(name, rules)
    if key is None:
        return [name]
    rest = name[len(key) :].strip("/")
    value = rules[key]
    theirs: list[str] = [value] if isinstance(value, str) else list(value)
    return ["/".join(part for part in (path, rest) if part) for path in theirs]


def _rule_of(name: str, rules: Rules) -> str | None:
    """The rule that counts for a te_jax parameter: the longest prefix."""
    return max((key for key in rules if _is_below(name, key)), key=len, default=None)


def _is_below(name: str, prefix: str) -> bool:
    return prefix == "" or name == prefix or name.startswith(prefix + "/")


def _few(names: Any) -> str:
    listed = sorted(names)
    return ", ".join(listed[:8]) + (f", ... ({len(listed)} in all)" if len(listed) > 8 else "")


def _numbers(path: str) -> list[Any]:
    """For sorting layer_2 before layer_10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path)]


def gather(op: str, name: str, want: Any, found: Sequence[Part], other: Mapping[str, Any], cast: bool) -> jax.Array:
    """The parameter in ``want``'s shape and dtype.

    Raises:
      ValueError: shapes don't fit; TypeError: another dtype (without ``cast``), or FP8, whose scale isn't known here.
    """
    for path in (path for part in found for path in part.paths):
        dtype = other[path].dtype
        check_type(not is_fp8(dtype), op, name, "a parameter in high precision (FP8 needs its scale)", dtype)
        same = dtype == want.dtype or (cast and jnp.issubdtype(dtype, jnp.floating))
        check_type(same, op, name, f"dtype {want.dtype} (or cast=True)", f"{dtype} of {path}")
    stacked = found[0].stacked
    layers = len(found[0].paths) if stacked else 1
    expected, got = f"shape {list(want.shape)}", _shapes(found, other)
    check_value(not stacked or want.shape[:1] == (layers,), op, name, expected, f"{layers} layers: {got}")
    shape = tuple(want.shape[1:] if stacked else want.shape)
    out = []
    for layer in range(layers):
        merged = (_merged(jnp.asarray(other[part.paths[layer]]), shape, len(found) > 1) for part in found)
        pieces = [piece for piece in merged if piece is not None]
        value = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, -1) if pieces else jnp.zeros(())
        ok = len(pieces) == len(found) and value.shape == shape
        check_value(ok, op, name, expected, got)
        out.append(value.astype(want.dtype))
    return jnp.stack(out) if stacked else out[0]


def _merged(value: jax.Array, shape: tuple[int, ...], is_part: bool) -> jax.Array | None:
    """``value`` with neighbouring dimensions merged into those of ``shape``; the last one may be a part of it."""
    if not is_part and value.size != math.prod(shape):
        return None
    out, sizes = [], list(value.shape)
    for wanted in shape[:-1]:
        size = 1
        while sizes and size < wanted:
            size *= sizes.pop(0)
        if size != wanted:
            return None
        out.append(size)
    if not shape:
        return value if value.ndim == 0 else None
    if len(value.shape) < len(shape):
        return None
    return value.reshape(*out, math.prod(sizes))


def _shapes(found: Sequence[Part], other: Mapping[str, Any]) -> str:
    """ "[16, 32] at a/kernel and [16, 8] at b/kernel"; of stacked layers the first, if they are all alike."""
    paths = [part.paths for part in found]
    alike = all(len({tuple(other[path].shape) for path in each}) == 1 for each in paths)
    shown = [each[:1] if alike else each for each in paths]
    text = " and ".join(f"{list(other[path].shape)} at {path}" for each in shown for path in each)
    return text + (f" and {len(paths[0]) - 1} more layers" if alike and len(paths[0]) > 1 else "")


def scatter(
    op: str, name: str, value: Any, found: Sequence[Part], other: Mapping[str, Any], cast: bool
) -> dict[str, Any]:
    """The inverse of ``gather``: path in the other tree -> array in its shape and dtype."""
    value = jnp.asarray(value)
    check_type(not is_fp8(value.dtype), op, name, "a parameter in high precision (te.dequantize_params)", value.dtype)
    out: dict[str, Any] = {}
    stacked = found[0].stacked
    for layer in range(len(found[0].paths)):
        rest = value[layer] if stacked else value
        for i, part in enumerate(found):
            path = part.paths[layer]
            want = other[path]
            lead = math.prod(rest.shape[:-1])
            width = rest.shape[-1] if i == len(found) - 1 and rest.ndim else math.prod(want.shape) // max(lead, 1)
            piece, rest = (rest, rest) if len(found) == 1 else (rest[..., :width], rest[..., width:])
            ok = piece.size == math.prod(want.shape) and _merged(jnp.zeros(want.shape), piece.shape, False) is not None
            check_value(ok, op, name, f"as many elements as {_shapes(found, other)}", f"shape {list(value.shape)}")
            same = piece.dtype == want.dtype or (cast and jnp.issubdtype(want.dtype, jnp.floating))
            check_type(same, op, name, f"dtype {want.dtype} of {path} (or cast=True)", piece.dtype)
            out[path] = piece.reshape(want.shape).astype(want.dtype)
    layers = len(found[0].paths) if stacked else None
    check_value(layers is None or value.shape[0] == layers, op, name, f"{layers} layers", f"shape {list(value.shape)}")
    return out


def as_numpy(leaf: Any) -> np.ndarray:
    """A leaf of FP8 state in float32."""
    return np.asarray(jax.device_get(leaf), np.float32)
