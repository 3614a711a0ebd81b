"""Every environment variable that te_jax reads, in one place.

| variable | values | meaning |
|---|---|---|
| ``TE_JAX_DISABLE_CUSTOM_CALLS`` | ``0`` (default) or ``1`` | run the jnp references instead of the custom calls |
| ``TE_JAX_COMMAND_BUFFERS`` | ``1`` (default), ``0`` | XLA may capture custom calls in command buffers (CUDA graphs) |
| ``TE_JAX_GEMM_ALGORITHMS`` | ``timed`` (default), ``first`` | how the algorithm of a GEMM is chosen on CUDA |
| ``TE_JAX_GEMM_ALGORITHMS_FILE`` | a path | choices are taken from this file, and written to it at exit |
| ``XLA_FLAGS`` | XLA's | only looked at: which setting of determinism a run has, whether copies to the host can hide |

The three before it are read once, when the CUDA targets are registered; ``te_jax/primitives/gemm_algorithms.py`` says
more.

An option that changes what is traced is kept in a JAX user context: ``jax.jit`` keys its caches on it, so that
changing it with :func:`custom_calls` retraces, instead of silently running the program traced before.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

import jax

_FALSE = ("", "0", "false", "off", "no")
_TRUE = ("1", "true", "on", "yes")


def _flag(name: str, default: bool = False) -> bool:
    """Reads a boolean environment variable. Raises ValueError for anything that is not plainly true or false."""
    value = os.environ.get(name, str(int(default))).strip().lower()
    if value not in _FALSE + _TRUE:
        raise ValueError(f"te_jax: environment variable {name}: expected 0 or 1, got {value!r}")
    return value in _TRUE


GEMM_ALGORITHMS = ("timed", "first")

_custom_calls = jax.make_user_context(default_value=not _flag("TE_JAX_DISABLE_CUSTOM_CALLS"))


def custom_calls_enabled() -> bool:
    """Whether primitives may lower to custom calls in the current context."""
    return bool(_custom_calls.value)


def custom_calls(enabled: bool) -> AbstractContextManager:
    """``with custom_calls(False): ...`` runs (and retraces) everything inside with the jnp references."""
    return _custom_calls(enabled)


def command_buffers_enabled() -> bool:
    """Whether the CUDA custom calls are registered as ones that XLA may capture in command buffers."""
    return _flag("TE_JAX_COMMAND_BUFFERS", default=True)


def gemm_algorithms() -> str:
    """How the algorithm of a GEMM is chosen on CUDA: "timed" or "first"."""
    value = os.environ.get("TE_JAX_GEMM_ALGORITHMS", "").strip().lower() or GEMM_ALGORITHMS[0]
    if value not in GEMM_ALGORITHMS:
        expected = " or ".join(GEMM_ALGORITHMS)
        raise ValueError(f"te_jax: environment variable TE_JAX_GEMM_ALGORITHMS: expected {expected}, got {value!r}")
    return value


def gemm_algorithms_file() -> str | None:
    """The file that the choices of GEMM algorithms are taken from and written to; None if there is none."""
    return os.environ.get("TE_JAX_GEMM_ALGORITHMS_FILE", "").strip() or None


def xla_flags() -> dict[str, str]:
    """The flags in XLA_FLAGS, {name: value}."""
    pairs = (flag.lstrip("-").partition("=") for flag in os.environ.get("XLA_FLAGS", "").split())
    return {name: value for name, _, value in pairs}


def xla_flags_of_determinism() -> dict[str, str]:
    """The flags in XLA_FLAGS, {name: value}, that say how XLA chooses algorithms or whether they may be random."""
    return {name: value for name, value in xla_flags().items() if "autotun" in name or "determinis" in name}


def describe() -> dict[str, object]:
    """The options and their current values, for ``python -m te_jax.doctor``."""
    return {
        "TE_JAX_DISABLE_CUSTOM_CALLS": not custom_calls_enabled(),
        "TE_JAX_COMMAND_BUFFERS": command_buffers_enabled(),
        "TE_JAX_GEMM_ALGORITHMS": gemm_algorithms(),
        "TE_JAX_GEMM_ALGORITHMS_FILE": gemm_algorithms_file() or "",
    }
