"""``gemm``: one matrix multiplication, FP8 or not, with everything cuBLASLt can do in its epilogue. See GemmSpec."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from te_jax import errors
from te_jax.parallel.amax import reduce_amax
from te_jax.parallel.sharding import ShardingRule
from te_jax.primitives import block_gemm, quantizing
from te_jax.primitives.custom_call import CustomCall
from te_jax.primitives.definition import Definition
from te_jax.primitives.quantizing import ALIGNMENT, HIGH_PRECISION
from te_jax.primitives.spec import GemmSpec
from te_jax.quant import reference
from te_jax.quant.format import E5M2, format_of, is_fp8

# What cuBLAS recommends for Hopper; csrc/gemm/gemm.h has the same. Calls that follow each other share it.
WORKSPACE_BYTES = 32 << 20


def gemm(
    lhs: jax.Array,
    rhs: jax.Array,
    spec: GemmSpec,
    *,
    lhs_scale_inv: jax.Array | None = None,
    rhs_scale_inv: jax.Array | None = None,
    bias: jax.Array | None = None,
    c: jax.Array | None = None,
    out_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """out [*L, *R] = alpha * (lhs [*L, *C] . rhs [*R, *C]) * lhs_scale_inv * rhs_scale_inv + beta * c + bias.

    Accumulated in fp32, rounded once to ``spec.out_dtype``. In ``shard_map`` this is the product of one device's parts:
    a sharded contraction is the caller's to add up.

    Args:
      lhs, rhs: FP8 (not both E5M2) if ``spec.fp8``, otherwise both of one dtype: float32, bfloat16 or float16.
      lhs_scale_inv, rhs_scale_inv: with FP8 operands only: f32[], or f32 of blocks as ``te_jax.quant.block_reference``
        lays them out for a GEMM.
      bias: [*R], bfloat16 with FP8 operands (float16 with a float16 out), otherwise out's dtype; with ``spec.bias``
        only.
      c: [*L, *R] in out's dtype; with ``spec.beta != 0`` only, not with an FP8 out.
      out_scale: f32[]; with an FP8 ``spec.out_dtype`` only.

    Returns:
      out, and f32[] max |out| before ``out_scale`` if ``spec.amax``, otherwise None.
    """
    given = {"lhs": lhs, "rhs": rhs, "lhs_scale_inv": lhs_scale_inv, "rhs_scale_inv": rhs_scale_inv}
    given |= {"bias": bias, "c": c, "out_scale": out_scale}
    wanted = _operands(spec)
    for name, operand in given.items():
        expected = "an array" if name in wanted else "None"
        got = "None" if operand is None else "an array"
        errors.check_value(expected == got, "gemm", name, f"{expected} for this spec", got)
    out, *amax = _GEMM(spec, *(operand for operand in given.values() if operand is not None))
    return out, (amax[0] if amax else None)


def _out_dtype(spec) -> np.dtype:
    return np.dtype(jnp.dtype(spec.out_dtype))


def _operands(spec) -> tuple[str, ...]:
    fp8_out = spec.out_dtype in ("float8_e4m3fn", "float8_e5m2")
    wanted = {"lhs": True, "rhs": True, "lhs_scale_inv": spec.fp8, "rhs_scale_inv": spec.fp8}
    wanted |= {"bias": spec.bias, "c": spec.beta != 0, "out_scale": fp8_out}
    return tuple(name for name, want in wanted.items() if want)


def _split(shape: tuple[int, ...], spec: GemmSpec, contract_first: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(kept, contracted) dimensions of an operand; works on factors as well as on sizes."""
    cut = spec.contract_dims if contract_first else len(shape) - spec.contract_dims
    return (shape[cut:], shape[:cut]) if contract_first else (shape[:cut], shape[cut:])


def _kept_and_contracted(spec, lhs, rhs):
    kept_l, contracted = _split(lhs.shape, spec, spec.lhs_contract_first)
    kept_r, contracted_r = _split(rhs.shape, spec, spec.rhs_contract_first)
    return kept_l, kept_r, contracted, contracted_r


