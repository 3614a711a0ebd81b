"""``grouped_gemm`` and ``grouped_wgrad``: the GEMMs of a linear whose tokens are in ragged groups, a kernel for each.

fprop and dgrad are ``grouped_gemm`` (the rows of the result are in groups), wgrad is ``grouped_wgrad`` (what is
contracted is). Sizes of groups are operands: no shape depends on them, and nobody but the device reads them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from te_jax import errors
from te_jax.parallel.sharding import ShardingRule
from te_jax.primitives import group_quantizing, quantizing
from te_jax.primitives.custom_call import CustomCall
from te_jax.primitives.definition import Definition
from te_jax.primitives.group_quantizing import MAX_GROUPS, check_by_group, check_group_sizes
from te_jax.primitives.quantizing import ALIGNMENT
from te_jax.primitives.spec import GroupedGemmSpec, GroupedWgradSpec
from te_jax.quant import grouped_reference as grouped
from te_jax.quant.format import E5M2, is_fp8

_OUT_DTYPES = ("bfloat16", "float32")


def grouped_gemm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    spec: GroupedGemmSpec,
    *,
    lhs_scale_inv: jax.Array | None = None,
    rhs_scale_inv: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """out [T, N]: every row of lhs times the rhs of its group; 0 in rows that belong to no group.

    Accumulated in fp32, rounded once to ``spec.out_dtype``. In ``shard_map`` this is the product of one device's parts.

    Args:
      lhs: [T, K]; FP8 if ``spec.fp8``, otherwise float32, bfloat16 or float16.
      rhs: [G, N, K], or [G, K, N] if ``spec.rhs_contract_first``; as lhs, not both E5M2.
      group_sizes: i32[G], see ``QuantizingSpec``.
      lhs_scale_inv, rhs_scale_inv: f32[G], with FP8 operands only.
      bias: [G, N], with ``spec.bias`` only; bfloat16 or float32.

    Raises:
      ValueError, TypeError: for a shape, memory space or dtype that is not as above.
    """
    given = {"lhs_scale_inv": lhs_scale_inv, "rhs_scale_inv": rhs_scale_inv, "bias": bias}
    _check_given("grouped_gemm", _gemm_operands(spec), given)
    (out,) = _GEMM(spec, lhs, rhs, group_sizes, *(x for x in given.values() if x is not None), amax_axes=())
    return out


def grouped_wgrad(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    spec: GroupedWgradSpec,
    *,
    lhs_scale_inv: jax.Array | None = None,
    rhs_scale_inv: jax.Array | None = None,
    c: jax.Array | None = None,
) -> jax.Array:
    """out [G, M, N]: the product of the rows of each group, lhs^T . rhs (+ c); operands as ``GroupedWgradSpec`` says.

    Raises:
      ValueError, TypeError: for a shape, memory space or dtype that is not as there.
    """
    given = {"lhs_scale_inv": lhs_scale_inv, "rhs_scale_inv": rhs_scale_inv, "c": c}
    _check_given("grouped_wgrad", _wgrad_operands(spec), given)
    (out,) = _WGRAD(spec, lhs, rhs, group_sizes, *(x for x in given.values() if x is not None), amax_axes=())
    return out


def _check_given(op, wanted, given):
    for name, operand in given.items():
        expected, got = ("an array" if name in wanted else "None"), ("None" if operand is None else "an array")
        errors.check_value(expected == got, op, name, f"{expected} for this spec", got)


def _scales(spec) -> tuple[str, ...]:
    return ("lhs_scale_inv", "rhs_scale_inv") if spec.fp8 else ()


def _gemm_operands(spec) -> tuple[str, ...]:
    return ("lhs", "rhs", "group_sizes", *_scales(spec), *(("bias",) if spec.bias else ()))


def _wgrad_operands(spec) -> tuple[str, ...]:
    return ("lhs", "rhs", "group_sizes", *_scales(spec), *(("c",) if spec.accumulate else ()))


def _check_operands(op, spec, groups, lhs, rhs, group_sizes, scales):
    errors.check_type(spec.out_dtype in _OUT_DTYPES, op, "out_dtype", " or ".join(_OUT_DTYPES), spec.out_dtype)
    for name, aval in (("lhs", lhs), ("rhs", rhs)):
        if spec.fp8:
            expected = "dtype float8_e4m3fn or float8_e5m2"
            errors.check_type(is_fp8(aval.dtype), op, name, expected, aval.dtype)
        else:
            quantizing.check_high_precision(op, name, aval)
    both_e5m2 = lhs.dtype == E5M2.dtype and rhs.dtype == E5M2.dtype
    errors.check_type(not both_e5m2, op, "rhs", "dtype float8_e4m3fn (one operand has to be)", rhs.dtype)
    errors.check_type(spec.fp8 or lhs.dtype == rhs.dtype, op, "rhs", f"lhs's dtype {lhs.dtype}", rhs.dtype)
    check_group_sizes(op, group_sizes, groups)
    for name, aval in zip(_scales(spec), scales, strict=True):
        check_by_group(op, name, aval, groups)


def _gemm_sizes(spec, lhs, rhs) -> tuple[int, int, int]:
    """tokens, n, k."""
    return (*lhs.shape[:1], rhs.shape[2 if spec.rhs_contract_first else 1], lhs.shape[1])


def _check_gemm(spec, lhs, rhs, group_sizes, *rest):
    op = "grouped_gemm"
    scales, bias = rest[: len(_scales(spec))], rest[len(_scales(spec)) :]
    errors.check_value(len(rhs.shape) == 3, op, "rhs", "3 dimensions, [groups, N, K]", f"shape {rhs.shape}")
    _check_operands(op, spec, rhs.shape[0], lhs, rhs, group_sizes, scales)
    first = spec.rhs_contract_first
    errors.check_value(not (spec.fp8 and first), op, "rhs_contract_first", "False for FP8 operands", first)
    errors.check_value(len(lhs.shape) == 2, op, "lhs", "2 dimensions, [tokens, K]", f"shape {lhs.shape}")
    _, n, k = _gemm_sizes(spec, lhs, rhs)
    expected = (rhs.shape[0], *((k, n) if first else (n, k)))
    errors.check_value(rhs.shape == expected, op, "rhs", f"shape {expected}", rhs.shape)
    for aval in bias:
        errors.check_type(aval.dtype in _OUT_DTYPES, op, "bias", " or ".join(_OUT_DTYPES), aval.dtype)
        errors.check_value(aval.shape == (expected[0], n), op, "bias", f"shape {(expected[0], n)}", aval.shape)


def _gemm_reference(spec, lhs, rhs, group_sizes, *rest):
    rows = lhs.shape[0]
    out = grouped.rows_product(lhs, rhs, group_sizes, rhs_contract_first=spec.rhs_contract_first)
    if spec.fp8:
        factor = rest[0] * rest[1]
        out = out * grouped.by_row(factor, group_sizes, rows)[:, None]
    if spec.bias:
        out = out + grouped.by_row(rest[-1].astype(jnp.float32), group_sizes, rows)
    return (_loud(out, group_sizes, rows).astype(spec.out_dtype),)


def _loud(out, group_sizes, rows):
    """NaN where sizes can't be."""
    return jnp.where(grouped.are_valid(group_sizes, rows), out, jnp.nan)


