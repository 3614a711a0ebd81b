"""Values of every primitive: the custom call against the jnp reference and against fp64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax import config, primitives
from te_jax.primitives import (
    ActivationGradSpec,
    ActivationSpec,
    DequantizeSpec,
    GemmSpec,
    NormGradSpec,
    NormSpec,
    QuantizeSpec,
)
from te_jax.primitives.spec import ACTIVATIONS, GATED_ACTIVATIONS
from te_jax.testing import hlo, oracle
from te_jax.testing.compiling import OPTIMIZED

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
SEED = np.float32(0)


def normal(shape, dtype=jnp.bfloat16, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def both(function, *operands):
    """The results of the custom call and of the reference; asserts that the first one is a custom call."""
    compiled = jax.jit(function).lower(*operands).compile(OPTIMIZED)
    assert hlo.count_custom_calls(compiled.as_text()).total() == 1
    with config.custom_calls(False):
        reference = jax.jit(function).lower(*operands).compile(OPTIMIZED)
        assert hlo.count_custom_calls(reference.as_text()).total() == 0
        return compiled(*operands), reference(*operands)


def assert_same_bits(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.view(f"u{got.itemsize}"), want.view(f"u{want.itemsize}"))


QUANTIZE_CASES = [
    QuantizeSpec(format="e4m3"),
    QuantizeSpec(format="e5m2", data=False, data_t=True),
    QuantizeSpec(format="e4m3", data_t=True, amax=True, dbias=True),
    QuantizeSpec(format="e4m3", data=False, amax=True),
    QuantizeSpec(format="e4m3", data=False, amax=True, if_unseeded=True),
    QuantizeSpec(format="e5m2", amax=True, margin=1, power_of_two=True),
]


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(jnp.float32, 0.0), (jnp.float16, 0.0), (jnp.bfloat16, 0.0), (jnp.bfloat16, 3.7), (jnp.float32, np.nan)],
    ids=["f32", "f16", "bf16", "bf16-given", "f32-nan"],
)
@pytest.mark.parametrize("spec", QUANTIZE_CASES, ids=lambda s: "".join(n[0] for n, v in vars(s).items() if v is True))
def test_quantize(spec, scale, dtype):
    x = normal((2, 16, 48), dtype)
    got, want = both(lambda x, s: primitives.quantize(x, s, spec), x, np.float32(scale))
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert (a is None) == (b is None), name
        if name == "dbias" and a is not None:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(a, oracle.f64(x).sum((0, 1)), rtol=1e-5, atol=1e-5)
        elif a is not None:
            assert_same_bits(a, b)
    amax = float(np.abs(oracle.f64(x)).max())
    seeded = oracle.scale_from_amax(amax, oracle.MAX[spec.format], spec.margin, spec.power_of_two)
    used = scale if scale != 0 else seeded
    if spec.data:
        np.testing.assert_array_equal(oracle.codes(got.data), oracle.cast(np.asarray(x), used, spec.format))
    if spec.data_t:
        transposed = np.moveaxis(oracle.cast(np.asarray(x), used, spec.format), -1, 0)
        np.testing.assert_array_equal(oracle.codes(got.data_t), transposed)
    if spec.quantizes:
        np.testing.assert_array_equal(got.scale, np.float32(used))
    if spec.amax:
        assert got.amax == (0 if spec.if_unseeded and scale != 0 else amax)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_nan_and_shows_in_amax(bad):
    x = normal((16, 32)).at[3, 5].set(bad)
    spec = QuantizeSpec(format="e5m2", amax=True)
    got, want = both(lambda x, s: primitives.quantize(x, s, spec), x, np.float32(0))
    assert_same_bits(got.data, want.data)
    assert oracle.codes(got.data)[3, 5] == 0x7F
    assert got.scale == 1
    np.testing.assert_array_equal(got.amax, np.float32(bad))


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_dequantize_every_code(fmt, out_dtype):
    data = jnp.asarray(np.arange(256, dtype=np.uint8).view(oracle.DTYPES[fmt]).reshape(4, 64))
    spec = DequantizeSpec(out_dtype=out_dtype)
    got, want = both(lambda d, s: primitives.dequantize(d, s, spec), data, np.float32(0.3))
    with np.errstate(all="ignore"):
        numpy = (np.asarray(data).astype(np.float32) * np.float32(0.3)).astype(np.dtype(jnp.dtype(out_dtype)))
    np.testing.assert_array_equal(oracle.f64(got), oracle.f64(numpy))
    np.testing.assert_array_equal(oracle.f64(got), oracle.f64(want))


def ulps(dtype) -> float:
    """Relative error of one rounding to dtype, and half as much again for the fp32 arithmetic before it."""
    return {"float32": 1e-5, "bfloat16": 2.0**-8, "float16": 2.0**-10}[np.dtype(dtype).name]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norm(kind, zero_centered, dtype):
    x, gamma, beta = normal((2, 16, 64), dtype), normal(64, seed=1), normal(64, seed=2)
    layernorm = kind == "layernorm"
    spec = NormSpec(
        format="e4m3", kind=kind, hp=True, amax=True, stats=True, epsilon=1e-5, zero_centered_gamma=zero_centered
    )
    function = functools.partial(primitives.norm, spec=spec)
    got, want = both(lambda x, s: function(x, gamma, beta if layernorm else None, s), x, SEED)
    y, mean, rstd = oracle.norm(
        x, gamma, beta if layernorm else None, epsilon=1e-5, layernorm=layernorm, zero_centered=zero_centered
    )
    for out in (got, want):
        np.testing.assert_allclose(oracle.f64(out.hp), y, rtol=ulps(dtype), atol=1e-5)
        np.testing.assert_allclose(out.rstd, rstd, rtol=1e-5)
        if layernorm:
            np.testing.assert_allclose(out.mean, mean, rtol=1e-5, atol=1e-6)
        else:
            assert out.mean is None
        quantized = primitives.quantize(out.hp, SEED, QuantizeSpec(format="e4m3", amax=True))
        assert_same_bits(out.data, quantized.data)  # fusing changes nothing
        assert_same_bits(out.amax, quantized.amax)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("kind", "zero_centered"), [("rmsnorm", False), ("rmsnorm", True), ("layernorm", False)])
def test_norm_grad(kind, zero_centered, residual, dtype):
    dy, x, dres = (normal((2, 16, 64), dtype, seed=seed) for seed in range(3))
    gamma, layernorm = normal(64, seed=3), kind == "layernorm"
    spec = NormGradSpec(kind=kind, zero_centered_gamma=zero_centered, residual=residual)
    options = {"epsilon": 1e-5, "layernorm": layernorm, "zero_centered": zero_centered}
    _, mean, rstd = oracle.norm(x, gamma, **options)
    want = oracle.norm_grad(dy, x, gamma, **options)

    def function(dy, x, gamma, mean, rstd, dres):
        mean, dres = mean if layernorm else None, dres if residual else None
        return primitives.norm_grad(dy, x, gamma, mean, rstd, spec, dres=dres)

    for out in both(function, dy, x, gamma, np.float32(mean), np.float32(rstd), dres):
        assert out.dx.dtype == dtype
        dx = want[0] + (oracle.f64(dres) if residual else 0)  # rounded once: half a unit in the last place of the sum
        np.testing.assert_allclose(oracle.f64(out.dx), dx, rtol=ulps(dtype), atol=1e-5)
        np.testing.assert_allclose(out.dgamma, want[1], rtol=1e-5, atol=1e-5)
        if layernorm:
            np.testing.assert_allclose(out.dbeta, want[2], rtol=1e-5, atol=1e-5)
        else:
            assert out.dbeta is None


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norm_grad_is_the_derivative_of_norm(kind):
    x, dy, gamma, beta = normal((3, 5, 48), jnp.float32), *(normal(s, jnp.float32) for s in ((3, 5, 48), 48, 48))
    layernorm = kind == "layernorm"

    def plain(x, gamma, beta):
        mean = x.mean(-1, keepdims=True) if layernorm else jnp.zeros_like(x[..., :1])
        rstd = 1 / jnp.sqrt(jnp.mean((x - mean) ** 2, -1, keepdims=True) + 1e-3)
        return (x - mean) * rstd * gamma + (beta if layernorm else 0), (mean[..., 0], rstd[..., 0])

    _, pullback, (mean, rstd) = jax.vjp(plain, x, gamma, beta, has_aux=True)
    spec = NormGradSpec(kind=kind)
    got = primitives.norm_grad(dy, x, gamma, mean if layernorm else None, rstd, spec)
    for a, b in zip(got, pullback(dy), strict=True):
        if a is not None:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


# Every kind in one dtype, those that differ most in all.
ACTIVATION_CASES = {
    **{kind: (kind, {}, DTYPES[i % 3]) for i, kind in enumerate(ACTIVATIONS + GATED_ACTIVATIONS)},
    **{f"{kind}-{np.dtype(d).name}": (kind, {}, d) for kind in ("gelu", "swiglu", "sreglu") for d in DTYPES},
    **{f"{kind}, second": (kind, {"gate_second": True}, jnp.bfloat16) for kind in ("swiglu", "glu")},
    "clamped, other parameters": ("clamped_swiglu", {"limit": 2.5, "alpha": 0.75, "linear_offset": 0.5}, jnp.float32),
    "clamped, second": ("clamped_swiglu", {"limit": 1.25, "gate_second": True}, jnp.bfloat16),
}


@pytest.mark.parametrize(("kind", "fields", "dtype"), ACTIVATION_CASES.values(), ids=ACTIVATION_CASES)
def test_activation_and_its_grad(kind, fields, dtype):
    x = normal((2, 16, 64), dtype) * 3
    dy = normal((2, 16, 32 if kind in GATED_ACTIVATIONS else 64), dtype, seed=1)
    forward = ActivationSpec(format="e4m3", kind=kind, hp=True, amax=True, **fields)
    backward = ActivationGradSpec(format="e5m2", kind=kind, hp=True, data_t=True, dbias=True, amax=True, **fields)
    for out in both(lambda x, s: primitives.activation(x, s, forward), x, SEED):
        want = oracle.activation(kind, x, **fields)
        np.testing.assert_allclose(oracle.f64(out.hp), want, rtol=ulps(dtype), atol=1e-5)
        assert_same_bits(out.data, primitives.quantize(out.hp, SEED, QuantizeSpec(format="e4m3")).data)
    for out in both(lambda dy, x, s: primitives.activation_grad(dy, x, s, backward), dy, x, SEED):
        want = oracle.activation_grad(kind, dy, x, **fields)
        np.testing.assert_allclose(oracle.f64(out.hp), want, rtol=ulps(dtype), atol=2e-5)
        np.testing.assert_allclose(out.dbias, oracle.f64(out.hp).sum((0, 1)), rtol=1e-5, atol=1e-4)
        assert_same_bits(out.data_t, np.moveaxis(np.asarray(out.data), -1, 0))
        assert_same_bits(out.data, primitives.quantize(out.hp, SEED, QuantizeSpec(format="e5m2")).data)


GEMM_CASES = {
    "plain": GemmSpec(),
    "bias": GemmSpec(bias=True, out_dtype="float32"),
    "residual": GemmSpec(beta=0.5, alpha=2.0, bias=True),
    "fp8 out": GemmSpec(out_dtype="float8_e4m3fn", amax=True, bias=True),
    "bf16": GemmSpec(fp8=False, bias=True, beta=1.0),
    "bf16, both transposed": GemmSpec(fp8=False, lhs_contract_first=True, rhs_contract_first=True),
}


@pytest.mark.parametrize("spec", GEMM_CASES.values(), ids=GEMM_CASES)
@pytest.mark.parametrize("lead", [(16,), (2, 3)])
def test_gemm(spec, lead):
    k, n = 64, 32
    lead = (16,) if spec.lhs_contract_first else lead
    dtype = jnp.float8_e4m3fn if spec.fp8 else jnp.bfloat16
    lhs, rhs, bias, c = normal((*lead, k)), normal((n, k), seed=1), normal(n, seed=2), normal((*lead, n), seed=3)
    fp8_out = spec.out_dtype == "float8_e4m3fn"
    operands = {"lhs": lhs.astype(dtype), "rhs": rhs.astype(dtype)}
    product = oracle.f64(operands["lhs"]) @ oracle.f64(operands["rhs"]).T
    if spec.fp8:
        operands |= {"lhs_scale_inv": np.float32(0.5), "rhs_scale_inv": np.float32(3)}
        product *= 1.5
    operands["lhs"] = operands["lhs"].T if spec.lhs_contract_first else operands["lhs"]
    operands["rhs"] = operands["rhs"].T if spec.rhs_contract_first else operands["rhs"]
    want = spec.alpha * product
    if spec.bias:
        operands["bias"] = bias
        want = want + oracle.f64(bias)
    if spec.beta:
        operands["c"] = c
        want = want + spec.beta * oracle.f64(c)
    if fp8_out:
        operands["out_scale"] = np.float32(4)

    def function(operands):
        rest = {name: x for name, x in operands.items() if name not in ("lhs", "rhs")}
        return primitives.gemm(operands["lhs"], operands["rhs"], spec, **rest)

    for out, amax in both(function, operands):
        if fp8_out:
            np.testing.assert_allclose(oracle.f64(out), np.clip(want * 4, -448, 448), rtol=2.0**-4, atol=2.0**-10)
            np.testing.assert_allclose(amax, np.abs(want).max(), rtol=1e-5)
        else:
            assert amax is None
            np.testing.assert_allclose(oracle.f64(out), want, rtol=ulps(spec.out_dtype), atol=1e-4)


def test_wgrad_contracts_several_leading_dimensions():
    x_t, dy_t = normal((48, 2, 16)).astype(jnp.float8_e4m3fn), normal((32, 2, 16), seed=1).astype(jnp.float8_e5m2)
    spec = GemmSpec(contract_dims=2, out_dtype="float32")
    one = np.float32(1)
    for out, _ in both(lambda a, b: primitives.gemm(a, b, spec, lhs_scale_inv=one, rhs_scale_inv=one), x_t, dy_t):
        want = np.einsum("kab,nab->kn", oracle.f64(x_t), oracle.f64(dy_t))
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-4)


def test_in_place_leaves_a_buffer_alone_that_is_still_used():
    lhs, rhs, c = normal((16, 32)), normal((16, 32), seed=1), normal((16, 16), jnp.bfloat16, seed=2)
    spec = GemmSpec(fp8=False, beta=1.0, in_place=True)
    before = np.asarray(c)
    out, _ = primitives.gemm(lhs, rhs, spec, c=c)
    np.testing.assert_array_equal(np.asarray(c), before)
    want = oracle.f64(lhs) @ oracle.f64(rhs).T + oracle.f64(c)
    np.testing.assert_allclose(oracle.f64(out), want, rtol=2.0**-8, atol=1e-4)


@pytest.mark.parametrize("shape", [(16, 40), (3, 16), (0, 16), (5,)])
def test_shapes_without_a_kernel_run_the_reference_and_say_so(shape):
    x, spec = normal(shape), QuantizeSpec(format="e4m3", data_t=True)
    reason = primitives.support.why_not(spec, x, SEED, platform="cpu")
    assert reason is not None
    assert "16" in reason or "no elements" in reason
    compiled = jax.jit(lambda x: primitives.quantize(x, SEED, spec)).lower(x).compile()
    assert hlo.count_custom_calls(compiled.as_text()).total() == 0
    out = compiled(x)
    np.testing.assert_array_equal(oracle.codes(out.data), oracle.cast(np.asarray(x), float(out.scale), "e4m3"))


def test_why_not():
    x, spec = normal((16, 32)), QuantizeSpec(format="e4m3")
    assert primitives.support.why_not(spec, x, SEED) is None
    assert primitives.support.why_not(spec, x, SEED, platform="cuda") is None  # no CUDA backend here
    assert primitives.support.why_not(spec, x, SEED, platform="tpu") == "there are no custom calls for platform tpu"
    with config.custom_calls(False):
        assert "disabled" in primitives.support.why_not(spec, x, SEED)
    assert primitives.support.why_not_fp8_linear(32, 48, 16) is None
    assert primitives.support.why_not_fp8_linear(32, 40, 16) == "input features: 40 is not a multiple of 16"
