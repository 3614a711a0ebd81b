"""Runs pytest as the main program of a Bazel py_test. The arguments are pytest's, relative to the workspace root."""

import os
import pathlib
import sys

import pytest

if __name__ == "__main__":
    os.chdir(pathlib.Path(__file__).parents[1])
    sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