def _check(spec, lhs, rhs, *rest):
    rest = dict(zip(_operands(spec)[2:], rest, strict=True))
    _check_spec(spec)
    _check_dtypes(spec, lhs, rhs)
    for name, aval in (("lhs", lhs), ("rhs", rhs)):
        rank = f"rank above contract_dims = {spec.contract_dims}"
        errors.check_value(len(aval.shape) > spec.contract_dims >= 1, "gemm", name, rank, f"shape {aval.shape}")
    kept_l, kept_r, contracted_l, contracted_r = _kept_and_contracted(spec, lhs, rhs)
    errors.check_value(
        contracted_l == contracted_r, "gemm", "rhs", f"contracted dimensions {contracted_l}", contracted_r
    )
    if spec.blocks:
        block_gemm.check(spec, lhs, rhs, rest)
    scalars = ("out_scale",) if spec.blocks else ("lhs_scale_inv", "rhs_scale_inv", "out_scale")
    for name in scalars:
        if name in rest:
            quantizing.check_scalar("gemm", name, rest[name])
    for name, shape in (("bias", kept_r), ("c", kept_l + kept_r)):
        if name in rest:
            quantizing.check_high_precision("gemm", name, rest[name])
            errors.check_value(rest[name].shape == shape, "gemm", name, f"shape {shape}", rest[name].shape)
    if "c" in rest:
        errors.check_type(rest["c"].dtype == _out_dtype(spec), "gemm", "c", f"dtype {spec.out_dtype}", rest["c"].dtype)
    if "bias" in rest:
        expected = _bias_dtype(spec)
        errors.check_type(rest["bias"].dtype == expected, "gemm", "bias", f"dtype {expected}", rest["bias"].dtype)


def _bias_dtype(spec) -> np.dtype:
    """What cuBLASLt's epilogue takes, and so every platform: bfloat16 beside FP8, otherwise the result's dtype."""
    return np.dtype(jnp.bfloat16) if spec.fp8 and spec.out_dtype != "float16" else _out_dtype(spec)


def _check_spec(spec):
    names = (*(dtype.name for dtype in HIGH_PRECISION), "float8_e4m3fn", "float8_e5m2")
    errors.check_type(spec.out_dtype in names, "gemm", "out_dtype", " or ".join(names), spec.out_dtype)
    fp8_out = is_fp8(_out_dtype(spec))
    errors.check_value(spec.fp8 or not fp8_out, "gemm", "out_dtype", "high precision unless fp8", spec.out_dtype)
    errors.check_value(not spec.amax or fp8_out, "gemm", "amax", "an FP8 out_dtype", spec.out_dtype)
    errors.check_value(not spec.in_place or spec.beta != 0, "gemm", "in_place", "beta != 0", spec.beta)
    errors.check_value(not (spec.beta != 0 and fp8_out), "gemm", "beta", "0 for an FP8 out_dtype", spec.beta)
    first = spec.lhs_contract_first or spec.rhs_contract_first
    errors.check_value(not (spec.fp8 and first), "gemm", "contract_first", "False for FP8 operands", True)


def _check_dtypes(spec, lhs, rhs):
    for name, aval in (("lhs", lhs), ("rhs", rhs)):
        if spec.fp8:
            expected = "dtype float8_e4m3fn or float8_e5m2"
            errors.check_type(is_fp8(aval.dtype), "gemm", name, expected, aval.dtype)
        else:
            quantizing.check_high_precision("gemm", name, aval)
    both_e5m2 = lhs.dtype == E5M2.dtype and rhs.dtype == E5M2.dtype
    errors.check_type(not both_e5m2, "gemm", "rhs", "dtype float8_e4m3fn (one operand has to be)", rhs.dtype)
    errors.check_type(spec.fp8 or lhs.dtype == rhs.dtype, "gemm", "rhs", f"lhs's dtype {lhs.dtype}", rhs.dtype)
    out = _out_dtype(spec)
    has_e5m2 = E5M2.dtype in (lhs.dtype, rhs.dtype)
    errors.check_type(
        out != E5M2.dtype or has_e5m2, "gemm", "out_dtype", "float8_e4m3fn for float8_e4m3fn operands", spec.out_dtype
    )
    wide = spec.fp8 or out in (np.dtype(lhs.dtype), np.dtype(np.float32))
    errors.check_type(wide, "gemm", "out_dtype", f"{lhs.dtype} or float32 for {lhs.dtype} operands", spec.out_dtype)


def _results(spec, lhs, rhs, *rest):
    kept_l, kept_r, _, _ = _kept_and_contracted(spec, lhs, rhs)
    amax = (((), np.dtype(np.float32)),) if spec.amax else ()
    return ((kept_l + kept_r, _out_dtype(spec)), *amax)


