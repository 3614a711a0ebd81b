"""The doctor's report: what runs as a custom call, and the reason for whatever does not."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from te_jax import compat, config, doctor
from te_jax.primitives import TARGETS, gemm_algorithms, library


def section(title):
    """The lines below the heading that starts with ``title``."""
    lines = iter(doctor.report().splitlines())
    assert any(line.startswith(title) for line in lines)
    found = []
    for line in lines:
        if not line.startswith("  "):
            break
        found.append(line.strip())
    return found


def test_names_versions_and_devices():
    assert f"jax {jax.__version__}" in section("versions")
    assert f"default platform: {jax.default_backend()}" in section("devices")


def test_every_primitive_runs_as_a_custom_call_on_cpu():
    assert section("what runs on cpu") == [f"{target.removeprefix('te_jax_')}: custom call" for target in TARGETS]


def test_says_which_collective_matmuls_overlap(monkeypatch):
    cpu, cuda = section("collective matmuls")
    assert cpu == "cpu: one call"
    assert cuda.startswith("cuda: the GEMM, then the collective: ")
    channel = {"group": "tp=2: tp", "rank": 1, "device": 1, "arena_bytes": 100 << 20}
    monkeypatch.setattr(library, "collective_channels", lambda: [channel])
    assert section("collective matmuls")[2:] == ["cuda:1: rank 1 of tp=2: tp: arena of 100 MiB"]


def test_names_a_primitive_it_has_no_sample_of(monkeypatch):
    samples = doctor._samples()
    del samples["scale_write"]
    monkeypatch.setattr(doctor, "_samples", lambda: samples)
    assert [line for line in section("what runs on cpu") if "custom call" not in line] == [
        "scale_write: unknown: this report has no sample of it"
    ]


def test_says_what_attention_is(monkeypatch):
    monkeypatch.setattr(library, "has_cuda_backend", lambda: False)
    assert list(doctor._attention()) == [
        "cpu: XLA: cuDNN is for CUDA only",
        "cuda: XLA: this process has no CUDA backend",
    ]
    monkeypatch.setattr(library, "has_cuda_backend", lambda: True)
    monkeypatch.setattr(compat, "cudnn_version", lambda: None)
    assert list(doctor._attention())[1] == "cuda: XLA: jax found no cuDNN (nvidia-cudnn-cu13)"
    with config.custom_calls(False):
        assert all("custom calls are disabled" in line for line in doctor._attention())


def test_says_what_decides_whether_results_repeat(monkeypatch):
    monkeypatch.setattr(gemm_algorithms, "_setting", None)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    monkeypatch.setenv("TE_JAX_GEMM_ALGORITHMS", "first")
    title = "repeating bit for bit"
    assert section(title) == ["GEMM algorithms: first, file: none", "XLA_FLAGS about it: xla_gpu_autotune_level=0"]
    monkeypatch.setenv("XLA_FLAGS", "")
    assert section(title)[1] == "XLA_FLAGS about it: none: XLA autotunes anew in every process"


def test_says_why_custom_calls_are_off():
    with config.custom_calls(False):
        lines = section("what runs on cpu")
    assert lines
    assert all("jnp reference: custom calls are disabled" in line for line in lines)


@pytest.mark.skipif(library.has_cuda_backend(), reason="this process has a CUDA backend")
def test_says_why_there_is_no_cuda():
    reason = library.status("cuda").reason
    assert f"cuda: not available: {reason}" in section("native library")
    assert all(line.endswith(f": jnp reference: {reason}") for line in section("what runs on cuda"))


def test_lists_gemm_algorithms(monkeypatch):
    timed = gemm_algorithms.GemmAlgorithm(
        device="H200", gemm="m=16", algorithm="0", source="timed", time_us=7.25, first_us=8.0, candidates=8, note=""
    )
    untimed = dataclasses.replace(timed, gemm="m=32", source="first", time_us=0.0, first_us=0.0, note="no memory")
    monkeypatch.setattr(gemm_algorithms, "report", lambda: [timed, untimed])
    assert section("GEMM algorithms") == [
        "H200: m=16: timed, 7.2 us, the heuristic's first 8.0 us",
        "H200: m=32: first, no memory",
    ]


def test_runs_as_a_program():
    root = pathlib.Path(doctor.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-m", "te_jax.doctor"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "quantize: custom call" in done.stdout
