"""Settings for all tests. They must be in the environment before jax initialises its backends."""

import importlib.util
import os
import pathlib

import pytest

from te_jax.testing.compiling import xla_flags

# Threads of the host GEMM would only be in each other's way on a machine with few cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Flags that are there stay as they are. Programs for a GPU (tests/aot, a machine with one) are compiled as users do.
_CPU_ONLY = os.environ.get("JAX_PLATFORMS") == "cpu" or importlib.util.find_spec("jax_plugins") is None
_GIVEN = os.environ.get("XLA_FLAGS", "")
_ADDED = xla_flags(8).split() if _CPU_ONLY else ["--xla_force_host_platform_device_count=8"]
os.environ["XLA_FLAGS"] = " ".join([_GIVEN, *(flag for flag in _ADDED if flag.split("=")[0] not in _GIVEN)]).strip()
# References in fp32 are multiplied in fp32 on a GPU too, not in TF32.
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")

# What must hold on every platform. Where jax's default backend is a GPU, `pytest -m gpu` runs these tests too.
_ANY_PLATFORM = ("test_sequential.py", "fusion", "flax")


def pytest_collection_modifyitems(items):
    import jax

    if jax.default_backend() != "gpu":
        return
    here = pathlib.Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).parts[0] in _ANY_PLATFORM:
            item.add_marker(pytest.mark.gpu)
