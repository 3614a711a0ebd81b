"""How the programs of tests are compiled for CPUs: quickly, as compiling is most of what tests do.

Custom calls are compiled code either way, and XLA's own passes are the same. What measures how exact XLA's arithmetic
is asks for `OPTIMIZED`: without LLVM's passes tanh and exp lose bits, and jaxlib 0.10's older emitters write FP8 of NaN
as 0.
"""

from __future__ import annotations

import jax

_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

OPTIMIZED: dict[str, bool | int] = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
"""XLA's defaults, as ``compiler_options`` of one program."""

if jax.__version_info__ < (0, 11):  # later there are no others
    _QUICK["xla_cpu_use_fusion_emitters"] = False
    OPTIMIZED["xla_cpu_use_fusion_emitters"] = True


def xla_flags(devices: int) -> str:
    """``XLA_FLAGS`` of a process that compiles quickly and has so many CPU devices."""
    flags = {**_QUICK, "xla_force_host_platform_device_count": devices}
    return " ".join(f"--{name}={str(value).lower()}" for name, value in flags.items())
