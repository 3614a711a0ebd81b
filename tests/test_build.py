"""Every source file belongs to a target of the Bazel BUILD file, and every C++ file to the CMake build."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
CPP = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cc", ".cu", ".cuh")]
PYTHON = list((ROOT / "te_jax").rglob("*.py"))


def bazel_files():
    """The files that BUILD's glob patterns and file names stand for. BUILD is close enough to Python to be parsed."""
    tree = ast.parse((ROOT / "BUILD").read_text(encoding="utf-8"))
    excluded = {
        text.value
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "exclude"
        for text in ast.walk(node.value)
        if isinstance(text, ast.Constant)
    }
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    # A file that one target excludes has to be named by another: it then occurs at least twice.
    named_once = {text for text in excluded if (ROOT / "BUILD").read_text(encoding="utf-8").count(f'"{text}"') < 2}
    patterns = [text for text in texts - named_once if re.match(r"(csrc|te_jax|tests)/", text)]
    return {path for pattern in patterns for path in ROOT.glob(pattern)}


@pytest.mark.parametrize("path", sorted(CPP + PYTHON), ids=lambda path: str(path.relative_to(ROOT)))
def test_bazel_has(path):
    assert path in bazel_files()


def test_cmake_has_every_translation_unit():
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "CMakeLists.txt", *(ROOT / "cmake").glob("*")))
    covered = {path for pattern in re.findall(r"csrc/[\w/]*\*[\w.]*", text) for path in ROOT.glob(pattern)}
    missing = [path for path in CPP if path.suffix in (".cc", ".cu") and path not in covered]
    assert not missing
