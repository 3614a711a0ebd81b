"""Calls a custom call directly, without the primitive around it, and the NumPy float64 references of the results."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

FP8 = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2)}
FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
F32 = np.dtype(np.float32)


def call(name, spec, results, *operands):
    """Runs ``te_jax_<name>`` on CPU. ``results`` is a list of (shape, dtype). Returns NumPy arrays."""
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]

    def function(*arrays):
        return jax.ffi.ffi_call(f"te_jax_{name}", shapes)(*arrays, spec=spec.attributes())

    return [np.asarray(out) for out in jax.jit(function)(*map(jnp.asarray, operands))]


def results_of(spec, dtype, shape):
    """The (shape, dtype) list of a quantizing pass over y of that dtype and shape [*lead, C]."""
    fp8, transposed = FP8[spec.format], (shape[-1], *shape[:-1])
    wanted = [
        (spec.hp, [(shape, dtype)]),
        (spec.data, [(shape, fp8)]),
        (spec.data_t, [(transposed, fp8)]),
        (spec.quantizes, [((), F32), ((), F32)]),
        (spec.amax, [((), F32)]),
        (spec.dbias, [((shape[-1],), F32)]),
    ]
    return [result for is_wanted, results in wanted if is_wanted for result in results]


def everything(spec_type, fmt, **fields):
    """A spec that wants every result (but hp of quantize)."""
    spec = spec_type(format=fmt, data=True, data_t=True, amax=True, dbias=True, **fields)
    return spec if spec_type.__name__ == "QuantizeSpec" else dataclasses.replace(spec, hp=True)


def cast(y, scale, fmt):
    """cast(clamp(y * scale)) by ml_dtypes, NaN for a y that is not finite. y float32, scale a float32 scalar."""
    product = y.astype(np.float32) * np.float32(scale)
    clamped = np.clip(product, -FP8_MAX[fmt], FP8_MAX[fmt])
    return np.where(np.isfinite(y), clamped, np.nan).astype(FP8[fmt])


def scale_from_amax(amax, fmt, margin=0, power_of_two=False):
    if not np.isfinite(amax) or amax <= 0:
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = min(np.float32(FP8_MAX[fmt]) / np.float32(amax) * np.float32(2.0**-margin), np.float32(2.0**126))
    return np.float32(2.0 ** np.floor(np.log2(float(scale)))) if power_of_two else np.float32(scale)


def codes(x):
    """FP8 as bytes with one code for every NaN."""
    return np.where(np.isnan(x.astype(np.float32)), 0x7F, x.view(np.uint8))


def check_quantized(spec, y, scale, outs):
    """Every result of a quantizing pass against y [*lead, C] as it was rounded, bit for bit."""
    outs = list(outs)
    y32 = y.astype(np.float32)
    amax = np.max(np.abs(y32)) if not np.isnan(y32).any() else np.float32(np.nan)
    used = scale if scale != 0 else scale_from_amax(amax, spec.format, spec.margin, spec.power_of_two)
    want = cast(y32, used, spec.format)
    if spec.hp:
        np.testing.assert_array_equal(outs.pop(0).astype(np.float32), y32)
    if spec.data:
        np.testing.assert_array_equal(codes(outs.pop(0)), codes(want))
    if spec.data_t:
        np.testing.assert_array_equal(codes(outs.pop(0)), codes(np.moveaxis(want, -1, 0)))
    if spec.quantizes:
        np.testing.assert_array_equal(outs.pop(0), np.float32(used))
        np.testing.assert_array_equal(outs.pop(0), np.float32(1) / np.float32(used))
    if spec.amax:
        np.testing.assert_array_equal(outs.pop(0), amax)
    if spec.dbias:
        exact = y32.astype(np.float64).reshape(-1, y.shape[-1]).sum(0)
        np.testing.assert_allclose(outs.pop(0), exact, rtol=1e-6, atol=1e-30)
    assert not outs
