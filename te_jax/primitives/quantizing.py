"""What quantize, norm, activation and activation_grad share: they compute a tensor y and end in a quantizing pass.

See ``QuantizingSpec`` for the results and their order. A primitive adds its own results (statistics) after them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from te_jax import errors
from te_jax.parallel.amax import reduce_amax
from te_jax.parallel.sharding import Factors, Reductions
from te_jax.primitives import block_quantizing, group_quantizing
from te_jax.primitives.spec import QuantizingSpec
from te_jax.quant import reference
from te_jax.quant.division import reciprocal
from te_jax.quant.format import format_of

ALIGNMENT = 16  # minor and contracted dimensions of custom calls are multiples of it
HIGH_PRECISION = tuple(np.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16))


class QuantizeOut(NamedTuple):
    """Results of a pass that can quantize; None where the spec doesn't ask for one.

    hp [*lead, C] high precision; data [*lead, C] FP8; data_t [C, *lead] FP8; scale, scale_inv, amax f32[];
    dbias [C]; mean, rstd f32[*lead]. Block scaling: scale_inv and scale_inv_t of the blocks of data and data_t. A scale
    for each group: scale, scale_inv, amax f32[groups], data_t as ``QuantizingSpec`` says.
    """

    hp: jax.Array | None = None
    data: jax.Array | None = None
    data_t: jax.Array | None = None
    scale: jax.Array | None = None
    scale_inv: jax.Array | None = None
    scale_inv_t: jax.Array | None = None
    amax: jax.Array | None = None
    dbias: jax.Array | None = None
    mean: jax.Array | None = None
    rstd: jax.Array | None = None


def names(spec: QuantizingSpec) -> tuple[str, ...]:
    """The names of the common results that ``spec`` asks for, in order."""
    if spec.blocks:
        return tuple(name for name, want in block_quantizing.wanted(spec).items() if want)
    wanted = {"hp": spec.hp, "data": spec.data, "data_t": spec.data_t, "scale": spec.quantizes}
    wanted |= {"scale_inv": spec.quantizes, "amax": spec.amax, "dbias": spec.dbias}
    return tuple(name for name, want in wanted.items() if want)


def operands(spec: QuantizingSpec, *tensors: str) -> tuple[str, ...]:
    """The names of a pass's operands: ``tensors``, group_sizes where there are ragged groups, and the scale if any."""
    if spec.by_group:
        return (*tensors, *group_quantizing.operands(spec))
    return tensors if spec.blocks else (*tensors, "scale")


