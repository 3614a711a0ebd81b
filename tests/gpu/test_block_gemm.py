"""The own kernels for block-scaled GEMMs on CUDA, each run whatever timing chose."""

import jax
import ml_dtypes
import numpy as np
import pytest

from te_jax import primitives as P
from te_jax.primitives import gemm_algorithms
from te_jax.testing import blocks, tolerance
from te_jax.testing.bits import assert_same_bits

E4M3 = ml_dtypes.float8_e4m3fn
OUT = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
ROWS, SQUARES = "block_1x128", "block_128x128"
KERNELS = {"squares": (1, SQUARES), "rows_256": (2, ROWS), "rows_192": (3, ROWS)}  # number, how rhs is scaled
SHAPES = [(8, 16, 16), (256, 128, 128), (264, 272, 400), (1000, 1392, 2064), (192, 144, 640), (520, 2064, 144),
          (2048, 4608, 256)]  # fmt: skip


def algorithm(kernel):
    """csrc/gemm/own_kernels.cc, version 1, as 128 digits."""
    return f"{2**64 - 1:016x}{KERNELS[kernel][0]:016x}{1:016x}".ljust(128, "0")


def through(kernel, shape, run):
    """run(), a GEMM of this shape, computed by `kernel`."""
    run()  # what there is is in the report now
    text = "m={} n={} k={} ".format(*shape)
    pair = f" {ROWS} by {KERNELS[kernel][1]} "

    def found():
        return [each for each in gemm_algorithms.report() if each.gemm.startswith(text) and pair in each.gemm]

    devices: dict = {}
    for each in found():
        choice = {"algorithm": algorithm(kernel), "time_us": 0.0, "first_us": 0.0, "candidates": 0}
        devices.setdefault(each.device, {})[each.gemm] = choice
    assert devices
    gemm_algorithms.load_table(gemm_algorithms.table() | {"devices": devices})
    out = run()
    # One that can't be run would have been chosen anew.
    assert all(each.algorithm == algorithm(kernel) for each in found())
    return out


