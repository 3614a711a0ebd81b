"""Tests of programs on two devices of one host: CPU devices everywhere, and two GPUs where there are that many.

``pytest -m multigpu`` is the second half. Without two GPUs it is skipped, and says so.
"""

import jax
import numpy as np
import pytest

from te_jax.primitives import library


def _why_not():
    if not library.has_cuda_backend() or not library.status("cuda").available:
        return library.status("cuda").reason or "no CUDA backend"
    count = len(jax.devices("cuda"))
    return None if count >= 2 else f"{count} GPU"


def pytest_collection_modifyitems(items):
    here = [item for item in items if item.get_closest_marker("multigpu")]
    reason = _why_not() if here else None
    for item in here if reason else ():
        item.add_marker(pytest.mark.skip(reason=f"needs two GPUs of one host: {reason}"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def platform(request):
    return request.param


@pytest.fixture
def mesh(platform):
    """Two devices along "tp"."""
    devices = np.array(jax.devices(platform)[:2])
    return jax.sharding.Mesh(devices, ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
