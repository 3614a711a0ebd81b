"""cuBLASLt and the device copy, called directly through ctypes: what a row's limit is made of.

Independent of te_jax's own GEMM handler. Every shape's algorithm is chosen by timing what the heuristic offers. The
operands are random FP8 data, as they would be after quantizing (zeros run faster, and cooler).
"""

from __future__ import annotations

import ctypes
import functools
import glob
import os
import pathlib
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from te_jax.testing import bench
from te_jax.testing.bench import Burst, Case, Gemm

DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2, "bf16": jnp.bfloat16}
CUDA_TYPES = {"e4m3": 28, "e5m2": 29, "bf16": 14}
FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
COMPUTE_32F, R_32F = 68, 0
TRANSA, TRANSB, A_SCALE_POINTER, B_SCALE_POINTER, FAST_ACCUM = 3, 4, 17, 18, 25  # cublasLtMatmulDescAttributes_t
OP_N, OP_T = 0, 1
MAX_WORKSPACE_BYTES = 1  # cublasLtMatmulPreferenceAttributes_t
WORKSPACE = 64 << 20
CANDIDATES = 16


class Algo(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class Heuristic(ctypes.Structure):
    _fields_ = (
        ("algo", Algo),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


def _find(stem: str) -> str:
    """The file of an NVIDIA library: what the process has, the wheels beside jax, the toolkit."""
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    loaded = [line.split()[-1] for line in maps if f"/{stem}.so" in line]
    wheels = [pattern for path in sys.path for pattern in glob.glob(f"{path}/nvidia/*/lib/{stem}.so*")]
    toolkit = glob.glob(f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/lib64/{stem}.so*")
    return next(iter([*loaded, *wheels, *toolkit]), f"{stem}.so")


@functools.cache
def runtime() -> ctypes.CDLL:
    lib = ctypes.CDLL(_find("libcudart"))
    lib.cudaMemcpyAsync.argtypes = (ctypes.c_void_p,) * 2 + (ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    _check(lib.cudaSetDevice(0), "cudaSetDevice")
    return lib


@functools.cache
def cublaslt() -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    runtime()
    lib = ctypes.CDLL(_find("libcublasLt"))
    lib.cublasLtGetVersion.restype = ctypes.c_size_t
    handle = ctypes.c_void_p()
    _check(lib.cublasLtCreate(ctypes.byref(handle)), "cublasLtCreate")
    return lib, handle


def version() -> int:
    return int(cublaslt()[0].cublasLtGetVersion())


def synchronize() -> None:
    _check(runtime().cudaDeviceSynchronize(), "cudaDeviceSynchronize")


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what} failed: status {status}")


def _pointer(array: jax.Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.unsafe_buffer_pointer())


@functools.partial(jax.jit, static_argnums=(0, 1))
def random_operand(shape: tuple[int, ...], format: str, seed: int) -> jax.Array:
    """Normal values, scaled as if their amax (about 5.5 standard deviations) had become the format's maximum."""
    x = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    top = FP8_MAX.get(format, 5.5)
    return jnp.clip(x * (top / 5.5), -top, top).astype(DTYPES[format])


class Matmul:
    """One GEMM with the fastest of cuBLASLt's candidates, on buffers of its own."""

    def __init__(self, gemm: Gemm, *, fast: bool = True):
        self.gemm = gemm
        self.lib, self.handle = cublaslt()
        self.lhs = random_operand((gemm.m, gemm.k), gemm.lhs, 0).block_until_ready()
        self.rhs = random_operand((gemm.n, gemm.k), gemm.rhs, 1).block_until_ready()
        self.out = jnp.zeros((gemm.m, gemm.n), jnp.bfloat16).block_until_ready()
        self.scale = jnp.float32(1e-4).block_until_ready()
        self.workspace = jnp.zeros((WORKSPACE,), jnp.uint8).block_until_ready()
        self.one, self.zero = ctypes.c_float(1), ctypes.c_float(0)
        self._describe(fast)
        self.algo = self._fastest()

    def _describe(self, fast: bool) -> None:
        """Column-major views: out^T [n, m] = rhs^T^T . lhs^T, so the right operand is cuBLASLt's A."""
        gemm, lib = self.gemm, self.lib
        self.desc = ctypes.c_void_p()
        _check(lib.cublasLtMatmulDescCreate(ctypes.byref(self.desc), COMPUTE_32F, R_32F), "cublasLtMatmulDescCreate")
        attributes = [(TRANSA, ctypes.c_int32(OP_T)), (TRANSB, ctypes.c_int32(OP_N))]
        if gemm.lhs != "bf16":
            attributes += [(A_SCALE_POINTER, _pointer(self.scale)), (B_SCALE_POINTER, _pointer(self.scale))]
            attributes += [(FAST_ACCUM, ctypes.c_int8(fast))]
        for attribute, value in attributes:
            size = ctypes.c_size_t(ctypes.sizeof(value))
            status = lib.cublasLtMatmulDescSetAttribute(self.desc, attribute, ctypes.byref(value), size)
            _check(status, f"cublasLtMatmulDescSetAttribute({attribute})")
        sizes = (
            (gemm.rhs, gemm.k, gemm.n, gemm.k),
            (gemm.lhs, gemm.k, gemm.m, gemm.k),
            ("bf16", gemm.n, gemm.m, gemm.n),
        )
        self.layouts = []
        for dtype, rows, cols, leading in sizes:
            layout = ctypes.c_void_p()
            status = lib.cublasLtMatrixLayoutCreate(
                ctypes.byref(layout),
                CUDA_TYPES[dtype],
                ctypes.c_uint64(rows),
                ctypes.c_uint64(cols),
                ctypes.c_int64(leading),
            )
            _check(status, "cublasLtMatrixLayoutCreate")
            self.layouts.append(layout)

    def _candidates(self) -> list[Heuristic]:
        a, b, d = self.layouts
        preference = ctypes.c_void_p()
        _check(self.lib.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)), "cublasLtMatmulPreferenceCreate")
        limit = ctypes.c_size_t(WORKSPACE)
        size = ctypes.c_size_t(ctypes.sizeof(limit))
        status = self.lib.cublasLtMatmulPreferenceSetAttribute(
            preference, MAX_WORKSPACE_BYTES, ctypes.byref(limit), size
        )
        _check(status, "cublasLtMatmulPreferenceSetAttribute")
        found, count = (Heuristic * CANDIDATES)(), ctypes.c_int()
        status = self.lib.cublasLtMatmulAlgoGetHeuristic(
            self.handle, self.desc, a, b, d, d, preference, CANDIDATES, found, ctypes.byref(count)
        )
        _check(status, "cublasLtMatmulAlgoGetHeuristic")
        self.lib.cublasLtMatmulPreferenceDestroy(preference)
        return [found[i] for i in range(count.value) if found[i].state == 0]

    def _fastest(self) -> Algo:
        candidates = self._candidates()
        if not candidates:
            raise RuntimeError(f"cuBLASLt has no algorithm for {self.gemm}")
        best: dict[int, float] = {}
        for _ in range(3):  # rounds over all, so that none has the GPU to itself while it is cool
            for i, candidate in enumerate(candidates):
                seconds = self._seconds(candidate.algo, 1)
                if i in best and seconds > 1.5 * min(best.values()):
                    continue  # timed already, and far from winning
                seconds = self._seconds(candidate.algo, max(2, min(10, round(2e-3 / seconds))))
                best[i] = min(best.get(i, seconds), seconds)
        self.chosen = min(best, key=best.__getitem__)
        self.first_over_best = best[0] / best[self.chosen]
        return candidates[self.chosen].algo

    def _seconds(self, algo: Algo, count: int) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            self.launch(algo)
        synchronize()
        return (time.perf_counter() - start) / count

    def launch(self, algo: Algo | None = None) -> None:
        a, b, d = self.layouts
        status = self.lib.cublasLtMatmul(
            self.handle, self.desc, ctypes.byref(self.one), _pointer(self.rhs), a, _pointer(self.lhs), b,
            ctypes.byref(self.zero), _pointer(self.out), d, _pointer(self.out), d, ctypes.byref(algo or self.algo),
            _pointer(self.workspace), ctypes.c_size_t(WORKSPACE), None,
        )  # fmt: skip
        _check(status, "cublasLtMatmul")

    def check(self) -> float:
        """Relative error against jax on the first rows; raises if it is more than FP8 products can explain."""
        synchronize()
        scale = jnp.float32(1) if self.gemm.lhs == "bf16" else self.scale * self.scale
        operands = (self.lhs[:256], self.rhs, self.out[:256], scale)
        error = float(bench.untuned(_error, *operands)(*operands))
        if not error < 0.01:
            raise AssertionError(f"cuBLASLt {self.gemm}: relative error {error:.3g}")
        return error


def _error(lhs: jax.Array, rhs: jax.Array, out: jax.Array, scale: jax.Array) -> jax.Array:
    """Of out against scale * lhs rhs^T, accumulated in float32; bfloat16 holds every FP8 value."""
    lhs, rhs = lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)
    product = scale * jnp.dot(lhs, rhs.T, preferred_element_type=jnp.float32)
    return jnp.linalg.norm(out.astype(jnp.float32) - product) / jnp.linalg.norm(product)


def matmuls(case: Case, *, fast: bool = True) -> list[Matmul]:
    """The GEMMs of a case, with fast or precise FP8 accumulation, values checked."""
    found = [Matmul(gemm, fast=fast) for gemm in case.gemms()]
    for matmul in found:
        matmul.launch()
        matmul.check()
    return found


def burst_of(matmuls: Sequence[Matmul]) -> Burst:
    """GEMMs one after the other, over and over."""

    def burst(count: int) -> None:
        for _ in range(count):
            for matmul in matmuls:
                matmul.launch()
        synchronize()

    return burst


def copy_burst(bytes: int = 1 << 29) -> tuple[Burst, int]:
    """Device-to-device copies, and the bytes that one reads and writes."""
    source = jnp.zeros((bytes,), jnp.uint8).block_until_ready()
    target = jnp.ones((bytes,), jnp.uint8).block_until_ready()
    cuda = runtime()

    def burst(count: int) -> None:
        for _ in range(count):
            _check(cuda.cudaMemcpyAsync(_pointer(target), _pointer(source), bytes, 3, None), "cudaMemcpyAsync")
        synchronize()

    return burst, 2 * bytes
