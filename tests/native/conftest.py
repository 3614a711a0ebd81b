import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # handlers.py, shared by the tests of this folder


@pytest.fixture(scope="session", autouse=True)
def native():
    """The CPU targets. The native library is part of every supported installation, so its absence is an error."""
    from te_jax.primitives import library

    status = library.ensure_registered("cpu")
    assert status.available, status.reason
    return status
