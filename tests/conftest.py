"""Settings for all tests. They must be in the environment before jax initialises its backends."""

import os

# XLA compiles on one thread, and that is most of what tests do; threads of the host GEMM would only be in each other's
# way on a machine with few cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_DEVICES = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()
