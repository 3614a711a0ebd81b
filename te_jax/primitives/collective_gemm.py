"""``collective_gemm``: GEMM + reduce-scatter or all-gather + GEMM between the devices along a mesh axis, overlapped.

The handlers run the schedules of ``csrc/comm`` (docs/design/0006). Where they can't, the plain pair runs: the GEMM and
then the collective of jax, or the reverse. Both add partial products in the order of ranks.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from te_jax import compat, errors
from te_jax.parallel import mesh as mesh_lib
from te_jax.parallel.amax import reduce_amax
from te_jax.parallel.sharding import ShardingRule
from te_jax.primitives import library
from te_jax.primitives.collective_schedule import MAX_CHUNKS, MAX_RANKS, out_dtype, schedule, sizes, travelling
from te_jax.primitives.custom_call import CustomCall
from te_jax.primitives.definition import DEFINITIONS, Definition
from te_jax.primitives.gemm import bind_native as native_gemm
from te_jax.primitives.spec import COLLECTIVES, CollectiveGemmSpec, GemmSpec
from te_jax.quant import reference
from te_jax.quant.format import format_of, is_fp8

_OP = "collective_gemm"
_F32 = np.dtype(np.float32)


class CollectiveGemmOut(NamedTuple):
    """Results; None where the spec doesn't ask for one.

    out [*B, M/t, N] (matmul_reduce_scatter) or [*B, M, N] (all_gather_matmul); gathered [*B, M, K] in lhs's dtype, and
    with FP8 gathered_scale_inv f32[ranks], or f32 of blocks; amax f32[].
    """

    out: jax.Array
    gathered: jax.Array | None = None
    gathered_scale_inv: jax.Array | None = None
    amax: jax.Array | None = None


def collective_gemm(
    lhs: jax.Array,
    rhs: jax.Array,
    spec: CollectiveGemmSpec,
    *,
    lhs_scale_inv: jax.Array | None = None,
    rhs_scale_inv: jax.Array | None = None,
    bias: jax.Array | None = None,
    out_scale: jax.Array | None = None,
    place: jax.Array | None = None,
) -> CollectiveGemmOut:
    """One of ``spec.COLLECTIVES`` on this device's part, inside ``shard_map``; see ``CollectiveGemmSpec``.

    Every device along ``spec.axis_name`` has to make the call, like a collective of ``jax.lax``.

    Args:
      lhs: [*B, M, K/t] (matmul_reduce_scatter) or [*B, M/t, K] (all_gather_matmul): FP8 if ``spec.fp8``, otherwise
        float32, bfloat16 or float16.
      rhs: [N, K/t] or [N/t, K], contracted last, or first if ``spec.rhs_contract_first``; as lhs, not both E5M2.
      lhs_scale_inv, rhs_scale_inv: with FP8 operands only: f32[], or f32 of blocks, as for ``gemm``.
      bias: [N], of out's columns; equal on all ranks for matmul_reduce_scatter. dtype as for ``gemm``.
      out_scale: f32[], with an FP8 ``spec.out_dtype`` only.
      place: i32[2], (rank, group); None: what the mesh says, which is right unless axes were renamed by hand.

    Raises:
      ValueError, TypeError: for what no platform takes: shapes, dtypes, a call outside ``shard_map``, rows that the
        ranks don't divide.
    """
    kind = mesh_lib.named_axis(_OP, spec.axis_name, lhs)
    manual = spec.axis_name in mesh_lib.manual_axes()
    errors.check_value(manual, _OP, "axis_name", "an axis of the surrounding shard_map", repr(spec.axis_name))
    assert kind is not None
    scale_varies = lhs_scale_inv is None or spec.axis_name in compat.varying_axes(lhs_scale_inv)
    spec = dataclasses.replace(
        spec,
        ranks=spec.ranks or kind.size,
        group=spec.group or group_name(spec.axis_name),
        equal_scales=spec.equal_scales or (compat.checks_varying_axes() and not scale_varies),
    )
    errors.check_value(spec.ranks == kind.size, _OP, "ranks", f"{kind.size}, the size of the axis", spec.ranks)
    given = {"lhs": lhs, "rhs": rhs, "lhs_scale_inv": lhs_scale_inv, "rhs_scale_inv": rhs_scale_inv}
    given |= {"bias": bias, "out_scale": out_scale, "place": place_of(spec.axis_name) if place is None else place}
    wanted = _operands(spec)
    for name, operand in given.items():
        expected, got = ("an array" if name in wanted else "None"), ("None" if operand is None else "an array")
        errors.check_value(expected == got, _OP, name, f"{expected} for this spec", got)
    operands = [operand for operand in given.values() if operand is not None]
    axes = mesh_lib.amax_axes(lhs, out_scale) if spec.amax else ()
    return to_out(spec, _COLLECTIVE_GEMM(spec, *operands, amax_axes=axes))


def place_of(axis_name: str) -> jax.Array:
    """i32[2]: the device's rank along the axis, and the number of its group: its place along all the others."""
    mesh = compat.get_abstract_mesh()
    rank, group = jax.lax.axis_index(axis_name), jnp.int32(0)
    for axis in mesh.axis_names:
        if axis != axis_name and axis in mesh.manual_axes:
            group = group * np.int32(mesh.shape[axis]) + jax.lax.axis_index(axis)
    # The sum types the result as varying over all of the axes.
    return jnp.where(jnp.arange(2) == 0, rank, group)