def _gemm_local(call, spec, reductions, lhs, rhs, group_sizes, *rest):
    """One shard's product. If the contraction is sharded: bare products, summed, then the bias once."""
    if not (reductions.sums and spec.bias):
        (out,) = call(spec, lhs, rhs, group_sizes, *rest)
        return (jax.lax.psum(out, reductions.sums) if reductions.sums else out,)
    *scales, bias = rest
    (out,) = call(dataclasses.replace(spec, bias=False), lhs, rhs, group_sizes, *scales)
    out = jax.lax.psum(out, reductions.sums)
    biases = grouped.by_row(bias.astype(jnp.float32), group_sizes, lhs.shape[0])
    return ((out.astype(jnp.float32) + biases).astype(spec.out_dtype),)


def _why_no_kernel(spec, group_sizes, lhs, sizes: dict[str, int]) -> str | None:
    if 0 in sizes.values():
        return f"{', '.join(sizes)} = {', '.join(map(str, sizes.values()))}: no elements"
    if group_sizes.shape[0] > MAX_GROUPS:
        return f"{group_sizes.shape[0]} groups: more than {MAX_GROUPS}"
    if not spec.fp8 and lhs.dtype != jnp.bfloat16:
        return f"operands are {lhs.dtype}: there are kernels for FP8 and bfloat16"
    for name, size in sizes.items():
        if name != "tokens" and size % ALIGNMENT:
            return f"{name} {size} is not a multiple of {ALIGNMENT}"
    return None


def _gemm_why_not(spec, lhs, rhs, group_sizes, *rest):
    sizes = zip(("tokens", "rhs's kept size", "contracted size"), _gemm_sizes(spec, lhs, rhs), strict=True)
    return _why_no_kernel(spec, group_sizes, lhs, dict(sizes))


def _gemm_rule(spec, lhs, rhs, group_sizes, *rest):
    known = {
        "lhs": ("t", "k"),
        "rhs": ("g", "k", "n") if spec.rhs_contract_first else ("g", "n", "k"),
        "group_sizes": ("g",),
        "lhs_scale_inv": ("g",),
        "rhs_scale_inv": ("g",),
        "bias": ("g", "n"),
    }
    return ShardingRule(
        operands=tuple(known[name] for name in _gemm_operands(spec)),
        results=(("t", "n"),),
        replicated=("t", "g"),
        contracted=("k",),
        sums=("k",),
    )