def with_scale(
    spec: QuantizingSpec,
    op: str,
    scale: jax.Array | None,
    *tensors: jax.Array,
    group_sizes: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """The operands of a pass; raises ValueError for one that is missing, or that this scaling doesn't take."""
    wanted = {"group_sizes": (group_sizes, spec.scaling == "group"), "scale": (scale, not spec.blocks)}
    for name, (operand, want) in wanted.items():
        expected, got = ("an array" if want else "None"), ("None" if operand is None else "an array")
        errors.check_value(expected == got, op, name, f"{expected} for scaling {spec.scaling}", got)
    return (*tensors, *(operand for operand in (group_sizes, scale) if operand is not None))


def check(spec: QuantizingSpec, op: str, y_shape: tuple[int, ...], *scale) -> None:
    """The operands behind the tensors, and the fields of the spec that don't go together, for y of that shape."""
    format_of(spec.format)
    dtypes = [dtype.name for dtype in HIGH_PRECISION]
    errors.check_type(spec.dbias_dtype in dtypes, op, "dbias_dtype", " or ".join(dtypes), spec.dbias_dtype)
    block_quantizing.check_scaling(spec, op)
    if spec.blocks:
        return block_quantizing.check(spec, op, y_shape)
    if spec.by_group:
        group_quantizing.check(spec, op, y_shape, *scale)
    else:
        check_scalar(op, "scale", *scale)
    alone = spec.amax and not (spec.quantizes or spec.hp or spec.dbias or getattr(spec, "stats", False))
    errors.check_value(not spec.if_unseeded or alone, op, "if_unseeded", "a pass that wants amax alone", spec)
    errors.check_value(names(spec) != (), op, "spec", "at least one wanted result", spec)
    errors.check_value(-64 <= spec.margin <= 64, op, "margin", "-64 to 64", spec.margin)
    return None


def check_scalar(op: str, name: str, aval) -> None:
    errors.check_type(aval.dtype == jnp.float32, op, name, "dtype float32", aval.dtype)
    errors.check_value(aval.shape == (), op, name, "shape ()", aval.shape)


def check_high_precision(op: str, name: str, aval) -> None:
    errors.check_type(aval.dtype in HIGH_PRECISION, op, name, "dtype float32, bfloat16 or float16", aval.dtype)


def check_rank(op: str, name: str, aval) -> None:
    errors.check_value(aval.ndim >= 1, op, name, "rank at least 1", f"shape {aval.shape}")


def results(spec: QuantizingSpec, y_shape: tuple[int, ...], dtype) -> tuple:
    """(shape, dtype) of the common results for y of that shape, quantized from ``dtype``."""
    if spec.blocks:
        return tuple(block_quantizing.results(spec, y_shape, dtype).values())
    if spec.by_group:
        known_by_group = group_quantizing.results(spec, y_shape)
        return tuple(known_by_group[name] for name in names(spec))
    fp8 = format_of(spec.format).dtype
    f32 = np.dtype(np.float32)
    lead, cols = y_shape[:-1], y_shape[-1]
    known = {"hp": (y_shape, dtype), "data": (y_shape, fp8), "data_t": ((cols, *lead), fp8)}
    known |= {
        "scale": ((), f32),
        "scale_inv": ((), f32),
        "amax": ((), f32),
        "dbias": ((cols,), np.dtype(jnp.dtype(spec.dbias_dtype))),
    }
    return tuple(known[name] for name in names(spec))


def factors(spec: QuantizingSpec, lead: Factors, cols: str, y_shape: tuple[int, ...]) -> tuple[Factors, ...]:
    """Factors (``te_jax.parallel.sharding``) of the common results for y of that shape, factors ``(*lead, cols)``."""
    if spec.blocks:
        return tuple(block_quantizing.factors(spec, lead, cols, y_shape).values())
    if spec.by_group:
        known = group_quantizing.factors(spec, lead, cols)
    else:
        known = {"hp": (*lead, cols), "data": (*lead, cols), "data_t": (cols, *lead)}
        known |= {"scale": (), "scale_inv": (), "amax": (), "dbias": (cols,)}
    return tuple(known[name] for name in names(spec))


def workspace_bytes(spec: QuantizingSpec, y_shape: tuple[int, ...], *, norm: bool = False) -> int:
    """Bytes of device memory that the pass over y works in on CUDA: ``PassWorkspace`` in csrc/kernels/workspace.h.

    fp32 and its bit patterns: the partial maxima of amax, dbias of each row of tiles, mean and rstd of each row.
    """
    rows, cols = math.prod(y_shape[:-1]), y_shape[-1]
    if spec.by_group:
        return group_quantizing.workspace_bytes(spec)
    # In block scaling no tile crosses from one sequence into the next.
    group = y_shape[-2] if spec.blocks and len(y_shape) > 1 else rows
    row_tiles = rows // group * -(-group // 128) if rows else 0
    words = 512 + (row_tiles * cols if spec.dbias else 0) + (2 * rows if norm else 0)
    return 4 * words


def scale_factors(spec: QuantizingSpec) -> tuple[Factors, ...]:
    """Factors of the operands behind the tensors."""
    if spec.by_group:
        return group_quantizing.scale_factors(spec)
    return () if spec.blocks else ((),)


def replicated(spec: QuantizingSpec, lead: Factors, cols: str, y_shape: tuple[int, ...]) -> Factors:
    """The factors of y that quantizing it doesn't allow to be split."""
    if spec.by_group:
        return group_quantizing.replicated(spec, lead)
    return block_quantizing.replicated(spec, lead, cols, y_shape) if spec.blocks else ()


def lead_factors(ndim: int) -> Factors:
    return tuple(f"l{i}" for i in range(ndim - 1))


def finish(spec: QuantizingSpec, y: jax.Array, *scale: jax.Array) -> tuple:
    """The common results for y [*lead, C], in jnp."""
    if spec.blocks:
        return tuple(block_quantizing.finish(spec, y).values())
    if spec.by_group:
        results_by_group = group_quantizing.finish(spec, y, *scale)
        return tuple(results_by_group[name] for name in names(spec))
    return _finish_tensor(spec, y, *scale)


def _finish_tensor(spec: QuantizingSpec, y: jax.Array, scale: jax.Array) -> tuple:
    fmt = format_of(spec.format)
    if spec.if_unseeded:
        return (jnp.where(scale == 0, reference.amax(y), jnp.float32(0)),)
    q = reference.quantize(y, scale, fmt, margin=spec.margin, power_of_two=spec.power_of_two)
    known = {
        "hp": y,
        "data": q.data,
        "data_t": jnp.moveaxis(q.data, -1, 0),
        "scale": q.scale,
        "scale_inv": q.scale_inv,
        "amax": q.amax,
        "dbias": jnp.sum(y.astype(jnp.float32), axis=tuple(range(y.ndim - 1))).astype(spec.dbias_dtype),
    }
    return tuple(known[name] for name in names(spec))


def why_not(spec: QuantizingSpec, y_shape: tuple[int, ...]) -> str | None:
    """Why the handlers don't take a y of that shape."""
    rows, cols = int(np.prod(y_shape[:-1])), y_shape[-1]
    if rows == 0 or cols == 0:
        return f"shape {y_shape} has no elements"
    if cols % ALIGNMENT:
        return f"last dimension {cols} is not a multiple of {ALIGNMENT}"
    if spec.by_group:
        return group_quantizing.why_not(spec, y_shape, ALIGNMENT)
    if spec.blocks:
        return block_quantizing.why_not(spec, y_shape, ALIGNMENT)
    if spec.data_t and rows % ALIGNMENT:
        return f"a transposed copy is wanted and the number of rows {rows} is not a multiple of {ALIGNMENT}"
    return None


def local(call: Callable, spec: QuantizingSpec, reductions: Reductions, *operands: jax.Array) -> tuple:
    """The pass on one shard. ``scale`` is the last operand, except in block scaling, where each block has its own.

    An unseeded scale has to come from the whole tensor's amax, so where there is anything to reduce it is found first,
    by a pass that reads nothing if the scale is given; by none if that is known of it.
    """
    dbias_dtype = spec.dbias_dtype
    if spec.dbias and reductions.sums:
        spec = dataclasses.replace(spec, dbias_dtype="float32")  # rounded once, after the sum over shards
    if spec.blocks:
        return _sum_dbias(spec, reductions, dbias_dtype, call(spec, *operands))
    *tensors, scale = operands
    if spec.quantizes and reductions.amax and not spec.seeded:
        (shard_amax,) = call(_amax_only(spec), *operands)
        seeded = reference.scale_from_amax(
            reduce_amax(shard_amax, reductions.amax),
            format_of(spec.format).max,
            margin=spec.margin,
            power_of_two=spec.power_of_two,
        )
        scale = jnp.where(scale == 0, seeded, scale)
    outs = _by_name(spec, call(spec, *tensors, scale))
    if reductions.amax and spec.quantizes:
        # The same values as the pass gives, but typed as equal on all shards.
        outs |= {"scale": scale, "scale_inv": reciprocal(scale)}
    if spec.amax:
        axes = (axis for axis in reductions.amax if not (spec.amax_of_part and axis in reductions.manual))
        outs["amax"] = reduce_amax(outs["amax"], tuple(axes))
    return _sum_dbias(spec, reductions, dbias_dtype, outs.values())


def _by_name(spec: QuantizingSpec, outs: Sequence[jax.Array]) -> dict[Any, jax.Array]:
    """Common results by name, and after them the primitive's own by number."""
    common = names(spec)
    return dict(zip((*common, *range(len(outs) - len(common))), outs, strict=True))


def _sum_dbias(spec: QuantizingSpec, reductions: Reductions, dbias_dtype: str, outs: Iterable[jax.Array]) -> tuple:
    results = _by_name(spec, tuple(outs))
    if spec.dbias and reductions.sums:
        results["dbias"] = jax.lax.psum(results["dbias"], reductions.sums).astype(dbias_dtype)
    return tuple(results.values())


def _amax_only(spec: QuantizingSpec) -> QuantizingSpec:
    only: dict[str, Any] = {
        "hp": False,
        "data": False,
        "data_t": False,
        "amax": True,
        "dbias": False,
        "if_unseeded": True,
    }
    if hasattr(spec, "stats"):
        only["stats"] = False
    return dataclasses.replace(spec, **only)


def to_out(spec: QuantizingSpec, outs: Sequence[jax.Array], extra: Sequence[str] = ()) -> QuantizeOut:
    return QuantizeOut(**dict(zip((*names(spec), *extra), outs, strict=True)))


def on_device(spec: QuantizingSpec, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """What a CUDA handler is given: ``group_quantizing.on_device`` where there are ragged groups."""
    if spec.scaling != "group":
        return operands
    *tensors, group_sizes, scale = operands
    return (*tensors, *group_quantizing.on_device(tensors[0].shape[0], group_sizes, scale))
