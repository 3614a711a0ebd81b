"""The primitives in programs compiled for an H200: the custom calls that were asked for, and nothing around them."""

import re

import jax
import jax.numpy as jnp
import pytest

from te_jax import primitives as P
from te_jax.testing import aot

BF16 = jnp.bfloat16
SCALE = jax.ShapeDtypeStruct((), jnp.float32)


def array(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def instructions(compiled):
    """Opcodes of the optimized program, fusions' insides included."""
    return re.findall(r"^\s*(?:ROOT )?%?[\w.-]+ = (?:\([^()]*\)|\S+) ([\w-]+)\(", compiled.as_text(), re.M)


def test_quantize_and_gemm():
    def fprop(x, w, scale):
        x = P.quantize(x, scale, P.QuantizeSpec(format="e4m3", data_t=True, amax=True))
        w = P.quantize(w, scale, P.QuantizeSpec(format="e4m3", data_t=True, amax=True))
        y, _ = P.gemm(
            x.data, w.data_t, P.GemmSpec(fast_accumulation=True), lhs_scale_inv=x.scale_inv, rhs_scale_inv=w.scale_inv
        )
        return y, x, w

    compiled = aot.compile_for_h200(fprop, (array(4, 2048, 4096), array(4096, 1024), SCALE))
    assert sorted(aot.custom_calls(compiled)) == ["te_jax_gemm", "te_jax_quantize", "te_jax_quantize"]
    assert not {"dot", "convert", "transpose", "copy", "fusion"} & set(instructions(compiled))


def test_blocks():
    """The three GEMMs of a linear in block scaling: scales go from pass to GEMM as they are."""
    rows, squares = "block_1x128", "block_128x128"

    def linear(x, w, dy):
        x, dy = (P.quantize(a, None, P.QuantizeSpec(format="e4m3", data_t=True, scaling=rows)) for a in (x, dy))
        w = P.quantize(w, None, P.QuantizeSpec(format="e4m3", data_t=True, scaling=squares))
        by_square = P.GemmSpec(lhs_scaling=rows, rhs_scaling=squares)
        by_row = P.GemmSpec(contract_dims=2, out_dtype="float32", lhs_scaling=rows, rhs_scaling=rows)
        y = P.gemm(x.data, w.data_t, by_square, lhs_scale_inv=x.scale_inv, rhs_scale_inv=w.scale_inv_t)[0]
        dx = P.gemm(dy.data, w.data, by_square, lhs_scale_inv=dy.scale_inv, rhs_scale_inv=w.scale_inv)[0]
        dw = P.gemm(x.data_t, dy.data_t, by_row, lhs_scale_inv=x.scale_inv_t, rhs_scale_inv=dy.scale_inv_t)[0]
        return y, dx, dw

    args = (array(4, 2040, 4096), array(4096, 1024), array(4, 2040, 1024))
    compiled = aot.compile_for_h200(linear, args)
    assert sorted(aot.custom_calls(compiled)) == ["te_jax_gemm"] * 3 + ["te_jax_quantize"] * 3
    assert not {"dot", "convert", "transpose", "copy", "fusion", "pad"} & set(instructions(compiled))


@pytest.mark.parametrize("kind", ["silu", "swiglu", "clamped_swiglu"])
def test_passes(kind):
    wide = 1 if kind == "silu" else 2
    pass_ = {"format": "e4m3", "data_t": True, "amax": True}

    def chain(x, gamma, dy, scale):
        y = P.norm(x, gamma, None, scale, P.NormSpec(hp=True, stats=True, **pass_))
        a = P.activation(y.hp, scale, P.ActivationSpec(kind=kind, **pass_))
        g = P.activation_grad(dy, y.hp, scale, P.ActivationGradSpec(kind=kind, dbias=True, **pass_))
        return y, a, g, P.dequantize(a.data, a.scale_inv, P.DequantizeSpec())

    rows, cols = 256, 512
    args = (array(rows, wide * cols), array(wide * cols, dtype=jnp.float32), array(rows, cols), SCALE)
    compiled = aot.compile_for_h200(chain, args)
    expected = ["te_jax_activation", "te_jax_activation_grad", "te_jax_dequantize", "te_jax_norm"]
    assert sorted(aot.custom_calls(compiled)) == expected
    assert not {"convert", "transpose", "copy", "fusion"} & set(instructions(compiled))


def test_accumulating_gemm_is_in_place():
    def accumulate(x, dy, main_grad):
        spec = P.GemmSpec(fp8=False, lhs_contract_first=True, rhs_contract_first=True, out_dtype="float32", beta=1.0,
                          in_place=True)  # fmt: skip
        return P.gemm(x, dy, spec, c=main_grad)[0]

    args = (array(512, 256), array(512, 128), array(256, 128, dtype=jnp.float32))
    compiled = aot.compile_for_h200(accumulate, args, jit={"donate_argnums": 2})
    assert aot.custom_calls(compiled) == ["te_jax_gemm"]
    assert "copy" not in instructions(compiled)
    assert compiled.memory_analysis().alias_size_in_bytes == 256 * 128 * 4
