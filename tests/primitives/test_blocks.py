"""Block scaling: the custom calls and the reference against a NumPy model that goes from block to block."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax import config, primitives
from te_jax.primitives import ActivationGradSpec, ActivationSpec, GemmSpec, NormSpec, QuantizeSpec
from te_jax.testing import blocks, cases, hlo, oracle, tolerance
from te_jax.testing.compare import assert_within
from te_jax.testing.compiling import OPTIMIZED

ROWS, SQUARES = "block_1x128", "block_128x128"
BOTH = {"format": "e4m3", "data_t": True}


def normal(shape, dtype=jnp.bfloat16, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def wide(shape, dtype=jnp.bfloat16):
    return jnp.asarray(cases.wide(np.random.default_rng(0), shape), dtype)


def both(function, *operands):
    """The results of the custom call and of the reference; asserts that the first one is a custom call."""
    compiled = jax.jit(function).lower(*operands).compile(OPTIMIZED)
    assert hlo.count_custom_calls(compiled.as_text()).total() == 1
    with config.custom_calls(False):
        reference = jax.jit(function).lower(*operands).compile(OPTIMIZED)
        assert hlo.count_custom_calls(reference.as_text()).total() == 0
        return compiled(*operands), reference(*operands)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("shape", [(256, 128), (2, 128, 256), (3, 70, 144), (5, 16)], ids=str)
@pytest.mark.parametrize("wanted", ["data", "data_t", "both"])
def test_quantize_rows(wanted, shape, dtype, power_of_two):
    x = wide(shape, dtype)
    one = {} if wanted == "both" else {"data": wanted == "data", "data_t": wanted == "data_t"}
    spec = QuantizeSpec(**(BOTH | one), dbias=True, power_of_two=power_of_two, scaling=ROWS)
    for out in both(lambda x: primitives.quantize(x, None, spec), x):
        blocks.check(out, x, spec)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("shape", [(256, 128), (144, 272), (16, 16)], ids=str)
@pytest.mark.parametrize("wanted", ["data", "data_t", "both"])
def test_quantize_squares(wanted, shape, power_of_two):
    x = wide(shape, jnp.float32)
    one = {} if wanted == "both" else {"data": wanted == "data", "data_t": wanted == "data_t"}
    spec = QuantizeSpec(**(BOTH | one), dbias=True, power_of_two=power_of_two, scaling=SQUARES)
    for out in both(lambda x: primitives.quantize(x, None, spec), x):
        blocks.check(out, x, spec)


@pytest.mark.parametrize("dbias_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scaling", [ROWS, SQUARES])
def test_dbias_is_rounded_once(scaling, dbias_dtype):
    x = wide((144, 272), jnp.bfloat16)
    spec = QuantizeSpec(**BOTH, dbias=True, dbias_dtype=dbias_dtype, scaling=scaling)
    for out in both(lambda x: primitives.quantize(x, None, spec), x):
        blocks.check(out, x, spec)


@pytest.mark.parametrize("scaling", [ROWS, SQUARES])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0])
def test_a_block_without_a_range_has_scale_1_and_its_neighbours_theirs(bad, scaling):
    x = normal((256, 256), jnp.float32)
    x = x.at[130, 5].set(bad) if bad else x.at[128:, :128].set(0.0)
    spec = QuantizeSpec(**BOTH, scaling=scaling, power_of_two=True)
    for out in both(lambda x: primitives.quantize(x, None, spec), x):
        blocks.check(out, x, spec)
        assert np.isnan(oracle.f64(out.data)).sum() == (0 if bad == 0 else 1)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norm(kind):
    x, gamma, beta = normal((2, 70, 144)), normal(144, seed=1), normal(144, seed=2)
    beta = beta if kind == "layernorm" else None
    spec = NormSpec(**BOTH, kind=kind, hp=True, stats=True, scaling=ROWS, power_of_two=True)
    for out in both(lambda x: primitives.norm(x, gamma, beta, None, spec), x):
        y, mean, rstd = oracle.norm(x, gamma, beta, epsilon=1e-6, layernorm=kind == "layernorm")
        np.testing.assert_allclose(oracle.f64(out.hp), y, rtol=2.0**-8, atol=1e-5)
        np.testing.assert_allclose(out.rstd, rstd, rtol=1e-5)
        if kind == "layernorm":
            np.testing.assert_allclose(out.mean, mean, rtol=1e-5, atol=1e-6)
        blocks.check(out, out.hp, spec)


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_activation_and_its_grad(kind):
    gated = kind == "swiglu"
    cols = 256 if gated else 144
    x, dy = normal((2, 70, 2 * cols if gated else cols)) * 3, normal((2, 70, cols), seed=1)
    forward = ActivationSpec(**BOTH, kind=kind, hp=True, scaling=ROWS, power_of_two=True)
    backward = ActivationGradSpec(**BOTH, kind=kind, hp=True, dbias=True, scaling=ROWS, power_of_two=True)
    for out in both(lambda x: primitives.activation(x, None, forward), x):
        np.testing.assert_allclose(oracle.f64(out.hp), oracle.activation(kind, x), rtol=2.0**-8, atol=1e-5)
        blocks.check(out, out.hp, forward)
    for out in both(lambda dy, x: primitives.activation_grad(dy, x, None, backward), dy, x):
        want = oracle.activation_grad(kind, dy, x)
        np.testing.assert_allclose(oracle.f64(out.hp), want, rtol=2.0**-8, atol=2e-5)
        blocks.check(out, out.hp, backward)


def operand(x, scaling, contract_dims=1, *, power_of_two=False):
    """(data, scale_inv, values as fp64) of x [*kept, *contracted]; several contracted dimensions: a transposed copy."""
    spec = QuantizeSpec(format="e4m3", scaling=scaling, power_of_two=power_of_two)
    if contract_dims > 1:
        spec = dataclasses.replace(spec, data=False, data_t=True)
        out = primitives.quantize(jnp.moveaxis(x, 0, -1), None, spec)
        data, scale_inv = out.data_t, out.scale_inv_t
    else:
        out = primitives.quantize(x, None, spec)
        data, scale_inv = out.data, out.scale_inv
    scale = np.asarray(scale_inv, np.float64)
    if scaling == ROWS:
        scale = np.moveaxis(scale, range(contract_dims), range(-contract_dims, 0))
    else:
        scale = np.repeat(scale, 128, 0)[: data.shape[0]]
    return data, scale_inv, oracle.f64(data) * np.repeat(scale, 128, -1)[..., : data.shape[-1]]


GEMMS = {
    "fprop": GemmSpec(lhs_scaling=ROWS, rhs_scaling=SQUARES),
    "wgrad": GemmSpec(lhs_scaling=ROWS, rhs_scaling=ROWS, out_dtype="float32"),
    "squares on the left": GemmSpec(lhs_scaling=SQUARES, rhs_scaling=ROWS, out_dtype="float32"),
    "epilogue": GemmSpec(lhs_scaling=ROWS, rhs_scaling=SQUARES, alpha=0.5, beta=2.0, bias=True),
}


@pytest.mark.parametrize("spec", GEMMS.values(), ids=GEMMS)
@pytest.mark.parametrize(("m", "n", "k"), [(24, 144, 128), (16, 256, 400)])
def test_gemm(spec, m, n, k):
    lhs, lhs_inv, lhs64 = operand(wide((m, k)), spec.lhs_scaling)
    rhs, rhs_inv, rhs64 = operand(wide((n, k)), spec.rhs_scaling)
    want, magnitude = spec.alpha * lhs64 @ rhs64.T, spec.alpha * np.abs(lhs64) @ np.abs(rhs64).T
    extra = {}
    if spec.bias:
        extra = {"bias": normal(n, seed=2), "c": normal((m, n), seed=3)}
        want = want + oracle.f64(extra["bias"]) + spec.beta * oracle.f64(extra["c"])

    def function(lhs, rhs, a, b, extra):
        return primitives.gemm(lhs, rhs, spec, lhs_scale_inv=a, rhs_scale_inv=b, **extra)[0]

    for out in both(function, lhs, rhs, lhs_inv, rhs_inv, extra):
        assert_within(out, want, tolerance.gemm_error(magnitude, k, want, spec.out_dtype) + 1e-6)


def test_exact_inputs_give_exact_results():
    rng = np.random.default_rng(4)
    x, w = cases.exact(rng, (2, 8, 384)), cases.exact(rng, (256, 384))
    (lhs, lhs_inv, _), (rhs, rhs_inv, _) = operand(jnp.asarray(x), ROWS), operand(jnp.asarray(w), SQUARES)
    spec = GemmSpec(lhs_scaling=ROWS, rhs_scaling=SQUARES, out_dtype="float32")
    for out, _ in both(
        lambda a, b: primitives.gemm(lhs, rhs, spec, lhs_scale_inv=a, rhs_scale_inv=b), lhs_inv, rhs_inv
    ):
        np.testing.assert_array_equal(out, x.astype(np.float64) @ w.T)


@pytest.mark.parametrize("tokens", [128, 72])
def test_wgrad_contracts_several_leading_dimensions(tokens):
    """Sequences that aren't whole blocks are padded: no block has tokens of two."""
    spec = GemmSpec(contract_dims=2, lhs_scaling=ROWS, rhs_scaling=ROWS, out_dtype="float32")
    lhs, lhs_inv, lhs64 = operand(wide((48, 3, tokens)), ROWS, 2)
    rhs, rhs_inv, rhs64 = operand(wide((32, 3, tokens)), ROWS, 2)
    assert lhs.shape == (48, 3, 128)
    want = np.einsum("kab,nab->kn", lhs64, rhs64)
    magnitude = np.einsum("kab,nab->kn", np.abs(lhs64), np.abs(rhs64))
    for out, _ in both(
        lambda a, b: primitives.gemm(lhs, rhs, spec, lhs_scale_inv=a, rhs_scale_inv=b), lhs_inv, rhs_inv
    ):
        assert_within(out, want, tolerance.gemm_error(magnitude, 3 * tokens, want, "float32"))