def group_name(axis_name: str) -> str:
    """What tells the groups along an axis of this mesh from those of another: "data=2 tp=4: tp"."""
    mesh = compat.get_abstract_mesh()
    return " ".join(f"{axis}={size}" for axis, size in mesh.shape.items()) + f": {axis_name}"


def to_out(spec: CollectiveGemmSpec, outs) -> CollectiveGemmOut:
    return CollectiveGemmOut(**dict(zip(_result_names(spec), outs, strict=True)))


# The definition


def _operands(spec) -> tuple[str, ...]:
    wanted = {"lhs": True, "rhs": True, "lhs_scale_inv": spec.fp8, "rhs_scale_inv": spec.fp8, "bias": spec.bias}
    wanted |= {"out_scale": is_fp8(out_dtype(spec)), "place": True}
    return tuple(name for name, want in wanted.items() if want)


def _result_names(spec) -> tuple[str, ...]:
    wanted = {"out": True, "gathered": spec.keep_gathered, "gathered_scale_inv": spec.keep_gathered and spec.fp8}
    wanted |= {"amax": spec.amax}
    return tuple(name for name, want in wanted.items() if want)


def gemm_spec(spec: CollectiveGemmSpec) -> GemmSpec:
    """The GEMM of one rank without the collective, with the epilogue of the whole."""
    shared = ("fp8", "rhs_contract_first", "out_dtype", "bias", "amax", "fast_accumulation")
    return GemmSpec(**{name: getattr(spec, name) for name in (*shared, "lhs_scaling", "rhs_scaling")})


def _check(spec, lhs, rhs, *rest):
    errors.check_value(spec.kind in COLLECTIVES, _OP, "kind", " or ".join(COLLECTIVES), repr(spec.kind))
    errors.check_value(len(lhs.shape) >= 2, _OP, "lhs", "rank at least 2 ([*B, M, K])", f"shape {lhs.shape}")
    errors.check_value(len(rhs.shape) == 2, _OP, "rhs", "rank 2", f"shape {rhs.shape}")
    DEFINITIONS[GemmSpec].check(gemm_spec(spec), lhs, rhs, *rest[:-1])
    rows = lhs.shape[-2]
    if not spec.gathers:
        expected = f"rows that {spec.ranks} ranks divide, at least one for each"
        errors.check_value(rows >= spec.ranks and rows % spec.ranks == 0, _OP, "lhs", expected, f"{rows} rows")
    errors.check_value(spec.gathers or not spec.keep_gathered, _OP, "keep_gathered", "False for a reduce-scatter", True)
    errors.check_value(not (spec.gathers and spec.direct), _OP, "direct", "False for an all-gather", True)
    errors.check_value(0 <= spec.chunks <= MAX_CHUNKS, _OP, "chunks", f"0 to {MAX_CHUNKS}", spec.chunks)
    errors.check_value(spec.chunks > 0 or not spec.direct, _OP, "direct", "False where chunks is 0", True)
    errors.check_value(spec.timeout_ms > 0, _OP, "timeout_ms", "at least 1", spec.timeout_ms)
    errors.check_type(rest[-1].dtype == np.int32, _OP, "place", "dtype int32", rest[-1].dtype)
    errors.check_value(rest[-1].shape == (2,), _OP, "place", "shape (2,)", rest[-1].shape)


