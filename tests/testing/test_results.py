"""Recorded figures say where they come from."""

import json
import pathlib
import re

import pytest

FILES = sorted((pathlib.Path(__file__).parents[2] / "benchmarks" / "results").glob("*.jsonl"))


def test_results_are_there():
    assert FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_rows_say_device_commit_and_version(file):
    """ "jax" is null in rows of programs without jax."""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        row, where = json.loads(line), f"{file.name}:{number}"
        assert row.get("device"), where
        assert re.fullmatch("[0-9a-f]{7,40}", row.get("commit", "")), where
        assert "jax" in row, where
        assert row["jax"] is None or re.match(r"\d+\.\d+\.\d+", row["jax"]), where