def whole_numbers(rows, k, scaling, seed):
    """(data, scale_inv, values) of an operand [rows, k]: small integers and powers of two, so that sums are exact."""
    rng = np.random.default_rng(seed)
    data = rng.integers(-4, 5, (rows, k)).astype(E4M3)
    high, wide = -(-rows // 128), -(-k // 128)
    scale_inv = np.exp2(rng.integers(-2, 3, (wide, rows) if scaling == ROWS else (high, wide))).astype(np.float32)
    each_row = scale_inv.T if scaling == ROWS else np.repeat(scale_inv, 128, 0)[:rows]
    return data, scale_inv, data.astype(np.float64) * np.repeat(each_row, 128, 1)[:, :k]


def operands(shape, kernel):
    m, n, k = shape
    return whole_numbers(m, k, ROWS, 0), whole_numbers(n, k, KERNELS[kernel][1], 1)


def spec_of(kernel, **fields):
    return P.GemmSpec(lhs_scaling=ROWS, rhs_scaling=KERNELS[kernel][1], **fields)


def product(on, spec, lhs, rhs, a, b):
    return on("cuda", lambda *x: P.gemm(*x[:2], spec, lhs_scale_inv=x[2], rhs_scale_inv=x[3])[0], lhs, rhs, a, b)


@pytest.mark.parametrize("out_dtype", OUT)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_exact(on, shape, kernel, out_dtype):
    (lhs, a, lhs64), (rhs, b, rhs64) = operands(shape, kernel)
    spec = spec_of(kernel, out_dtype=out_dtype)
    out = through(kernel, shape, lambda: product(on, spec, lhs, rhs, a, b))
    assert_same_bits(out, (lhs64 @ rhs64.T).astype(np.float32).astype(OUT[out_dtype]))


@pytest.mark.parametrize("out_dtype", OUT)
@pytest.mark.parametrize("epilogue", ["alpha", "bias", "add", "add in place", "alpha, bias, add"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_epilogue_is_exact(on, kernel, epilogue, out_dtype):
    shape = m, n, _ = 328, 464, 336
    (lhs, a, lhs64), (rhs, b, rhs64) = operands(shape, kernel)
    rng = np.random.default_rng(2)
    bias = rng.integers(-8, 9, n).astype(ml_dtypes.bfloat16)
    c = rng.integers(-64, 65, (m, n)).astype(OUT[out_dtype])
    alpha, beta = 0.5 if "alpha" in epilogue else 1.0, -0.5 if "add" in epilogue else 0.0
    spec = spec_of(
        kernel, out_dtype=out_dtype, alpha=alpha, beta=beta, bias="bias" in epilogue, in_place="place" in epilogue
    )

    def gemm(lhs, rhs, a, b, bias, c):
        extra = ({"bias": bias} if spec.bias else {}) | ({"c": c} if spec.beta else {})
        return P.gemm(lhs, rhs, spec, lhs_scale_inv=a, rhs_scale_inv=b, **extra)[0]

    out = through(kernel, shape, lambda: on("cuda", gemm, lhs, rhs, a, b, bias, c))
    expected = alpha * (lhs64 @ rhs64.T) + beta * c.astype(np.float64)
    expected = expected + bias.astype(np.float64) if spec.bias else expected
    assert_same_bits(out, expected.astype(np.float32).astype(OUT[out_dtype]))


def random(rows, k, scaling, seed):
    """(data, scale_inv, values) of a normal operand."""
    x = np.random.default_rng(seed).standard_normal((rows, k)).astype(np.float32)
    side = (1, 128) if scaling == ROWS else (128, 128)
    codes, scale_inv = blocks.quantize(x, side, "e4m3", power_of_two=False)
    data = codes.view(E4M3)
    each_row = np.repeat(scale_inv.astype(np.float64), side[0], 0)[:rows]
    return data, scale_inv.T if scaling == ROWS else scale_inv, data.astype(np.float64) * np.repeat(each_row, 128, 1)


def test_random_values_and_the_same_bits_in_every_run_and_tile(on):
    """Rows have the same sums in tiles of 256 and of 192; every run has the same."""
    shape = m, n, k = 776, 528, 4096
    outs = {}
    for kernel, (_, rhs_scaling) in KERNELS.items():
        (lhs, a, lhs64), (rhs, b, rhs64) = random(m, k, ROWS, 0), random(n, k, rhs_scaling, 1)
        spec = spec_of(kernel, out_dtype="float32")
        arrays = lhs, rhs, a, b
        outs[kernel] = out = through(kernel, shape, lambda spec=spec, arrays=arrays: product(on, spec, *arrays))
        assert_same_bits(out, product(on, spec, *arrays))
        expected = lhs64 @ rhs64.T
        error = np.abs(out - expected)
        bound = tolerance.gemm_error(np.abs(lhs64) @ np.abs(rhs64).T, k, expected, "float32", hopper="precise")
        assert np.all(error <= bound)
        assert np.linalg.norm(error) <= tolerance.gemm_error_norm(k, hopper="precise") * np.linalg.norm(expected)
    assert_same_bits(outs["rows_256"], outs["rows_192"])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_captured_chain_repeats(on, kernel):
    """Enough calls for a command buffer, run with other inputs and again: every one waits for the one before it."""
    shape = m, n, _ = 512, 640, 384
    (lhs, a, lhs64), (rhs, b, rhs64) = operands(shape, kernel)
    spec = spec_of(kernel, out_dtype="float32", beta=1.0, in_place=True)

    def gemm(lhs, rhs, a, b, c):
        for _ in range(8):
            c = P.gemm(lhs, rhs, spec, lhs_scale_inv=a, rhs_scale_inv=b, c=c)[0]
        return c

    c = np.zeros((m, n), np.float32)
    through(kernel, shape, lambda: on("cuda", gemm, lhs, rhs, a, b, c))
    compiled = jax.jit(gemm)
    for factor in (1.0, 2.0, 1.0, 0.5):
        c = np.full((m, n), factor, np.float32)
        placed = jax.device_put((lhs, rhs, np.float32(factor) * a, b, c), jax.devices("cuda")[0])
        assert_same_bits(np.asarray(compiled(*placed)), (8 * factor * (lhs64 @ rhs64.T) + factor).astype(np.float32))
