"""Where offloaded tensors go, and whether this process can put them there without waiting."""

from __future__ import annotations

from typing import Any

import jax

from te_jax.errors import check_value

PINNED = "pinned_host"


def pinned_memory() -> tuple[bool, tuple[str, ...]]:
    """Whether the default device can reach pinned host memory, and the kinds of memory it can reach."""
    kinds = tuple(sorted(memory.kind for memory in jax.local_devices()[0].addressable_memories()))
    return PINNED in kinds, kinds


def check_pinned_memory() -> None:
    """Raises ValueError where tensors can't be offloaded."""
    ok, kinds = pinned_memory()
    expected = f"a device with {PINNED} memory"
    check_value(ok, "remat.policy", "offload", expected, f"{jax.default_backend()} with {', '.join(kinds) or 'none'}")


def warn_unless_hidden(policy: Any) -> None:
    pass