def test_small_scales_do_not_underflow():
    x = jnp.full((16, 64), 2.0**-110)
    w = jnp.full((64, 64), 2.0**-16)
    (lhs, lhs_inv, _), (rhs, rhs_inv, _) = (
        operand(value, scaling, power_of_two=True) for value, scaling in ((x, ROWS), (w, SQUARES))
    )
    spec = GemmSpec(lhs_scaling=ROWS, rhs_scaling=SQUARES, out_dtype="float32")
    for out, _ in both(
        lambda a, b: primitives.gemm(lhs, rhs, spec, lhs_scale_inv=a, rhs_scale_inv=b), lhs_inv, rhs_inv
    ):
        np.testing.assert_array_equal(out, np.full((16, 64), 2.0**-120))


def test_a_gated_gradient_whose_blocks_would_be_of_both_halves_runs_the_reference():
    x, dy = normal((16, 96)), normal((16, 48), seed=1)
    spec = ActivationGradSpec(**BOTH, kind="swiglu", hp=True, scaling=ROWS)
    assert "48 is not a multiple of 128" in primitives.support.why_not(spec, dy, x)
    out = jax.jit(lambda dy, x: primitives.activation_grad(dy, x, None, spec))(dy, x)
    blocks.check(out, out.hp, spec)


