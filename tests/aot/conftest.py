"""Tests that compile for an H200 without one. Skipped, with the reason, where the compiler or the module is missing."""

import pytest

from te_jax.testing import aot


def pytest_collection_modifyitems(items):
    here = [item for item in items if item.path.parent.name == "aot"]
    for item in here:
        item.add_marker(pytest.mark.aot)
    reason = aot.why_not() if here else None
    for item in here if reason else ():
        item.add_marker(pytest.mark.skip(reason=f"can't compile for an H200: {reason}"))
