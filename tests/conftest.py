"""Settings for all tests. They must be in the environment before jax initialises its backends."""

import os
import pathlib

import pytest

# XLA compiles on one thread, and that is most of what tests do; threads of the host GEMM would only be in each other's
# way on a machine with few cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_DEVICES = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()
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
