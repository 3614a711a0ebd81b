"""Builds the C++ tests with the FFI headers of the running jaxlib, and runs them."""

import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESTS = sorted(path.stem for path in (ROOT / "csrc" / "tests").glob("*_test.cc"))
WITH_CUDA_HEADERS = sorted(path.stem for path in (ROOT / "csrc" / "tests" / "fake_cuda").glob("*_test.cc"))


def tool(name):
    """A program beside the running Python (cmake and ninja come through pip), or on PATH."""
    beside = pathlib.Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    cmake, ninja = tool("cmake"), tool("ninja")
    if cmake is None or ninja is None or not (shutil.which("c++") or shutil.which("g++")):
        pytest.skip("needs cmake, ninja and a C++ compiler")
    folder = tmp_path_factory.mktemp("cpp")
    configure = [cmake, "-S", ROOT, "-B", folder, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    options = {
        "CMAKE_BUILD_TYPE": "Debug",
        "Python_EXECUTABLE": sys.executable,
        "TE_JAX_CUDA": "OFF",
        "TE_JAX_PYTHON": "OFF",
        "TE_JAX_TESTS": "ON",
        "TE_JAX_FFI_INCLUDE_DIR": jax.ffi.include_dir(),
    }
    for command in ([*configure, *(f"-D{key}={value}" for key, value in options.items())], [cmake, "--build", folder]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("name", TESTS + WITH_CUDA_HEADERS)
def test_cpp(build, name):
    if name in WITH_CUDA_HEADERS and not (build / name).exists():
        pytest.skip("needs the headers of a CUDA toolkit")
    done = subprocess.run([build / name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_cpp_tests():
    assert {"decode_test", "fp8_test", "scale_test"} <= set(TESTS)
