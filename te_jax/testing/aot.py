"""Compiles programs for an H200 on a machine without a GPU.

The result is the optimized program that the GPU would get, except for choices that need the GPU to measure (GEMM
algorithms). It needs jax's CUDA plugin of the running version (``jax-cuda13-pjrt`` and ``jax-cuda13-plugin``, without
their dependencies) in a process where jax has not initialised its backends with ``JAX_PLATFORMS=cpu``; and te_jax's
CUDA module, whose handlers are registered but not run.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from te_jax.primitives import library

# Facts about the GPU, written by XLA on an H200 (--xla_dump_to). The description of the CPU it was attached to, memory
# sizes and clocks are in it; nothing else identifies the machine.
_TARGET_CONFIG = pathlib.Path(__file__).parent / "h200_target_config.pbtxt"

# What would be measured on a GPU is chosen without one.
COMPILER_OPTIONS: dict[str, bool | str] = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": False}


def why_not() -> str | None:
    """Why programs can't be compiled for an H200 in this process; None if they can."""
    if importlib.util.find_spec("jax_plugins") is None or not _has_plugin():
        return "jax's CUDA plugin is not installed"
    if os.environ.get("JAX_PLATFORMS", "") not in ("", "cuda"):
        return f"JAX_PLATFORMS={os.environ['JAX_PLATFORMS']} keeps jax from loading its CUDA plugin"
    try:
        library.register_cuda_targets()
        h200()
    except RuntimeError as error:
        return str(error)
    return None


def _has_plugin() -> bool:
    return any(importlib.util.find_spec(f"jax_plugins.xla_cuda{major}") is not None for major in (12, 13))


@functools.cache
def h200(count: int = 1) -> tuple[jax.Device, ...]:
    """``count`` H200s of one host that aren't there: shardings on them can be compiled for, not run."""
    from jax.experimental import topologies

    shape = f"1x1x{count}"
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name=shape, topology=shape, target_config=_TARGET_CONFIG.read_text()
    )
    return tuple(topology.devices)


def compile_for_h200(
    function: Callable, args: Any, *, jit: dict[str, Any] | None = None, options: dict[str, bool | str] | None = None
) -> jax.stages.Compiled:
    """Compiles ``function(*args)`` for one H200.

    Args:
      args: a tuple of arguments; leaves are arrays or ``jax.ShapeDtypeStruct``, of which shape and dtype are used.
      jit: arguments of ``jax.jit``, e.g. ``{"donate_argnums": 0}``.
      options: XLA options on top of ``COMPILER_OPTIONS``.

    Returns:
      the compiled program: ``as_text()`` is the optimized HLO, ``memory_analysis()`` its memory.
    """
    library.register_cuda_targets()
    sharding = SingleDeviceSharding(h200()[0])
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    return jax.jit(function, **(jit or {})).lower(*args).compile(compiler_options=COMPILER_OPTIONS | (options or {}))


def custom_calls(compiled: jax.stages.Compiled, prefix: str = "te_jax_") -> list[str]:
    """Targets of the custom calls in a compiled program whose names start with ``prefix``, in the order of its text."""
    from te_jax.testing import hlo

    return [call.target for call in hlo.custom_calls(compiled.as_text() or "", prefix)]
