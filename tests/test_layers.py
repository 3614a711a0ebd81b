"""Imports and C++ includes point downwards only, and what belongs in one file is in that file.

A new module has to be given its place here (architecture: docs/design/0001-layers-and-contracts.md).
"""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "te_jax"
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
SOURCES = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cc", ".cu", ".cuh"))

# Lowest first; a module may import its own layer and those before it. The longest prefix counts.
LAYERS = [
    ("te_jax.errors", "te_jax.arguments", "te_jax.compat", "te_jax.config", "te_jax.typing", "te_jax.programs"),
    ("te_jax.quant.format", "te_jax.quant.division"),
    ("te_jax.recipe",),
    ("te_jax.quant", "te_jax.state"),
    ("te_jax.parallel",),
    ("te_jax.primitives", "te_jax._native"),
    ("te_jax.collective", "te_jax.remat"),
    ("te_jax.ops",),
    ("te_jax.fusion",),
    ("te_jax.chain",),
    ("te_jax.run_variables", "te_jax.collective.calls"),
    ("te_jax.sequential",),
    (
        "te_jax.flax",
        "te_jax.nnx",
        "te_jax.checkpoint",
        "te_jax.accumulate",
        "te_jax.main_grad",
        "te_jax.main_grad_loop",
        "te_jax.health",
        "te_jax.fp8_params",
        "te_jax.interop",
        "te_jax.doctor",
    ),
    ("te_jax",),  # te_jax/__init__.py
    ("te_jax.testing",),  # the library never imports it
]
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# csrc folder -> folders that its files may include.
INCLUDES = {
    "core": {"core"},
    "cpu": {"core", "cpu"},
    "kernels": {"core", "kernels"},
    "gemm": {"core", "gemm", "kernels"},
    "comm": {"core", "comm"},
    "comm/cuda": {"core", "comm", "comm/cuda", "gemm", "kernels"},
    "ffi": {"core", "ffi", "comm"},
    "ffi/cpu": {"core", "ffi", "ffi/cpu", "cpu", "comm"},
    "ffi/cuda": {"core", "ffi", "ffi/cuda", "kernels", "gemm", "comm", "comm/cuda"},
    "tests": {"core", "ffi", "cpu", "gemm", "comm", "tests"},
    "tests/cuda": {"core", "kernels", "gemm", "comm", "comm/cuda", "tests", "tests/cuda"},
    "tests/fake_cuda": {"core", "kernels", "gemm", "tests"},
}
# Who may know XLA and Python.
EXTERNAL = {"xla/": ("ffi", "ffi/cpu", "ffi/cuda", "tests"), "pybind11/": ("ffi", "ffi/cpu", "ffi/cuda")}


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path) for path in MODULES}


def rank(module):
    while module and module not in RANKS:
        module = module.rpartition(".")[0]
    return RANKS[module]


def imports(path):
    """Every module of te_jax, and of anything else, that the file imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in NAMES else node.module


def test_there_is_something_to_check():
    assert len(MODULES) > 20
    assert len(SOURCES) > 20


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_downwards(path):
    module = name_of(path)
    upwards = [other for other in imports(path) if other.split(".")[0] == "te_jax" and rank(other) > rank(module)]
    assert not upwards, f"{module} imports from a higher layer: {upwards}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_private_jax_only_in_compat(path):
    private = [other for other in imports(path) if other.startswith(("jax._src", "jaxlib"))]
    assert not private or name_of(path) == "te_jax.compat"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_environment_is_read_only_in_config(path):
    """Reading is what counts: te_jax.testing and doctor may hand an environment to another process."""
    reads = re.findall(r"os\.(?:getenv|environ\.get|environ\[)", path.read_text(encoding="utf-8"))
    assert not reads or name_of(path) == "te_jax.config" or name_of(path).startswith("te_jax.testing")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_includes_point_downwards(path):
    folder = path.relative_to(ROOT / "csrc").parent.as_posix()
    for included in re.findall(r'#include "([^"]+)"', path.read_text(encoding="utf-8")):
        for prefix, allowed in EXTERNAL.items():
            if included.startswith(prefix):
                assert folder in allowed, f"{path.name} includes {included}"
        if included.startswith("csrc/"):
            other = pathlib.PurePosixPath(included).relative_to("csrc").parent.as_posix()
            assert other in INCLUDES[folder], f"{path.name} includes {included}: csrc/{folder} is below csrc/{other}"
            assert (ROOT / included).exists()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_kernel_launches_only_in_kernels(path):
    launches = "<<<" in path.read_text(encoding="utf-8")
    assert not launches or path.relative_to(ROOT / "csrc").parts[0] == "kernels"
