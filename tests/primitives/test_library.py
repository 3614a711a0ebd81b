"""Finding, checking and registering the native library."""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

from te_jax.primitives import library

ROOT = pathlib.Path(library.__file__).parents[2]


def run(code, **environment):
    """Runs code in a fresh process on CPU; returns its standard output."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_cpu_is_available_and_says_how_it_was_built():
    status = library.ensure_registered("cpu")
    assert status.available, status.reason
    assert status.reason == ""
    assert status.path.name.startswith("_te_jax_cpu")
    assert status.build_info["ffi_api"] == (0, 3)
    assert set(status.build_info) == {"ffi_api", "architectures", "compiler"}


def test_registering_twice_is_fine():
    assert library.ensure_registered("cpu") == library.ensure_registered("cpu")


def test_other_platforms_have_none():
    status = library.status("tpu")
    assert not status.available
    assert status.reason == "te_jax has no native library for 'tpu'"


@pytest.mark.parametrize(
    ("built", "running", "problem"),
    [
        ((0, 3), (0, 3), False),
        ((0, 3), (0, 5), False),
        ((0, 5), (0, 4), True),
        ((1, 0), (0, 4), True),
        ((0, 3), None, True),
    ],
)
def test_version_check(built, running, problem):
    assert bool(library.version_problem(built, running)) == problem


@pytest.mark.parametrize(("capabilities", "problem"), [({"9.0"}, ""), ({"8.0"}, "8.0"), ({"9.0", "10.0"}, "10.0")])
def test_architecture_check(capabilities, problem):
    text = library.architecture_problem(["sm_90a"], capabilities)
    assert text == (problem and f"it is built for sm_90a; a GPU here has compute capability {problem}")


def test_a_module_built_for_a_newer_jaxlib_leaves_jax_working():
    out = run("""
        import sys
        import jax
        from te_jax.primitives import library
        import te_jax._native._te_jax_cpu as module

        class Newer:
            __spec__ = module.__spec__
            set_sgemm = staticmethod(module.set_sgemm)
            def build_info():
                return {**module.build_info(), "ffi_api": (0, 99)}
            def registrations():
                raise AssertionError("registered although it can't be used")

        sys.modules[module.__name__] = Newer
        status = library.ensure_registered("cpu")
        print(status.available, status.reason)
        print(jax.numpy.ones(3).sum())
    """)
    lines = out.splitlines()
    assert lines[0].startswith("False it was built for FFI API 0.99, the running jaxlib has 0.")
    assert lines[1] == "3.0"


def test_import_needs_no_native_library():
    out = run("""
        import sys
        for name in ("_te_jax_cpu", "_te_jax_cuda"):
            sys.modules["te_jax._native." + name] = None  # importing it raises ImportError
        import te_jax
        from te_jax.primitives import library
        print(library.status("cpu").available)
    """)
    assert out == "False"


def test_a_missing_module_is_reported():
    out = run("""
        import importlib.util
        from te_jax.primitives import library
        library.importlib.util.find_spec = lambda name: None
        print(library.status("cpu").reason)
        print(library.status("cuda").reason)
    """)
    assert out.splitlines() == [
        "the cpu module is not built (pip install -e .)",
        "the cuda module is not built (make cuda)",
    ]


def test_cuda_module_is_not_loaded_without_a_cuda_backend():
    out = run("""
        import sys
        from te_jax.primitives import library
        print(library.status("cuda").available, "te_jax._native._te_jax_cuda" in sys.modules)
    """)
    assert out == "False False"


def test_set_sgemm_takes_only_a_blas_routine():
    import datetime

    from te_jax._native import _te_jax_cpu

    with pytest.raises(ValueError, match="expected a capsule of a BLAS sgemm with 32-bit integers, got datetime"):
        _te_jax_cpu.set_sgemm(datetime.datetime_CAPI)