def _reference(spec, lhs, rhs, *rest):
    rest = dict(zip(_operands(spec)[2:], rest, strict=True))
    if spec.blocks:
        return _epilogue(spec, spec.alpha * block_gemm.product(spec, lhs, rhs, rest), rest)
    product = reference.gemm(
        lhs,
        rhs,
        contract_dims=spec.contract_dims,
        lhs_contract_first=spec.lhs_contract_first,
        rhs_contract_first=spec.rhs_contract_first,
        scale=spec.alpha * rest["lhs_scale_inv"] * rest["rhs_scale_inv"] if spec.fp8 else spec.alpha,
    )
    return _epilogue(spec, product, rest)


def _epilogue(spec, out, rest):
    """beta * c, bias, output scale and amax on ``out`` f32 [*L, *R]; rounds once."""
    if "c" in rest:
        out = out + spec.beta * rest["c"].astype(jnp.float32)
    if "bias" in rest:
        out = out + rest["bias"].astype(jnp.float32)
    if "out_scale" not in rest:
        return (out.astype(_out_dtype(spec)),)
    data = reference.cast(out, rest["out_scale"], format_of(_out_dtype(spec)))
    return (data, reference.amax(out)) if spec.amax else (data,)


def _local(call, spec, reductions, *operands):
    """One shard's product. If the contraction is sharded: bare products, summed, then the epilogue once.

    Partial products travel in out's dtype, as XLA's own sharded dots do (fp32 if out is FP8).
    """
    if not reductions.sums:
        out, *amax = call(spec, *operands)
    else:
        partial_dtype = "float32" if is_fp8(_out_dtype(spec)) else spec.out_dtype
        bare = dataclasses.replace(spec, out_dtype=partial_dtype, bias=False, beta=0.0, in_place=False, amax=False)
        count = len(_operands(bare))
        (product,) = call(bare, *operands[:count])
        product = jax.lax.psum(product, reductions.sums)
        rest = dict(zip(_operands(spec)[count:], operands[count:], strict=True))
        out, *amax = _epilogue(spec, product.astype(jnp.float32), rest)
    return (out, *(reduce_amax(a, reductions.amax) for a in amax))


def _why_not(spec, lhs, rhs, *rest):
    kept_l, kept_r, contracted, _ = _kept_and_contracted(spec, lhs, rhs)
    m, n, k = math.prod(kept_l), math.prod(kept_r), math.prod(contracted)
    if 0 in (m, n, k):
        return f"m, n, k = {m}, {n}, {k}: no elements"
    sizes = {"contracted size": k, "rhs's kept size": n}
    if spec.lhs_contract_first:
        sizes["lhs's kept size"] = m
    for name, size in sizes.items():
        if size % ALIGNMENT:
            return f"{name} {size} is not a multiple of {ALIGNMENT}"
    return block_gemm.why_not(spec, m) if spec.blocks else None


def _rule(spec, lhs, rhs, *rest):
    count = spec.contract_dims
    kept_l = tuple(f"l{i}" for i in range(len(lhs.shape) - count))
    kept_r = tuple(f"r{i}" for i in range(len(rhs.shape) - count))
    contracted = tuple(f"k{i}" for i in range(count))
    lhs_factors = contracted + kept_l if spec.lhs_contract_first else kept_l + contracted
    rhs_factors = contracted + kept_r if spec.rhs_contract_first else kept_r + contracted
    known = {"lhs": lhs_factors, "rhs": rhs_factors, "bias": kept_r, "c": kept_l + kept_r}
    if spec.blocks:
        known |= block_gemm.scale_factors(spec, kept_l, kept_r, contracted)
    return ShardingRule(
        operands=tuple(known.get(name, ()) for name in _operands(spec)),
        results=(kept_l + kept_r, *(((),) if spec.amax else ())),
        replicated=block_gemm.replicated(spec, lhs, rhs, kept_l, kept_r, contracted) if spec.blocks else (),
        contracted=contracted,
        amax=kept_l + kept_r,
        sums=contracted,
    )


_GEMM = CustomCall(
    Definition(
        name="gemm",
        spec_type=GemmSpec,
        operands=_operands,
        check=_check,
        results=_results,
        reference=_reference,
        why_not=_why_not,
        rule=_rule,
        local=_local,
        aliases=lambda spec: {_operands(spec).index("c"): 0} if spec.in_place else {},
        workspace=lambda spec, *avals: WORKSPACE_BYTES,
    )
)

bind_native = _GEMM.bind[True]
"""(spec, *operands) -> results: the primitive without checks, for the lowering rules of other primitives."""
