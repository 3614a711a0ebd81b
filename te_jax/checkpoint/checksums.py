"""Checksums of leaves: what comes back from storage is what was saved, or an error.

Storage checks its own index, not the bits of arrays. A checksum of an array is the sum over its elements, modulo 2**32,
of a hash of the element's bits and of its place; twice, with two seeds. A sum has no order, so that each device sums
what it holds, and an array may come back onto another mesh. It costs one pass over memory. A difference in one element
is always found, other damage but for one part in 2**64.

Small arrays in this process's host memory are summed by NumPy, without compiling; others where they are. Both give the
same sums.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from te_jax.checkpoint.trees import named_leaves

_SEEDS = (0x243F6A88, 0x85A308D3)
_SMALL = 1 << 18  # elements; NumPy makes several copies, XLA none


def checksums(tree: Any) -> dict[str, str]:
    """{path of a leaf: 16 hexadecimal digits} of a tree of arrays and numbers, paths joined by "/"."""
    sums = jax.device_get({name: _sums(leaf) for name, leaf in named_leaves(tree).items()})
    return {name: "".join(f"{int(half):08x}" for half in pair) for name, pair in sums.items()}


def _sums(leaf: Any) -> Any:
    """uint32[2] of one leaf, on its devices or by NumPy."""
    if not isinstance(leaf, jax.Array):
        return _sums_of_words(np, _host_words(np.asarray(leaf)))
    on_host = leaf.is_fully_addressable and all(device.platform == "cpu" for device in leaf.devices())
    if on_host and leaf.size <= _SMALL:
        return _sums_of_words(np, _host_words(np.asarray(leaf)))
    if leaf.sharding.memory_kind == "pinned_host":
        leaf = jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))
    return _device_sums(leaf)


@jax.jit
def _device_sums(x: jax.Array) -> jax.Array:
    return _sums_of_words(jnp, _device_words(x))


def _sums_of_words(xp: ModuleType, words: Any) -> Any:
    """words: uint32[...]. The hash is the finalizer of MurmurHash3, a bijection of 32 bits."""
    words = words if words.ndim else words.reshape(1)  # NumPy's scalars warn where its arrays wrap around
    place = _places(xp, words.shape) * np.uint32(0x9E3779B1)
    sums = []
    for seed in _SEEDS:
        h = words ^ (place + np.uint32(seed))
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        sums.append((h ^ (h >> np.uint32(16))).sum(dtype=np.uint32))
    return xp.stack(sums)


def _places(xp: ModuleType, shape: tuple[int, ...]) -> Any:
    """uint32[shape]: the place of each element in row-major order, modulo 2**32; on devices without a reshape."""
    if xp is np:
        return np.arange(math.prod(shape), dtype=np.uint64).astype(np.uint32).reshape(shape)
    place = jnp.zeros(shape, np.uint32)
    for dim in range(len(shape)):
        stride = np.uint32(math.prod(shape[dim + 1 :]) % 2**32)
        place = place + jax.lax.broadcasted_iota(np.uint32, shape, dim) * stride
    return place


def _host_words(x: np.ndarray) -> np.ndarray:
    x = x.astype(x.dtype.newbyteorder("="), copy=False)
    if _is_narrow(x.dtype):
        x = x.astype(np.float32)
    size = x.dtype.itemsize
    if size <= 4:
        return np.ascontiguousarray(x).view(f"u{size}").reshape(x.shape).astype(np.uint32)
    return np.ascontiguousarray(x).view(np.uint32).reshape(*x.shape, size // 4)


def _device_words(x: jax.Array) -> jax.Array:
    if x.dtype == np.bool_:
        return x.astype(np.uint32)
    if _is_narrow(x.dtype):
        x = x.astype(np.float32)
    if jnp.issubdtype(x.dtype, np.complexfloating):
        parts = [jax.lax.bitcast_convert_type(part, np.uint32) for part in (x.real, x.imag)]
        words = jnp.stack(parts, x.ndim)  # [..., 2], or [..., 2, 2] of complex128
        return words.reshape(*x.shape, x.dtype.itemsize // 4)
    size = x.dtype.itemsize
    if size <= 4:
        return jax.lax.bitcast_convert_type(x, f"uint{8 * size}").astype(np.uint32)
    return jax.lax.bitcast_convert_type(x, np.uint32)


def _is_narrow(dtype: Any) -> bool:
    """Types of less than a byte, which float32 holds exactly."""
    if jnp.issubdtype(dtype, np.integer):
        return jnp.iinfo(dtype).bits < 8
    return jnp.issubdtype(dtype, np.floating) and jnp.finfo(dtype).bits < 8