def _results(spec, lhs, rhs, *rest):
    lead, rows, k = lhs.shape[:-2], lhs.shape[-2], lhs.shape[-1]
    all_rows = rows * spec.ranks
    out_rows = all_rows if spec.gathers else rows // spec.ranks
    n = sizes(spec, lhs, rhs).n
    known: dict[str, tuple] = {"out": ((*lead, out_rows, n), out_dtype(spec)), "amax": ((), _F32)}
    known["gathered"] = ((*lead, all_rows, k), np.dtype(lhs.dtype))
    if spec.fp8:
        *blocks, last = rest[0].shape or (1,)
        known["gathered_scale_inv"] = ((*blocks, last * spec.ranks), _F32)
    return tuple(known[name] for name in _result_names(spec))


def _pair(gemm, spec, lhs, rhs, *rest):
    """The GEMM and the collective, one after the other. ``gemm(spec, *operands)`` gives a tuple."""
    rest = dict(zip(_operands(spec)[2:], rest, strict=True))
    outs = (_gather_then_gemm if spec.gathers else _gemm_then_scatter)(gemm, spec, lhs, rhs, rest)
    return tuple(outs[name] for name in _result_names(spec))


def _gemm_then_scatter(gemm, spec, lhs, rhs, rest):
    bare = dataclasses.replace(gemm_spec(spec), out_dtype=travelling(spec).name, bias=False, amax=False)
    (partial,) = gemm(bare, lhs, rhs, *_scales(spec, rest))
    lead, (rows, n) = lhs.shape[:-2], partial.shape[-2:]
    partial = partial.reshape(*lead, spec.ranks, rows // spec.ranks, n)
    # Not psum_scatter: which order that adds in, and how often it rounds, is XLA's and NCCL's choice.
    parts = partial[None, ..., 0, :, :]
    if spec.ranks > 1:
        parts = jax.lax.all_to_all(partial, spec.axis_name, split_axis=len(lead), concat_axis=0)
    total = parts[0].astype(jnp.float32)
    for rank in range(1, spec.ranks):
        total = total + parts[rank].astype(jnp.float32)
    if spec.bias:
        total = total + rest["bias"].astype(jnp.float32)
    if not is_fp8(out_dtype(spec)):
        return {"out": total.astype(out_dtype(spec))}
    data = reference.cast(total, rest["out_scale"], format_of(out_dtype(spec)))
    return {"out": data, "amax": reference.amax(total) if spec.amax else None}


def _gather_then_gemm(gemm, spec, lhs, rhs, rest):
    rows = lhs.shape[-2]
    gathered = jax.lax.all_gather(lhs, spec.axis_name, axis=lhs.ndim - 2, tiled=True)
    epilogue = [rest[name] for name in ("bias", "out_scale") if name in rest]
    if not spec.fp8:
        out, *amax = gemm(gemm_spec(spec), gathered, rhs, *epilogue)
        return {"out": out, "gathered": gathered, "amax": amax[0] if amax else None}
    scale, rhs_scale = _scales(spec, rest)
    axis = scale.ndim - 1
    scales = jax.lax.all_gather(scale, spec.axis_name, axis=max(axis, 0), tiled=axis >= 0)
    if spec.blocks or spec.equal_scales:
        out, *amax = gemm(gemm_spec(spec), gathered, rhs, scales if spec.blocks else scale, rhs_scale, *epilogue)
    else:
        blocks = [jax.lax.slice_in_dim(gathered, r * rows, (r + 1) * rows, axis=-2) for r in range(spec.ranks)]
        products = [gemm(gemm_spec(spec), x, rhs, scales[r], rhs_scale, *epilogue) for r, x in enumerate(blocks)]
        out = jnp.concatenate([product[0] for product in products], axis=-2)
        amax = [reference.amax(jnp.stack([product[1] for product in products]))] if spec.amax else []
    return {"out": out, "gathered": gathered, "gathered_scale_inv": scales, "amax": amax[0] if amax else None}


def _scales(spec, rest):
    return tuple(rest[name] for name in ("lhs_scale_inv", "rhs_scale_inv") if spec.fp8)


def _reference(spec, *operands):
    return _pair(DEFINITIONS[GemmSpec].reference, spec, *operands)


def _plain(spec, *operands):
    return _pair(native_gemm, spec, *operands)


def _local(call, spec, reductions, *operands):
    outs = dict(zip(_result_names(spec), call(spec, *operands), strict=True))
    if spec.amax:
        outs["amax"] = reduce_amax(outs["amax"], reductions.amax)
    return tuple(outs.values())


def _why_not(spec, lhs, rhs, *rest):
    if not 2 <= spec.ranks <= MAX_RANKS:
        return f"{spec.ranks} ranks along {spec.axis_name!r}: the overlapped call is for 2 to {MAX_RANKS}"
    if spec.blocks:
        reason = _why_not_blocks(spec, lhs, sizes(spec, lhs, rhs))
        if reason:
            return f"block-scaled operands: {reason}"
    return DEFINITIONS[GemmSpec].why_not(gemm_spec(spec), lhs, rhs, *rest[:-1])


def _why_not_blocks(spec, lhs, size):
    """A run of rows has its scales in one piece of memory if it is all rows of lhs."""
    if spec.lhs_scaling != "block_1x128":
        return f"lhs_scaling is {spec.lhs_scaling}, not block_1x128"
    if size.batch > 1:
        return f"lhs {lhs.shape} has a batch dimension, whose rows' scales are apart"
    if size.block_rows % 8:
        return f"{size.block_rows} rows of a rank are not a multiple of 8"
    if spec.gathers and spec.chunks > 1:
        return "an all-gather in pieces, whose rows' scales are apart"
    return None


# The smallest product of one rank, in multiplications, for which the overlapped call was measured on two H200: there it
# is 1.3 to 1.4 times faster than the pair. Launches cost the same whatever the size, so smaller ones lose somewhere.
SMALLEST_MEASURED = 2048 * 4096 * 2048


def _why_not_on(platform, spec, lhs, rhs, *rest):
    if platform == "cpu" and jax.process_count() > 1:
        return "several processes: CPU devices share the memory of one only"
    if platform != "cuda" or spec.chunks:
        return None
    size = sizes(spec, lhs, rhs)
    product = size.rows * size.n * size.k
    if product < SMALLEST_MEASURED:
        return f"a product of {product} multiplications is below {SMALLEST_MEASURED}, where overlap is known to pay"
    return None


def _lowered(spec, *avals):
    chosen = schedule(spec, *avals)
    return dataclasses.replace(spec, chunks=chosen.chunks, direct=chosen.direct)


def _varying(spec, *operands):
    """Results differ along the axis. That place differs along all others says nothing about them."""
    *tensors, place = operands
    return frozenset().union(*map(compat.varying_axes, tensors)) | (compat.varying_axes(place) & {spec.axis_name})


def _rule(spec, *avals) -> ShardingRule:
    """For a mesh with Explicit axes beside the Manual one: nothing is split over those."""
    operands = tuple(tuple(f"o{i}_{j}" for j in range(len(x.shape))) for i, x in enumerate(avals))
    results = tuple(
        tuple(f"r{i}_{j}" for j in range(len(shape))) for i, (shape, _) in enumerate(_results(spec, *avals))
    )
    dims = tuple(dim for factors in (*operands, *results) for dim in factors)
    return ShardingRule(operands=operands, results=results, replicated=dims)


_COLLECTIVE_GEMM = CustomCall(
    Definition(
        name=_OP,
        spec_type=CollectiveGemmSpec,
        operands=_operands,
        check=_check,
        results=_results,
        reference=_reference,
        why_not=_why_not,
        rule=_rule,
        local=_local,
        plain=_plain,
        why_not_on=_why_not_on,
        all_manual=True,
        varying=_varying,
        lowered=_lowered,
    )
)


# Several processes


def _put(key: str, value: str) -> str | None:
    try:
        compat.key_value_store().key_value_set(key, value)
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return None


def _get(key: str, timeout_ms: int) -> str | None:
    try:
        return compat.key_value_store().blocking_key_value_get(key, timeout_ms)
    except jax.errors.JaxRuntimeError:  # it isn't there in time, or the store is gone
        return None


def _remove(key: str) -> None:
    compat.key_value_store().key_value_delete(key)


def _start(platform: str, module: ModuleType) -> None:
    """Ranks in several processes find each other's memory through jax.distributed's store."""
    if platform == "cuda" and compat.key_value_store() is not None and jax.process_count() > 1:
        module.set_collective_board(_put, _get, _remove)


library.when_registered(_start)
