"""Independent references in fp64 NumPy and ml_dtypes: nothing here is shared with the library's own code."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
MAX = {"e4m3": 448.0, "e5m2": 57344.0}


def scale_from_amax(amax: float, fp8_max: float, margin: int = 0, power_of_two: bool = False) -> float:
    """The scale of an amax, each step rounded to fp32 as the definition says."""
    if not (0 < amax < math.inf):
        return 1.0
    with np.errstate(over="ignore"):
        scale = float(np.float32(fp8_max) / np.float32(amax)) * 2.0**-margin
    scale = min(scale, 2.0**126)
    return 2.0 ** math.floor(math.log2(scale)) if power_of_two else scale


def cast(y: np.ndarray, scale: float, format: str) -> np.ndarray:
    """FP8 codes (uint8) of y * scale: saturated, ties to even; 0x7f where y is not finite or the scale is NaN."""
    y = y.astype(np.float32)
    with np.errstate(all="ignore"):
        scaled = y * np.float32(scale)
        codes = np.clip(scaled, -MAX[format], MAX[format]).astype(DTYPES[format]).view(np.uint8)
    return np.where(np.isfinite(y) & ~np.isnan(scaled), codes, np.uint8(0x7F))


def codes(x) -> np.ndarray:
    """The bytes of an FP8 array."""
    return np.asarray(x).view(np.uint8)


def f64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def norm(x, gamma, beta=None, *, epsilon: float, layernorm: bool, zero_centered: bool = False):
    """(y, mean, rstd) in fp64."""
    x, gamma = f64(x), f64(gamma) + zero_centered
    mean = x.mean(-1, keepdims=True) if layernorm else np.zeros_like(x[..., :1])
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + epsilon)
    y = (x - mean) * rstd * gamma + (0 if beta is None else f64(beta))
    return y, mean[..., 0], rstd[..., 0]


def norm_grad(dy, x, gamma, *, epsilon: float, layernorm: bool, zero_centered: bool = False):
    """(dx, dgamma, dbeta) of ``norm`` in fp64: dx by the Jacobian of each row, no formula for a vector product."""
    y_hat, _, rstd = norm(x, np.ones(np.shape(x)[-1]), epsilon=epsilon, layernorm=layernorm)
    dy, size = f64(dy), np.shape(x)[-1]
    g = dy * (f64(gamma) + zero_centered)
    # d y_hat[i] / d x[j] = rstd (delta_ij - y_hat[i] y_hat[j] / C [- 1 / C])
    jacobian = np.eye(size) - y_hat[..., :, None] * y_hat[..., None, :] / size - (1 / size if layernorm else 0)
    dx = np.einsum("...i,...ij->...j", g, jacobian) * rstd[..., None]
    lead = tuple(range(dy.ndim - 1))
    return dx, (dy * y_hat).sum(lead), dy.sum(lead)


# The function of the gate of a gated activation.
GATES = {
    "swiglu": "silu",
    "geglu": "gelu",
    "glu": "sigmoid",
    "reglu": "relu",
    "qgeglu": "quick_gelu",
    "sreglu": "squared_relu",
    "clamped_swiglu": "silu",
}


def activation(
    kind: str,
    x,
    *,
    gate_second: bool = False,
    limit: float = 7.0,
    alpha: float | None = None,
    linear_offset: float | None = None,
) -> np.ndarray:
    """act(x) in fp64; GELU is the tanh approximation. alpha, limit and linear_offset: of clamped_swiglu."""
    x = f64(x)
    if kind in GATES:
        gate, linear = _halves(x, gate_second)
        if kind == "clamped_swiglu":
            gate, linear = np.minimum(gate, limit), np.clip(linear, -limit, limit)
            return _clamped_act(gate, alpha) * (linear + (1.0 if linear_offset is None else linear_offset))
        return activation(GATES[kind], gate) * linear
    if kind == "relu":
        return np.maximum(x, 0)
    if kind == "squared_relu":
        return np.maximum(x, 0) ** 2
    if kind == "sigmoid":
        return 1 / (1 + np.exp(-x))
    if kind in ("silu", "quick_gelu"):
        return x / (1 + np.exp(-(1.702 if kind == "quick_gelu" else 1.0) * x))
    assert kind == "gelu", kind
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def activation_grad(
    kind: str,
    dy,
    x,
    step: float = 1e-6,
    *,
    gate_second: bool = False,
    limit: float = 7.0,
    alpha: float | None = None,
    linear_offset: float | None = None,
) -> np.ndarray:
    """The cotangent of x in fp64: of the functions by central differences, of clamps by their definition."""
    x, dy = f64(x), f64(dy)
    if kind in GATES:
        gate, linear = _halves(x, gate_second)
        if kind == "clamped_swiglu":
            inner = np.minimum(gate, limit)
            slope = (_clamped_act(inner + step, alpha) - _clamped_act(inner - step, alpha)) / (2 * step)
            factor = np.clip(linear, -limit, limit) + (1.0 if linear_offset is None else linear_offset)
            d_gate = dy * factor * slope * (gate <= limit)
            d_linear = dy * _clamped_act(inner, alpha) * (np.abs(linear) <= limit)
        else:
            d_gate = activation_grad(GATES[kind], dy * linear, gate)
            d_linear = dy * activation(GATES[kind], gate)
        return np.concatenate([d_linear, d_gate] if gate_second else [d_gate, d_linear], axis=-1)
    if kind == "relu":
        return dy * (x > 0)
    return dy * (activation(kind, x + step) - activation(kind, x - step)) / (2 * step)


def _halves(x: np.ndarray, gate_second: bool) -> tuple[np.ndarray, np.ndarray]:
    first, second = np.split(x, 2, axis=-1)
    return (second, first) if gate_second else (first, second)


def _clamped_act(x: np.ndarray, alpha: float | None) -> np.ndarray:
    return x / (1 + np.exp(-(1.702 if alpha is None else alpha) * x))