def _on_device(spec, lhs, rhs, group_sizes, *rest, rows):
    """What the CUDA kernel is given. bfloat16 has no scale that could carry a NaN: the kernel cuts its sizes off."""
    if not spec.fp8:
        return (lhs, rhs, group_sizes, *rest)
    lhs_scale_inv, *rest = rest
    return (lhs, rhs, *group_quantizing.on_device(rows, group_sizes, lhs_scale_inv), *rest)


_GEMM = CustomCall(
    Definition(
        name="grouped_gemm",
        spec_type=GroupedGemmSpec,
        operands=_gemm_operands,
        check=_check_gemm,
        results=lambda spec, lhs, rhs, *rest: ((_gemm_sizes(spec, lhs, rhs)[:2], np.dtype(jnp.dtype(spec.out_dtype))),),
        reference=_gemm_reference,
        why_not=_gemm_why_not,
        rule=_gemm_rule,
        local=_gemm_local,
        on_device=lambda spec, lhs, *rest: _on_device(spec, lhs, *rest, rows=lhs.shape[0]),
    )
)


def _wgrad_sizes(spec, lhs, rhs) -> tuple[int, int, int]:
    """m, n and the length of what is contracted, with the padding of FP8 operands."""
    kept, contracted = (0, 1) if spec.fp8 else (1, 0)
    return lhs.shape[kept], rhs.shape[kept], lhs.shape[contracted]


def _check_wgrad(spec, lhs, rhs, group_sizes, *rest):
    op, scales = "grouped_wgrad", rest[: len(_scales(spec))]
    errors.check_value(spec.groups > 0, op, "groups", "at least 1", spec.groups)
    _check_operands(op, spec, spec.groups, lhs, rhs, group_sizes, scales)
    layout = "[features, tokens]" if spec.fp8 else "[tokens, features]"
    for name, aval in (("lhs", lhs), ("rhs", rhs)):
        errors.check_value(len(aval.shape) == 2, op, name, f"2 dimensions, {layout}", f"shape {aval.shape}")
    axis = 1 if spec.fp8 else 0
    rows = lhs.shape[axis]
    errors.check_value(rhs.shape[axis] == rows, op, "rhs", f"{rows} tokens, as lhs", f"shape {rhs.shape}")
    padded = not spec.fp8 or rows == grouped.padded_rows(rows)
    errors.check_value(padded, op, "lhs", f"tokens padded to a multiple of {grouped.ROW_ALIGNMENT}", rows)
    for c in rest[len(scales) :]:
        shape = (spec.groups, *_wgrad_sizes(spec, lhs, rhs)[:2])
        errors.check_value(c.shape == shape, op, "c", f"shape {shape}", c.shape)
        errors.check_type(c.dtype == jnp.dtype(spec.out_dtype), op, "c", f"dtype {spec.out_dtype}", c.dtype)


def _wgrad_reference(spec, lhs, rhs, group_sizes, *rest):
    if spec.fp8:
        lhs, rhs = lhs.T, rhs.T
    out = grouped.contracted_product(lhs, rhs, group_sizes)
    if spec.fp8:
        out = out * (rest[0] * rest[1])[:, None, None]
    if spec.accumulate:
        out = out + rest[-1].astype(jnp.float32)
    return (_loud(out, group_sizes, lhs.shape[0]).astype(spec.out_dtype),)


def _wgrad_why_not(spec, lhs, rhs, group_sizes, *scales):
    m, n, rows = _wgrad_sizes(spec, lhs, rhs)
    return _why_no_kernel(spec, group_sizes, lhs, {"lhs's kept size": m, "rhs's kept size": n, "tokens": rows})


def _wgrad_rule(spec, lhs, rhs, group_sizes, *rest):
    known = {"lhs": ("m", "t"), "rhs": ("n", "t")} if spec.fp8 else {"lhs": ("t", "m"), "rhs": ("t", "n")}
    known |= {"c": ("g", "m", "n")}
    return ShardingRule(
        operands=tuple(known.get(name, ("g",)) for name in _wgrad_operands(spec)),
        results=(("g", "m", "n"),),
        replicated=("t", "g"),
        contracted=("t",),
    )


_WGRAD = CustomCall(
    Definition(
        name="grouped_wgrad",
        spec_type=GroupedWgradSpec,
        operands=_wgrad_operands,
        check=_check_wgrad,
        results=lambda spec, lhs, rhs, *rest: (
            ((spec.groups, *_wgrad_sizes(spec, lhs, rhs)[:2]), np.dtype(jnp.dtype(spec.out_dtype))),
        ),
        reference=_wgrad_reference,
        why_not=_wgrad_why_not,
        rule=_wgrad_rule,
        aliases=lambda spec: {_wgrad_operands(spec).index("c"): 0} if spec.accumulate else {},
        local=lambda call, spec, reductions, *operands: call(spec, *operands),
        on_device=lambda spec, lhs, rhs, *rest: _on_device(spec, lhs, rhs, *rest, rows=_wgrad_sizes(spec, lhs, rhs)[2]),
    )
)
