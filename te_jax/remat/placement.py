"""Whether a program can offload, and whether the copies of what it offloads hide under its compute."""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Generator

import jax

from te_jax import compat, config
from te_jax.errors import check_value

PINNED = "pinned_host"
PIPELINING = "xla_gpu_enable_pipelined_host_offloading"

RIGHT_SINCE = (0, 11, 1)
"""The first jaxlib whose programs for CUDA read offloaded residuals of a scan in the order of its backward pass.

0.10.2 and 0.11.0 (compiled for an H200) read them in that of the forward pass: wrong gradients, without a word.
"""

_hiding: contextvars.ContextVar[bool] = contextvars.ContextVar("te_jax_hiding", default=False)


class ExposedCopiesWarning(UserWarning):
    """A program offloads, but is not compiled with the options that let its copies hide under compute."""


@contextlib.contextmanager
def hiding() -> Generator[None]:
    """Programs that are traced inside are compiled with ``te.remat.compiler_options()``: they don't warn."""
    token = _hiding.set(True)
    try:
        yield
    finally:
        _hiding.reset(token)


def memory_kinds() -> tuple[str, ...]:
    """The kinds of memory that the default device reaches."""
    return tuple(sorted(memory.kind for memory in jax.local_devices()[0].addressable_memories()))


def why_impossible() -> str | None:
    """Why tensors can't be offloaded on the default device; None if they can."""
    kinds = memory_kinds()
    if PINNED not in kinds:
        return f"{jax.default_backend()} reaches no {PINNED} memory, but {', '.join(kinds) or 'none'}"
    if jax.default_backend() == "gpu" and compat.jaxlib_version() < RIGHT_SINCE:
        version, since = _text(compat.jaxlib_version()), _text(RIGHT_SINCE)
        return f"jaxlib {version} compiles scans that read another layer's tensor; {since} and newer don't"
    return None


def check_can_offload(tensor: str) -> None:
    """Raises ValueError where a tensor can't be offloaded."""
    reason = why_impossible()
    check_value(reason is None, "remat.policy", f"offload of {tensor}", f"a device with {PINNED} memory", reason)


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def why_exposed() -> str | None:
    """Why copies of programs that are traced now don't hide under compute; None if they do, or can't be seen."""
    if _hiding.get() or jax.default_backend() != "gpu":  # elsewhere nothing is copied
        return None
    if config.xla_flags().get(PIPELINING, "").lower() in ("true", "1"):
        return None
    return "it is not compiled with te.remat.compiler_options()"


def warn_if_exposed(tensor: str) -> None:
    """Warns where a tensor is offloaded in a program that will wait for it."""
    if (reason := why_exposed()) is not None:
        text = (
            f"te_jax.remat: {tensor} is offloaded, but its copies won't hide under compute: {reason}. Compile with "
            "te.remat.jit in the place of jax.jit, or with XLA_FLAGS (te.remat.xla_flags()); if the program has the "
            "options in another way, trace it inside of te.remat.hiding()"
        )
        warnings.warn(text, ExposedCopiesWarning, stacklevel=2)
