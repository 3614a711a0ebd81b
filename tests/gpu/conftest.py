"""Tests of the CUDA custom calls on a GPU. Without one they are skipped, and say so."""

import jax
import numpy as np
import pytest

from te_jax.primitives import library


def pytest_collection_modifyitems(items):
    here = [item for item in items if item.path.parent.name == "gpu"]
    for item in here:
        item.add_marker(pytest.mark.gpu)
    if not here or (library.has_cuda_backend() and library.status("cuda").available):
        return
    reason = library.status("cuda").reason or "no CUDA backend"
    for item in here:
        item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))


@pytest.fixture(scope="session")
def on():
    """on(platform, function, *arrays) -> the results of the jitted function there, as numpy arrays."""

    def run(platform, function, *arrays):
        device = jax.devices(platform)[0]
        out = jax.jit(function)(*jax.device_put(arrays, device))
        assert all(x.devices() == {device} for x in jax.tree.leaves(out))
        return jax.tree.map(np.asarray, out)

    return run
