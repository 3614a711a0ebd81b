"""Programs lowered for CUDA on a machine without it: targets, attributes, operand order, aliases."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from te_jax import primitives
from te_jax.primitives import (
    ActivationGradSpec,
    ActivationSpec,
    CollectiveGemmSpec,
    DequantizeSpec,
    GemmSpec,
    NormGradSpec,
    NormSpec,
    QuantizeSpec,
    ScaleReadSpec,
    ScaleWriteSpec,
)
from te_jax.testing import hlo

BF16, F32, E4M3 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn


def shape(*dims, dtype=BF16):
    return jax.ShapeDtypeStruct(dims, dtype)


SCALAR = shape(dtype=F32)


def cuda_text(function, *operands) -> str:
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def the_call(text: str) -> str:
    (line,) = [line for line in text.splitlines() if "@te_jax_" in line]
    return line


def state_of(history, scale, uses):
    return {"amax_history": history, "scale": scale, "uses": uses}


STATE = (shape(2, 8, dtype=F32), shape(2, dtype=F32), shape(2, 66, dtype=F32))
GEGLU_GRAD = ActivationGradSpec(format="e5m2", kind="geglu", dbias=True)

CASES = {
    "quantize": (
        lambda x, s: primitives.quantize(x, s, QuantizeSpec(format="e4m3", data_t=True, amax=True)),
        (shape(2, 16, 32), SCALAR),
        "(tensor<2x16x32xbf16>, tensor<f32>) -> (tensor<2048xui8>, tensor<2x16x32xf8E4M3FN>, "
        "tensor<32x2x16xf8E4M3FN>, tensor<f32>, tensor<f32>, tensor<f32>)",
    ),
    "dequantize": (
        lambda x, s: primitives.dequantize(x, s, DequantizeSpec()),
        (shape(16, 32, dtype=E4M3), SCALAR),
        "(tensor<16x32xf8E4M3FN>, tensor<f32>) -> tensor<16x32xbf16>",
    ),
    "norm": (
        lambda x, g, b, s: primitives.norm(x, g, b, s, NormSpec(format="e4m3", kind="layernorm", stats=True)),
        (shape(16, 32), shape(32, dtype=F32), shape(32, dtype=F32), SCALAR),
        "(tensor<16x32xbf16>, tensor<32xf32>, tensor<32xf32>, tensor<f32>) -> "
        "(tensor<2176xui8>, tensor<16x32xf8E4M3FN>, tensor<f32>, tensor<f32>, tensor<16xf32>, tensor<16xf32>)",
    ),
    "norm_grad": (
        lambda dy, x, g, m, r, d: primitives.norm_grad(
            dy, x, g, m, r, NormGradSpec(kind="layernorm", residual=True), dres=d
        ),
        (shape(2, 8, 32), shape(2, 8, 32), shape(32, dtype=F32), *[shape(2, 8, dtype=F32)] * 2, shape(2, 8, 32)),
        "(tensor<2x8x32xbf16>, tensor<2x8x32xbf16>, tensor<32xf32>, tensor<2x8xf32>, tensor<2x8xf32>, "
        "tensor<2x8x32xbf16>) -> (tensor<40960xui8>, tensor<2x8x32xbf16>, tensor<32xf32>, tensor<32xf32>)",
    ),
    "activation": (
        lambda x, s: primitives.activation(x, s, ActivationSpec(format="e4m3", kind="swiglu", hp=True)),
        (shape(16, 64), SCALAR),
        "(tensor<16x64xbf16>, tensor<f32>) -> "
        "(tensor<2048xui8>, tensor<16x32xbf16>, tensor<16x32xf8E4M3FN>, tensor<f32>, tensor<f32>)",
    ),
    "activation_grad": (
        lambda dy, x, s: primitives.activation_grad(dy, x, s, GEGLU_GRAD),
        (shape(16, 32), shape(16, 64), SCALAR),
        "(tensor<16x32xbf16>, tensor<16x64xbf16>, tensor<f32>) -> "
        "(tensor<2304xui8>, tensor<16x64xf8E5M2>, tensor<f32>, tensor<f32>, tensor<64xf32>)",
    ),
    "scale_read": (
        lambda *leaves: primitives.scale_read(state_of(*leaves), ScaleReadSpec(formats="e4m3 e5m2")),
        STATE,
        "(tensor<2x8xf32>, tensor<2xf32>, tensor<2x66xf32>) -> (tensor<f32>, tensor<f32>)",
    ),
    "scale_write": (
        lambda h, s, u, amax: primitives.scale_write(
            state_of(h, s, u), [amax], ScaleWriteSpec(formats="e4m3 e5m2", used="01")
        ),
        (*STATE, SCALAR),
        "(tensor<2x8xf32>, tensor<2xf32>, tensor<2x66xf32>, tensor<f32>) -> "
        "(tensor<2x8xf32>, tensor<2xf32>, tensor<2x66xf32>)",
    ),
    "gemm": (
        lambda a, b, s, t, bias, c: primitives.gemm(
            a, b, GemmSpec(bias=True, beta=1.0, in_place=True), lhs_scale_inv=s, rhs_scale_inv=t, bias=bias, c=c
        ),
        (shape(2, 16, 32, dtype=E4M3), shape(48, 32, dtype=E4M3), SCALAR, SCALAR, shape(48), shape(2, 16, 48)),
        "(tensor<2x16x32xf8E4M3FN>, tensor<48x32xf8E4M3FN>, tensor<f32>, tensor<f32>, tensor<48xbf16>, "
        "tensor<2x16x48xbf16>) -> (tensor<33554432xui8>, tensor<2x16x48xbf16>)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_operands_and_results(name):
    function, operands, types = CASES[name]
    text = cuda_text(function, *operands)
    assert hlo.count_custom_calls(text) == {f"te_jax_{name}": 1}
    call = the_call(text)
    assert call.endswith(" : " + types)
    arguments = ", ".join(f"%arg{i}" for i in range(len(operands)))
    assert f"@te_jax_{name}({arguments})" in call
    assert "func.func private" not in text  # nothing between the program and the call


def test_the_spec_is_one_dictionary_attribute():
    text = cuda_text(*CASES["norm"][:1], *CASES["norm"][1])
    assert (
        'spec = {amax = false, data = true, data_t = false, dbias = false, dbias_dtype = "float32", '
        'epsilon = 9.99999997E-7 : f32, format = "e4m3", groups = 0 : i64, hp = false, '
        'if_unseeded = false, kind = "layernorm", margin = 0 : i64, '
        'power_of_two = false, scaling = "tensor", stats = true, zero_centered_gamma = false}' in the_call(text)
    )


def test_the_workspace_is_the_first_result_on_cuda_alone():
    """uint8, dropped: no one uses it, and the CPU handler has no such result."""
    function, operands, _ = CASES["gemm"]
    text = cuda_text(function, *operands)
    (number,) = re.findall(r"(%\d+):2 = stablehlo.custom_call", text)
    assert f"return {number}#1 :" in text
    assert text.count(f"{number}#0") == 0
    cpu = jax.jit(function).trace(*operands).lower(lowering_platforms=("cpu",)).as_text()
    assert the_call(cpu).endswith("-> tensor<2x16x48xbf16>")


def test_in_place_aliases_c_with_out():
    call = the_call(cuda_text(*CASES["gemm"][:1], *CASES["gemm"][1]))
    assert "output_operand_alias<output_tuple_indices = [1], operand_index = 5, operand_tuple_indices = []>" in call
    function, operands, _ = CASES["quantize"]
    assert "output_operand_alias" not in the_call(cuda_text(function, *operands))


def test_one_trace_serves_several_platforms():
    function, operands, _ = CASES["quantize"]
    traced = jax.jit(function).trace(*operands)
    assert hlo.count_custom_calls(traced.lower(lowering_platforms=("cuda",)).as_text()).total() == 1
    assert hlo.count_custom_calls(traced.lower(lowering_platforms=("cpu",)).as_text()).total() == 1
    assert hlo.count_custom_calls(traced.lower(lowering_platforms=("tpu",)).as_text()).total() == 0
    assert hlo.count_custom_calls(traced.lower(lowering_platforms=("rocm",)).as_text()).total() == 0


def test_shapes_without_a_kernel_lower_to_the_reference():
    function, _, _ = CASES["quantize"]
    assert hlo.count_custom_calls(cuda_text(function, shape(16, 40), SCALAR)).total() == 0


def test_spec_attributes_are_typed_as_in_the_c_structs():
    attributes = GemmSpec(alpha=2.0).attributes()
    assert type(attributes["alpha"]) is np.float32
    assert type(attributes["contract_dims"]) is np.int64
    assert type(attributes["fp8"]) is bool


def collective(kind, specs, out_specs, **fields):
    """collective_gemm in shard_map over two devices that nobody has."""
    spec = CollectiveGemmSpec(kind=kind, axis_name="tp", bias=True, chunks=2, **fields)

    def local(x, w, s, t, bias):
        return primitives.collective_gemm(x, w, spec, lhs_scale_inv=s[0], rhs_scale_inv=t[0], bias=bias)[
            : len(out_specs)
        ]

    mesh = AbstractMesh((2,), ("tp",), axis_types=(AxisType.Auto,))
    return jax.shard_map(local, mesh=mesh, in_specs=(*specs, P("tp"), P("tp"), P()), out_specs=out_specs)


COLLECTIVE_OPERANDS = (
    shape(64, 64, dtype=E4M3),
    shape(48, 64, dtype=E4M3),
    shape(2, dtype=F32),
    shape(2, dtype=F32),
    shape(48),
)


def test_a_collective_has_the_place_of_its_device_as_an_operand():
    """And nothing in front of it or behind it that communicates; the schedule is in the spec."""
    split = P(None, "tp"), P(None, "tp")
    scatter = collective("matmul_reduce_scatter", split, (P("tp"),), fast_accumulation=True)
    text = cuda_text(scatter, *COLLECTIVE_OPERANDS)
    call = the_call(text)
    assert call.endswith(
        "(tensor<64x32xf8E4M3FN>, tensor<48x32xf8E4M3FN>, tensor<f32>, tensor<f32>, tensor<48xbf16>, tensor<2xi32>) -> "
        "tensor<32x48xbf16>"
    )
    assert (
        'spec = {amax = false, axis_name = "tp", bias = true, chunks = 2 : i64, direct = false, equal_scales = false, '
        'fast_accumulation = true, fp8 = true, group = "tp=2: tp", keep_gathered = false, '
        'kind = "matmul_reduce_scatter", lhs_scaling = "tensor", out_dtype = "bfloat16", ranks = 2 : i64, '
        'rhs_contract_first = false, rhs_scaling = "tensor", timeout_ms = 120000 : i64}' in call
    )
    gather = collective("all_gather_matmul", (P("tp"), P()), (P("tp"), P("tp"), P("tp")), keep_gathered=True)
    assert the_call(cuda_text(gather, *COLLECTIVE_OPERANDS)).endswith(
        "-> (tensor<64x48xbf16>, tensor<64x64xf8E4M3FN>, tensor<2xf32>)"
    )
    for name in ("all_gather", "all_to_all", "all_reduce", "reduce_scatter", "collective_permute"):
        assert f"stablehlo.{name}" not in text


def test_a_collective_without_kernels_is_the_gemm_and_the_collective():
    """The product is a custom call where there is one for it."""
    split = P(None, "tp"), P(None, "tp")
    scatter = collective("matmul_reduce_scatter", split, (P("tp"),))
    traced = jax.jit(scatter).trace(*COLLECTIVE_OPERANDS)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert hlo.count_custom_calls(text).total() == 0
    assert text.count("stablehlo.all_to_all") == 1
    small = functools.partial(CollectiveGemmSpec, kind="matmul_reduce_scatter", axis_name="tp", fp8=False)
    mapped = jax.shard_map(
        lambda x, w: primitives.collective_gemm(x, w, small()).out,
        mesh=AbstractMesh((2,), ("tp",), axis_types=(AxisType.Auto,)),
        in_specs=split,
        out_specs=P("tp"),
    )
    text = cuda_text(mapped, shape(64, 64), shape(48, 64))  # too small to pay
    assert hlo.count_custom_calls(text) == {"te_jax_gemm": 1}
    assert text.count("stablehlo.all_to_all") == 1
