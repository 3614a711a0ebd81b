"""What no platform takes is refused while tracing, with op, argument, expected and got."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax import primitives
from te_jax.primitives import (
    ActivationGradSpec,
    ActivationSpec,
    DequantizeSpec,
    GemmSpec,
    NormGradSpec,
    NormSpec,
    QuantizeSpec,
)

S = np.float32(1)
Q = QuantizeSpec(format="e4m3")
GRAD = ActivationGradSpec(format="e4m3", kind="swiglu")
FP8, BF16 = jnp.float8_e4m3fn, jnp.bfloat16


def ones(*shape, dtype=BF16):
    return jnp.ones(shape, dtype)


def quantize(x, scale=S, spec=Q):
    return primitives.quantize(x, scale, spec)


def gemm(lhs=None, rhs=None, spec=None, **operands):
    lhs = ones(16, 32, dtype=FP8) if lhs is None else lhs
    rhs = ones(16, 32, dtype=FP8) if rhs is None else rhs
    operands = {"lhs_scale_inv": S, "rhs_scale_inv": S} | operands
    return primitives.gemm(lhs, rhs, spec or GemmSpec(), **operands)


def norm(gamma, beta=None, **spec):
    return primitives.norm(ones(16, 32), gamma, beta, S, NormSpec(format="e4m3", **spec))


def norm_grad(dy=None, x=None, gamma=None, mean=None, rstd=None, dres=None, **spec):
    given = (
        ones(16, 32) if dy is None else dy,
        ones(16, 32) if x is None else x,
        ones(32) if gamma is None else gamma,
        mean,
        ones(16, dtype=jnp.float32) if rstd is None else rstd,
    )
    return primitives.norm_grad(*given, NormGradSpec(**spec), dres=dres)


CASES = [
    (
        lambda: quantize(ones(16, 32, dtype=jnp.int8)),
        TypeError,
        "te_jax.quantize: x: expected dtype float32, bfloat16 or float16, got int8",
    ),
    (lambda: quantize(ones()), ValueError, "te_jax.quantize: x: expected rank at least 1, got shape ()"),
    (
        lambda: quantize(ones(16, 32), np.ones(1, np.float32)),
        ValueError,
        "te_jax.quantize: scale: expected shape (), got (1,)",
    ),
    (
        lambda: quantize(ones(16, 32), jnp.ones((), BF16)),
        TypeError,
        "te_jax.quantize: scale: expected dtype float32, got bfloat16",
    ),
    (
        lambda: quantize(ones(16, 32), spec=QuantizeSpec(format="e4m3", hp=True)),
        ValueError,
        "te_jax.quantize: hp: expected False (it would be a copy of x), got True",
    ),
    (
        lambda: quantize(ones(16, 32), spec=QuantizeSpec(format="e3m4")),
        ValueError,
        "te_jax: FP8 format: expected e4m3, e5m2 or one of their dtypes, got 'e3m4'",
    ),
    (
        lambda: primitives.dequantize(ones(16, 32), S, DequantizeSpec()),
        TypeError,
        "te_jax.dequantize: data: expected dtype float8_e4m3fn or float8_e5m2, got bfloat16",
    ),
    (lambda: norm(ones(16)), ValueError, "te_jax.norm: gamma: expected shape (32,), got (16,)"),
    (lambda: norm(ones(32), ones(32)), ValueError, "te_jax.norm: beta: expected None for rmsnorm, got an array"),
    (
        lambda: norm(ones(32), kind="layernorm"),
        ValueError,
        "te_jax.norm: beta: expected an array for layernorm, got None",
    ),
    (
        lambda: norm(ones(32), ones(32, dtype=jnp.float32), kind="layernorm"),
        TypeError,
        "te_jax.norm: beta: expected gamma's dtype bfloat16, got float32",
    ),
    (
        lambda: norm_grad(kind="batchnorm"),
        ValueError,
        "te_jax.norm_grad: kind: expected rmsnorm or layernorm, got batchnorm",
    ),
    (lambda: norm_grad(dy=ones()), ValueError, "te_jax.norm_grad: dy: expected rank at least 1, got shape ()"),
    (
        lambda: norm_grad(x=ones(16, 32, dtype=jnp.float32)),
        TypeError,
        "te_jax.norm_grad: x: expected dy's dtype bfloat16, got float32",
    ),
    (lambda: norm_grad(x=ones(8, 32)), ValueError, "te_jax.norm_grad: x: expected shape (16, 32), got (8, 32)"),
    (lambda: norm_grad(gamma=ones(16)), ValueError, "te_jax.norm_grad: gamma: expected shape (32,), got (16,)"),
    (lambda: norm_grad(rstd=ones(16)), TypeError, "te_jax.norm_grad: rstd: expected dtype float32, got bfloat16"),
    (
        lambda: norm_grad(rstd=ones(16, 1, dtype=jnp.float32)),
        ValueError,
        "te_jax.norm_grad: rstd: expected shape (16,), got (16, 1)",
    ),
    (
        lambda: norm_grad(kind="layernorm"),
        ValueError,
        "te_jax.norm_grad: mean: expected an array for this spec, got None",
    ),
    (
        lambda: norm_grad(dres=ones(16, 32)),
        ValueError,
        "te_jax.norm_grad: dres: expected None for this spec, got an array",
    ),
    (
        lambda: norm_grad(dres=ones(16, 16), residual=True),
        ValueError,
        "te_jax.norm_grad: dres: expected shape (16, 32), got (16, 16)",
    ),
    (
        lambda: primitives.activation(ones(16, 33), S, ActivationSpec(format="e4m3", kind="swiglu")),
        ValueError,
        "te_jax.activation: x: expected an even last dimension (gated), got shape (16, 33)",
    ),
    (
        lambda: primitives.activation(ones(16, 32), S, ActivationSpec(format="e4m3", kind="mish")),
        ValueError,
        "te_jax.activation: kind: expected gelu or silu or relu or quick_gelu or squared_relu or geglu or swiglu or "
        "glu or reglu or qgeglu or sreglu or clamped_swiglu, got mish",
    ),
    (
        lambda: primitives.activation(ones(16, 32), S, ActivationSpec(format="e4m3", kind="silu", gate_second=True)),
        ValueError,
        "te_jax.activation: gate_second: expected False for silu, got True",
    ),
    (
        lambda: primitives.activation(ones(16, 32), S, ActivationSpec(format="e4m3", kind="swiglu", alpha=1.0)),
        ValueError,
        "te_jax.activation: alpha: expected 1.702 for swiglu, got 1.0",
    ),
    (
        lambda: primitives.activation(ones(16, 32), S, ActivationSpec(format="e4m3", kind="clamped_swiglu", limit=0.0)),
        ValueError,
        "te_jax.activation: limit: expected a positive number, got 0.0",
    ),
    (
        lambda: primitives.activation(ones(16, 32), None, ActivationSpec(format="e4m3", scaling="block_128x128")),
        ValueError,
        "te_jax.activation: scaling: expected tensor or block_1x128 (only quantize writes 128x128 blocks), "
        "got block_128x128",
    ),
    (
        lambda: primitives.activation_grad(ones(16, 32), ones(16, 32), S, GRAD),
        ValueError,
        "te_jax.activation_grad: x: expected shape (16, 64), got (16, 32)",
    ),
    (
        lambda: gemm(rhs=ones(16, 48, dtype=FP8)),
        ValueError,
        "te_jax.gemm: rhs: expected contracted dimensions (32,), got (48,)",
    ),
    (
        lambda: gemm(lhs=ones(32, dtype=FP8)),
        ValueError,
        "te_jax.gemm: lhs: expected rank above contract_dims = 1, got shape (32,)",
    ),
    (
        lambda: gemm(lhs=ones(16, 32)),
        TypeError,
        "te_jax.gemm: lhs: expected dtype float8_e4m3fn or float8_e5m2, got bfloat16",
    ),
    (
        lambda: gemm(ones(16, 32, dtype=jnp.float8_e5m2), ones(16, 32, dtype=jnp.float8_e5m2)),
        TypeError,
        "te_jax.gemm: rhs: expected dtype float8_e4m3fn (one operand has to be), got float8_e5m2",
    ),
    (
        lambda: gemm(lhs_scale_inv=None),
        ValueError,
        "te_jax.gemm: lhs_scale_inv: expected an array for this spec, got None",
    ),
    (lambda: gemm(bias=ones(16)), ValueError, "te_jax.gemm: bias: expected None for this spec, got an array"),
    (
        lambda: gemm(bias=ones(32), spec=GemmSpec(bias=True)),
        ValueError,
        "te_jax.gemm: bias: expected shape (16,), got (32,)",
    ),
    # What cuBLASLt has no kernel for is refused on every platform.
    (
        lambda: gemm(bias=ones(16, dtype=jnp.float32), spec=GemmSpec(bias=True)),
        TypeError,
        "te_jax.gemm: bias: expected dtype bfloat16, got float32",
    ),
    (
        lambda: gemm(spec=GemmSpec(out_dtype="float8_e5m2"), out_scale=S),
        TypeError,
        "te_jax.gemm: out_dtype: expected float8_e4m3fn for float8_e4m3fn operands, got float8_e5m2",
    ),
    (
        lambda: gemm(c=ones(16, 16), spec=GemmSpec(out_dtype="float8_e4m3fn", beta=1.0), out_scale=S),
        ValueError,
        "te_jax.gemm: beta: expected 0 for an FP8 out_dtype, got 1.0",
    ),
    (
        lambda: primitives.gemm(*[ones(16, 32, dtype=jnp.float32)] * 2, GemmSpec(fp8=False, out_dtype="bfloat16")),
        TypeError,
        "te_jax.gemm: out_dtype: expected float32 or float32 for float32 operands, got bfloat16",
    ),
    (
        lambda: gemm(c=ones(16, 16, dtype=jnp.float32), spec=GemmSpec(beta=1.0)),
        TypeError,
        "te_jax.gemm: c: expected dtype bfloat16, got float32",
    ),
    (
        lambda: gemm(lhs_scale_inv=np.ones((1, 1), np.float32)),
        ValueError,
        "te_jax.gemm: lhs_scale_inv: expected shape (), got (1, 1)",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), CASES, ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_message(call, error, message, jit):
    with pytest.raises(error) as raised:
        (jax.jit(call) if jit else call)()
    assert str(raised.value) == message


def test_float64():
    with (
        jax.enable_x64(True),
        pytest.raises(
            TypeError, match=r"^te_jax.quantize: x: expected dtype float32, bfloat16 or float16, got float64$"
        ),
    ):
        quantize(jnp.ones((16, 32), jnp.float64))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_an_operand_in_host_memory_is_refused_by_name(jit):
    on_host = jax.device_put(ones(16, 32), jax.memory.Space.Host)
    call = jax.jit(lambda x: quantize(x).data) if jit else quantize
    with pytest.raises(ValueError, match="memory") as raised:
        call(on_host)
    assert str(raised.value) == (
        "te_jax.quantize: x: expected an array in device memory, got one in host memory (move it with jax.device_put)"
    )
    scale = jax.device_put(jnp.float32(1), jax.memory.Space.Host)
    with pytest.raises(ValueError, match=r"te_jax\.quantize: scale: expected an array in device memory"):
        quantize(ones(16, 32), scale)


def test_a_bad_environment_variable_is_named(monkeypatch):
    from te_jax import config

    monkeypatch.setenv("TE_JAX_DISABLE_CUSTOM_CALLS", "maybe")
    with pytest.raises(ValueError, match="TE_JAX_DISABLE_CUSTOM_CALLS: expected 0 or 1, got 'maybe'"):
        config._flag("TE_JAX_DISABLE_CUSTOM_CALLS")
