"""Tolerances: they belong to the format and the contraction length, and are derived here and nowhere else.

Rounding. A format with m mantissa bits and u = 2**-(m+1) rounds a normal number with relative error <= u / (1 + u)
(Knuth) and a subnormal one with absolute error <= half its smallest subnormal. E4M3: m = 3, smallest subnormal 2**-9.
E5M2: m = 2, 2**-16.

GEMM against fp64 with the same quantized operands. Products of two FP8 (or bf16) numbers are exact in fp32, so only
accumulation and the output's rounding err. Adding K terms in fp32 in any order errs at most by
(K - 1) * 2**-24 * sum |a||b| (first order; Higham, Accuracy and Stability of Numerical Algorithms, 4.2). In practice
errors have random signs, so that sqrt(K) replaces K; we allow 4 * sqrt(K), never more than K.

Hopper's FP8 tensor cores align 32 products and the running sum to the largest of them and cut what is below 13 fraction
bits of it: each instruction, 32 steps of K, errs by up to 2**-13 of sum |a||b|. Precise accumulation promotes to fp32
every 128 steps, after 4 instructions. The errors partly cancel, so the norm of the error is far smaller. Measured on an
H200 (cuBLASLt 13.1, normal data), error over product in units of 2**-13: 0.28 (K = 16), 1.0 (128), 2.8 (512),
7.0 (2048), 8.5 (8192) fast, at most 1.04 precise.

GEMM against the operands before quantization. Over a binade, where values are spread evenly, rounding errs by
2**-m / sqrt(12) rms while values are sqrt(7/3) rms, so the relative rms error of a quantized tensor is
2**-m * sqrt(1 / 28): 2.4% for E4M3, 4.7% for E5M2. The errors of the two operands are independent and add in
squares. Signal and error of a contraction with random signs both grow with sqrt(K): the ratio does not depend on K.
"""

from __future__ import annotations

import math

import numpy as np

MANTISSA_BITS = {"e4m3": 3, "e5m2": 2, "bfloat16": 7, "float16": 10, "float32": 23}
SMALLEST_SUBNORMAL = {"e4m3": 2.0**-9, "e5m2": 2.0**-16}
FP32_UNIT = 2.0**-24
TENSOR_CORE_UNIT = 2.0**-13  # of Hopper's FP8 accumulation, for each instruction of
TENSOR_CORE_STEPS = 32
PROMOTION_STEPS = 128  # between promotions to fp32 in precise accumulation

_NAMES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}


def _name(dtype) -> str:
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    return _NAMES.get(name, name)


def unit_roundoff(dtype) -> float:
    """Largest relative error of rounding a normal number to `dtype` (dtype, its name, or a format name)."""
    u = 2.0 ** -(MANTISSA_BITS[_name(dtype)] + 1)
    return u / (1 + u)


def quantization_error(x: np.ndarray, format: str, scale: float | np.ndarray) -> np.ndarray:
    """Largest |dequantize(quantize(x)) - x| of each element, for fp32 scaling that doesn't saturate."""
    relative = np.abs(x) * (unit_roundoff(format) + 4 * FP32_UNIT)  # 4: scale, scale_inv and two products
    return np.maximum(relative, SMALLEST_SUBNORMAL[format] / 2 / scale * (1 + 4 * FP32_UNIT))


def gemm_error(magnitude: np.ndarray, contraction: int, out: np.ndarray, out_dtype, *, hopper="") -> np.ndarray:
    """Largest error of each element of a GEMM, given the fp64 result `out` of the same (quantized) operands.

    Args:
      magnitude: sum |a||b| over the contraction, fp64, in out's shape.
      contraction: K.
      out_dtype: output dtype, float32, bfloat16 or FP8 (already scaled).
      hopper: "fast" or "precise" for FP8 products on Hopper's tensor cores; "": accumulated in fp32.
    """
    accumulate = FP32_UNIT * min(contraction, 4 * math.sqrt(contraction))
    if hopper:
        steps = contraction if hopper == "fast" else min(contraction, PROMOTION_STEPS)
        accumulate += TENSOR_CORE_UNIT * math.ceil(steps / TENSOR_CORE_STEPS)
    error = magnitude * accumulate
    return error + np.abs(out) * (unit_roundoff(out_dtype) + 4 * FP32_UNIT)  # 4: alpha and the scales


def gemm_error_norm(contraction: int, *, hopper="") -> float:
    """Bound of |error| / |product|, Frobenius norms, before rounding the result: 1.5 to 3 times the measured one."""
    if not hopper:
        return 4 * FP32_UNIT * math.sqrt(contraction)
    steps = contraction if hopper == "fast" else min(contraction, PROMOTION_STEPS)
    return 2 * TENSOR_CORE_UNIT * max(1.0, math.sqrt(steps / PROMOTION_STEPS) * 1.5)


def relative_rms_error(*formats: str) -> float:
    """Expected relative rms error of a contraction of operands quantized to these formats, against unquantized ones.

    Tests allow 1.5 times this.
    """
    return math.sqrt(sum((2.0 ** -MANTISSA_BITS[_name(f)]) ** 2 / 28 for f in formats))
