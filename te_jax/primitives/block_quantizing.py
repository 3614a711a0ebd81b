"""The results of a quantizing pass in block scaling. ``quantizing.py`` has what it shares with tensor scaling.

x and dy are quantized in 1x128 blocks: ``data`` along the last dimension, ``data_t`` along the last leading one, each
with its own scales. The kernel [K, N] is quantized in 128x128 blocks, whose transpose is the same blocks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from te_jax import errors
from te_jax.parallel.sharding import Factors, in_blocks, splits_in_blocks
from te_jax.primitives.spec import QuantizingSpec
from te_jax.quant.block_reference import (
    BLOCK,
    BLOCK_128X128,
    BLOCKS,
    SCALINGS,
    gemm_layout,
    gemm_scale_shape,
    quantize_block,
    transposed,
    transposed_shape,
)
from te_jax.quant.format import format_of

NAMES = ("hp", "data", "data_t", "scale_inv", "scale_inv_t", "dbias")


def wanted(spec: QuantizingSpec) -> dict[str, bool]:
    """Which of ``NAMES`` the spec asks for."""
    known = {"hp": spec.hp, "data": spec.data, "data_t": spec.data_t}
    return known | {"scale_inv": spec.data, "scale_inv_t": spec.data_t, "dbias": spec.dbias}


def check_scaling(spec: QuantizingSpec, op: str) -> None:
    known = (*SCALINGS, "group", "leading")
    errors.check_value(spec.scaling in known, op, "scaling", " or ".join(known), spec.scaling)


def check(spec: QuantizingSpec, op: str, y_shape: tuple[int, ...]) -> None:
    """The fields that don't go together with block scaling, for y of that shape."""
    errors.check_value(spec.quantizes, op, "spec", f"data or data_t in {spec.scaling}", "neither")
    none = not (spec.amax or spec.if_unseeded or spec.margin)
    errors.check_value(none, op, "spec", f"no amax, if_unseeded or margin in {spec.scaling}", spec)
    if spec.scaling == "block_128x128":
        expected = "tensor or block_1x128 (only quantize writes 128x128 blocks)"
        errors.check_value(op == "quantize", op, "scaling", expected, spec.scaling)
        errors.check_value(len(y_shape) == 2, op, "x", f"2 dimensions in {spec.scaling}", f"shape {y_shape}")
    if spec.data_t:
        errors.check_value(len(y_shape) >= 2, op, "x", "2 dimensions or more for data_t", f"shape {y_shape}")


def results(spec: QuantizingSpec, y_shape: tuple[int, ...], dtype) -> dict[str, tuple]:
    """Name -> (shape, dtype) of the results that are wanted."""
    fp8, f32, block = format_of(spec.format).dtype, np.dtype(np.float32), BLOCKS[spec.scaling]
    known = {
        "hp": lambda: (y_shape, dtype),
        "data": lambda: (y_shape, fp8),
        "data_t": lambda: (transposed_shape(y_shape, block), fp8),
        "scale_inv": lambda: (gemm_scale_shape(y_shape, block), f32),
        "scale_inv_t": lambda: (gemm_scale_shape(transposed_shape(y_shape, block), block, len(y_shape) - 1), f32),
        "dbias": lambda: (y_shape[-1:], np.dtype(jnp.dtype(spec.dbias_dtype))),
    }
    return {name: known[name]() for name, want in wanted(spec).items() if want}


def factors(spec: QuantizingSpec, lead: Factors, cols: str, y_shape: tuple[int, ...]) -> dict[str, Factors]:
    """Name -> factors of the results for y of that shape with factors ``(*lead, cols)``.

    Where tokens aren't whole blocks, the padded dimension of ``data_t`` isn't that of y any more.
    """
    rows_too = spec.scaling == "block_128x128"
    within, last = lead[:-1], lead[-1:]
    last_t = last
    if last and not rows_too and y_shape[-2] % BLOCK:
        last_t = (f"{last[0]}_padded",)
    blocks = tuple(in_blocks(factor) for factor in last)
    known = {
        "hp": (*lead, cols),
        "data": (*lead, cols),
        "data_t": (cols, *within, *last_t),
        "scale_inv": (*blocks, in_blocks(cols)) if rows_too else (in_blocks(cols), *lead),
        "scale_inv_t": (in_blocks(cols), *blocks) if rows_too else (*within, *blocks, cols),
        "dbias": (cols,),
    }
    return {name: known[name] for name, want in wanted(spec).items() if want}


def replicated(spec: QuantizingSpec, lead: Factors, cols: str, y_shape: tuple[int, ...]) -> Factors:
    """The factors that can't be split, because their blocks would be: those that aren't several whole blocks."""
    fixed: tuple[str, ...] = ()
    rows_too = spec.scaling == "block_128x128"
    if (spec.data or rows_too) and not splits_in_blocks(y_shape[-1]):
        fixed += (cols,)
    if (spec.data_t or rows_too) and not splits_in_blocks(y_shape[-2]):
        fixed += (lead[-1], f"{lead[-1]}_padded")
    return fixed


def finish(spec: QuantizingSpec, y: jax.Array) -> dict[str, jax.Array]:
    """Name -> result for y [*lead, C], in jnp."""
    block, out = BLOCKS[spec.scaling], {}
    if spec.hp:
        out["hp"] = y
    if spec.data:
        out["data"], scale_inv = _quantize(spec, y)
        out["scale_inv"] = gemm_layout(scale_inv, block)
    if spec.data_t:
        out["data_t"], scale_inv = _quantize(spec, transposed(y, block))
        out["scale_inv_t"] = gemm_layout(scale_inv, block, y.ndim - 1)
    if spec.dbias:
        out["dbias"] = jnp.sum(y.astype(jnp.float32), axis=tuple(range(y.ndim - 1))).astype(spec.dbias_dtype)
    return {name: out[name] for name in NAMES if name in out}


def _quantize(spec: QuantizingSpec, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return quantize_block(y, BLOCKS[spec.scaling], format=spec.format, power_of_two=spec.power_of_two)


def why_not(spec: QuantizingSpec, y_shape: tuple[int, ...], alignment: int) -> str | None:
    """Why the handlers don't take a y of that shape that has elements and an aligned last dimension."""
    if BLOCKS[spec.scaling] == BLOCK_128X128 and spec.data_t and y_shape[-2] % alignment:
        return f"a transposed copy is wanted and the number of rows {y_shape[-2]} is not a multiple of {alignment}"
    return None