@pytest.mark.parametrize(
    ("spec", "shape", "reason"),
    [
        (QuantizeSpec(**BOTH, scaling=ROWS), (16, 40), "last dimension 40 is not a multiple of 16"),
        (QuantizeSpec(**BOTH, scaling=SQUARES), (40, 16), "number of rows 40 is not a multiple of 16"),
        (QuantizeSpec(**BOTH, scaling=ROWS), (0, 16), "no elements"),
    ],
)
def test_shapes_without_a_kernel_run_the_reference_and_say_so(spec, shape, reason):
    x = normal(shape)
    assert reason in primitives.support.why_not(spec, x)
    compiled = jax.jit(lambda x: primitives.quantize(x, None, spec)).lower(x).compile()
    assert hlo.count_custom_calls(compiled.as_text()).total() == 0
    if x.size:
        blocks.check(compiled(x), x, spec)


@pytest.mark.parametrize(
    ("fields", "shape", "scale", "match"),
    [
        ({"scaling": "block"}, (16, 16), None, "scale: expected None for scaling block|scaling: expected tensor or"),
        ({"scaling": ROWS}, (16, 16), 1.0, "quantize: scale: expected None for scaling block_1x128, got an array"),
        ({}, (16, 16), None, "quantize: scale: expected an array for scaling tensor, got None"),
        ({"scaling": ROWS, "data": False, "dbias": True}, (16, 16), None, "expected data or data_t .*got neither"),
        ({"scaling": ROWS, "amax": True}, (16, 16), None, "expected no amax, if_unseeded or margin"),
        ({"scaling": SQUARES}, (2, 16, 16), None, "x: expected 2 dimensions in block_128x128"),
        ({"scaling": ROWS, "data_t": True}, (16,), None, "x: expected 2 dimensions or more for data_t"),
    ],
)
def test_quantize_errors(fields, shape, scale, match):
    with pytest.raises(ValueError, match=match):
        primitives.quantize(normal(shape), scale and jnp.float32(scale), QuantizeSpec(format="e4m3", **fields))


@pytest.mark.parametrize(
    ("fields", "change", "match"),
    [
        ({"rhs_scaling": "tensor"}, {}, "rhs_scaling: expected block_1x128 or block_128x128 beside"),
        ({"lhs_scaling": SQUARES}, {}, "rhs_scaling: expected block_1x128 beside block_128x128"),
        ({"fast_accumulation": True}, {}, "fast_accumulation: expected False"),
        ({"out_dtype": "float8_e4m3fn"}, {}, "out_dtype: expected high precision"),
        ({}, {"lhs_scale_inv": jnp.ones((32, 1))}, r"lhs_scale_inv: expected shape \(1, 32\), got \(32, 1\)"),
        ({}, {"lhs_scale_inv": jnp.ones((1, 32), jnp.bfloat16)}, "lhs_scale_inv: expected dtype float32"),
    ],
)
def test_gemm_errors(fields, change, match):
    spec = GemmSpec(**({"lhs_scaling": ROWS, "rhs_scaling": SQUARES} | fields))
    data = {"lhs": jnp.ones((32, 64), jnp.float8_e4m3fn), "rhs": jnp.ones((48, 64), jnp.float8_e4m3fn)}
    scales = {"lhs_scale_inv": jnp.ones((1, 32)), "rhs_scale_inv": jnp.ones((1, 1))} | change
    scales |= {"out_scale": jnp.float32(1)} if "out_dtype" in fields else {}
    with pytest.raises((ValueError, TypeError), match=match):
        primitives.gemm(*data.values(), spec, **scales)
