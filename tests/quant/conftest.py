import pathlib
import sys

import pytest

from te_jax import config

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # state_steps.py, shared by the tests of this folder


def pytest_generate_tests(metafunc):
    """Tests of the FP8 state run its custom calls, and then the jnp reference of these."""
    if metafunc.module.__name__.startswith("test_state"):
        metafunc.fixturenames.append("path")
        metafunc.parametrize("path", [True, False], ids=["native", "reference"], indirect=True)


@pytest.fixture
def path(request):
    with config.custom_calls(request.param):
        yield
