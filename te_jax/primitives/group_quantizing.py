"""The results of a quantizing pass with a scale for each group. ``quantizing.py`` has what it shares with the others.

"group": y [T, C], whose rows are in ragged groups, of sizes that are an operand. "leading": y [G, R, C], a group for
each index of the first dimension. ``te_jax/quant/grouped_reference.py`` defines both.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from te_jax import errors
from te_jax.parallel.sharding import Factors
from te_jax.primitives.spec import QuantizingSpec
from te_jax.quant import grouped_reference as grouped
from te_jax.quant.format import format_of

MAX_GROUPS = 1024  # kMaxGroups in csrc/core/grouped_args.h

_F32 = np.dtype(np.float32)


def operands(spec: QuantizingSpec) -> tuple[str, ...]:
    """The names of the operands behind the tensors."""
    return ("group_sizes", "scale") if spec.scaling == "group" else ("scale",)


def check(spec: QuantizingSpec, op: str, y_shape: tuple[int, ...], *rest) -> None:
    """The operands behind the tensors, and the fields that don't go together with groups, for y of that shape."""
    errors.check_value(not (spec.hp or spec.dbias), op, "spec", f"no hp and no dbias in scaling {spec.scaling}", spec)
    errors.check_value(spec.groups > 0, op, "groups", "at least 1", spec.groups)
    *group_sizes, scale = rest
    for aval in group_sizes:
        check_group_sizes(op, aval, spec.groups)
    check_by_group(op, "scale", scale, spec.groups)
    if spec.scaling == "leading":
        errors.check_value(op == "quantize", op, "scaling", "leading for quantize only", spec.scaling)
        ok = len(y_shape) == 3 and y_shape[0] == spec.groups
        errors.check_value(ok, op, "x", f"shape ({spec.groups}, rows, features)", f"shape {y_shape}")
    else:
        passes = ("quantize", "activation", "activation_grad")
        errors.check_value(op in passes, op, "scaling", f"group for {', '.join(passes)} only", spec.scaling)
        errors.check_value(len(y_shape) == 2, op, "x", "2 dimensions, [tokens, features]", f"shape {y_shape}")


def check_group_sizes(op: str, aval, groups: int) -> None:
    errors.check_type(aval.dtype == jnp.int32, op, "group_sizes", "dtype int32", aval.dtype)
    errors.check_value(aval.shape == (groups,), op, "group_sizes", f"shape ({groups},)", aval.shape)


def check_by_group(op: str, name: str, aval, groups: int) -> None:
    """``aval`` is f32[G]."""
    errors.check_type(aval.dtype == jnp.float32, op, name, "dtype float32", aval.dtype)
    errors.check_value(aval.shape == (groups,), op, name, f"shape ({groups},)", aval.shape)


def on_device(rows: int, group_sizes: jax.Array, *by_group: jax.Array) -> tuple[jax.Array, ...]:
    """What a CUDA kernel is given of group_sizes and arrays f32[G]: where sizes can't be, one group, all of it NaN.

    Values that only the device knows can't raise there, and a step that goes on with half of its tokens would look
    healthy.
    """
    valid = grouped.are_valid(group_sizes, rows)
    everything = jnp.zeros_like(group_sizes).at[0].set(rows)
    return jnp.where(valid, group_sizes, everything), *(jnp.where(valid, x, jnp.nan) for x in by_group)


def results(spec: QuantizingSpec, y_shape: tuple[int, ...]) -> dict[str, tuple]:
    """Name -> (shape, dtype) of the results that there can be."""
    fp8 = format_of(spec.format).dtype
    if spec.scaling == "leading":
        transposed = (y_shape[0], y_shape[2], y_shape[1])
    else:
        transposed = (y_shape[1], grouped.padded_rows(y_shape[0]))
    known = dict.fromkeys(("scale", "scale_inv", "amax"), ((spec.groups,), _F32))
    return {"data": (y_shape, fp8), "data_t": (transposed, fp8), **known}


def finish(spec: QuantizingSpec, y: jax.Array, *rest: jax.Array) -> dict[str, jax.Array]:
    """The results for y, in jnp, by name."""
    fmt, margin = format_of(spec.format), spec.margin
    if spec.scaling == "leading":
        q = grouped.quantize_leading(y, *rest, format=fmt, margin=margin, power_of_two=spec.power_of_two)
        data_t = jnp.swapaxes(q.data, 1, 2)
    else:
        q = grouped.quantize_rows(y, *rest, format=fmt, margin=margin, power_of_two=spec.power_of_two)
        data_t = grouped.transposed(q.data)
    return {"data": q.data, "data_t": data_t, "scale": q.scale, "scale_inv": q.scale_inv, "amax": q.amax}


def factors(spec: QuantizingSpec, lead: Factors, cols: str) -> dict[str, Factors]:
    """Factors of the results for y of factors ``(*lead, cols)``, by name."""
    group = scale_factors(spec)[-1]
    known = {"data": (*lead, cols), "scale": group, "scale_inv": group, "amax": group}
    transposed = (lead[0], cols, lead[1]) if spec.scaling == "leading" else (cols, "padded")
    return {**known, "data_t": transposed}


def scale_factors(spec: QuantizingSpec) -> tuple[Factors, ...]:
    """Factors of the operands behind the tensors; ``l0`` is the first of ``quantizing.lead_factors``."""
    return (("l0",),) if spec.scaling == "leading" else (("g",), ("g",))


def replicated(spec: QuantizingSpec, lead: Factors) -> Factors:
    """What isn't split: a ragged group may lie anywhere along the tokens."""
    if spec.scaling == "leading":
        return ()
    return (*lead, "g", *(("padded",) if spec.data_t else ()))


def why_not(spec: QuantizingSpec, y_shape: tuple[int, ...], alignment: int) -> str | None:
    """Why the handlers don't take a y of that shape, whose last dimension is aligned."""
    if spec.groups > MAX_GROUPS:
        return f"{spec.groups} groups: more than {MAX_GROUPS}"
    if spec.scaling == "leading" and y_shape[1] % alignment:
        return f"rows of a group {y_shape[1]} are not a multiple of {alignment}"
    return None


def workspace_bytes(spec: QuantizingSpec) -> int:
    """Bytes that a pass by group works in on CUDA: ``PassWorkspace`` in csrc/kernels/workspace.h."""
    return 12 * spec.groups + 4
