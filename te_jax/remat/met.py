"""What policies have met: the names that tensors of a traced program had, and how large these were.

JAX asks a policy about every name while it traces a gradient, and tells nobody when that was the last one. So what was
asked is kept here, for each policy and for the whole process: JAX remembers what it has traced, and a program that it
traces again may ask about a part of its names only.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Generator, Iterable, Mapping
from typing import Any

from te_jax.errors import message, warn

_SHOWN = 8  # names in a warning

_met: dict[Any, dict[str, int | None]] = {}  # policy -> name -> the most bytes, None where JAX told no size
_asked: contextvars.ContextVar[set[Any] | None] = contextvars.ContextVar("te_jax_policies_asked", default=None)


class UnusedNamesWarning(UserWarning):
    """A policy keeps tensors that no program has, or offloads none because all are smaller than ``min_bytes``."""


def record(policy: Any, name: str, size: int | None) -> None:
    """Enters that a policy was asked about a tensor of that name and size."""
    sizes = _met.setdefault(policy, {})
    before = sizes.get(name, 0)
    sizes[name] = None if size is None or before is None else max(size, before)
    if (asked := _asked.get()) is not None:
        asked.add(policy)


def of(policy: Any) -> Mapping[str, int | None]:
    """name -> the most bytes of a tensor that had it (None: not told), of all that the policy was asked about."""
    return dict(_met.get(policy, {}))


@contextlib.contextmanager
def asking() -> Generator[set[Any]]:
    """Yields the policies that are asked inside; filled by the traces there."""
    asked: set[Any] = set()
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


def warn_of(policies: Iterable[Any]) -> None:
    """Warns of names that a policy has never met, though it was asked."""
    for policy in policies:
        for text in problems(policy):
            warn(f"{text} (te.remat.report(policy) has all)", UnusedNamesWarning)


def unmet(policy: Any) -> list[str]:
    """The tensors of a policy that were never met. A name of ``extra_names`` is met as a tensor's or as a module's."""
    met = _met.get(policy, {})
    wanted = policy.save | policy.offload
    found = wanted & set(met)
    return sorted(name for name in wanted - found if not {f"{name}_input", name.removesuffix("_input")} & found)


def problems(policy: Any) -> list[str]:
    """What is to be said of a policy that was asked."""
    sizes, found = _met.get(policy, {}), []
    if missing := unmet(policy):
        others = sorted(name for name in sizes if not name.endswith(("_scale", "_stats")))
        shown = ", ".join(others[:_SHOWN]) + (", ..." if len(others) > _SHOWN else "")
        got = f"none of {', '.join(missing)}; there are {shown}"
        found.append(message("remat.policy", "save and offload", "names of tensors of the program", got))
    offered = [sizes[name] for name in policy.offload if name in sizes]
    if offered and not any(size is None or size >= policy.min_bytes for size in offered):
        most = max(size for size in offered if size is not None)
        expected = "some tensor of offload of that size (smaller ones stay on the device)"
        got = f"{policy.min_bytes}, where the largest has {most} bytes"
        found.append(message("remat.policy", "min_bytes", expected, got))
    return found
