"""Block scaling on CUDA: passes to the last bit against a NumPy model, GEMMs against fp64, the chain against flax."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import te_jax as te
from te_jax import primitives as P
from te_jax.primitives.spec import ACTIVATIONS, GATED_ACTIVATIONS
from te_jax.testing import blocks, tolerance
from te_jax.testing.bits import assert_same_bits

DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
OUT = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
ROWS, SQUARES = "block_1x128", "block_128x128"
ALL = {"data_t": True, "dbias": True}


def tensor(shape, dtype, seed=0):
    """Normal values over some orders of magnitude, so that there are subnormal codes and saturated ones."""
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        return (rng.standard_normal(shape) * np.exp2(rng.integers(-12, 4, shape))).astype(DTYPES[dtype])


WANTED = (ALL, {"data_t": False}, {"data": False, "data_t": True})


@pytest.mark.parametrize(("fmt", "power_of_two"), [("e4m3", True), ("e4m3", False), ("e5m2", True)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(128, 128), (256, 144), (3, 70, 400), (2, 136, 256), (5, 16)])
def test_rows(on, shape, dtype, fmt, power_of_two):
    x = tensor(shape, dtype)
    for wanted in WANTED if dtype == "bf16" and fmt == "e4m3" else (ALL,):
        spec = P.QuantizeSpec(format=fmt, scaling=ROWS, power_of_two=power_of_two, **wanted)
        blocks.check(on("cuda", lambda x, spec=spec: P.quantize(x, None, spec), x), x, spec)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(128, 128), (256, 144), (400, 272), (16, 16)])
def test_squares(on, shape, dtype, power_of_two):
    x = tensor(shape, dtype)
    for wanted in WANTED if dtype == "bf16" else (ALL,):
        spec = P.QuantizeSpec(format="e4m3", scaling=SQUARES, power_of_two=power_of_two, **wanted)
        blocks.check(on("cuda", lambda x, spec=spec: P.quantize(x, None, spec), x), x, spec)


@pytest.mark.parametrize("dbias_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scaling", [ROWS, SQUARES])
def test_dbias_is_rounded_once(on, scaling, dbias_dtype):
    x = tensor((400, 272), "bf16")
    spec = P.QuantizeSpec(format="e4m3", scaling=scaling, data_t=True, dbias=True, dbias_dtype=dbias_dtype)
    blocks.check(on("cuda", lambda x: P.quantize(x, None, spec), x), x, spec)


@pytest.mark.parametrize("scaling", [ROWS, SQUARES])
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0, 1e-41, 1e-37, 3.3e38, 448.0, 449.0, 1.75, 1.7500001])
def test_amaxes_at_the_edges(on, value, power_of_two, scaling):
    """Every block of the last row of blocks has this amax."""
    x = tensor((256, 256), "f32")
    x[128:] = np.float32(value) * np.float32(0.5)
    x[128:, ::128] = x[128::128, :] = value
    x[128:, 5] = value
    spec = P.QuantizeSpec(format="e4m3", scaling=scaling, power_of_two=power_of_two, data_t=True)
    blocks.check(on("cuda", lambda x: P.quantize(x, None, spec), x), x, spec)


@pytest.mark.parametrize("power_of_two", [True, False])
def test_every_mantissa(on, power_of_two):
    """Scales of amaxes with every upper part of the mantissa and exponents from one end to the other."""
    bits = (np.arange(2**16, dtype=np.uint32) << 15) & np.uint32(0x7F7FFFFF)
    amax = np.concatenate([bits.view(np.float32), np.nextafter(bits.view(np.float32), np.float32(0))])
    x = np.repeat(amax[:, None], 16, 1)
    spec = P.QuantizeSpec(format="e4m3", scaling=ROWS, power_of_two=power_of_two)
    results = {platform: on(platform, lambda x: P.quantize(x, None, spec), x) for platform in ("cpu", "cuda")}
    assert_same_bits(results["cuda"].scale_inv, results["cpu"].scale_inv, "scale_inv")
    assert_same_bits(results["cuda"].data, results["cpu"].data, "data")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("shape", [(128, 128), (3, 70, 400), (136, 5120)])
def test_norm(on, shape, kind, dtype):
    """What is quantized is hp, which is that of tensor scaling."""
    x, gamma = tensor(shape, dtype), tensor(shape[-1:], "f32", 1)
    beta = tensor(shape[-1:], "f32", 2) if kind == "layernorm" else None
    fields = {"format": "e4m3", "kind": kind, "hp": True, "stats": True, "data_t": True}
    spec = P.NormSpec(scaling=ROWS, power_of_two=True, **fields)
    out = on("cuda", lambda x: P.norm(x, gamma, beta, None, spec), x)
    blocks.check(out, out.hp, spec)
    plain = P.NormSpec(**(fields | {"data": False, "data_t": False}))
    want = on("cuda", lambda x: P.norm(x, gamma, beta, np.float32(0), plain), x)
    for name in ("hp", "mean", "rstd"):
        if getattr(want, name) is not None:
            assert_same_bits(getattr(out, name), getattr(want, name), name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ACTIVATIONS + GATED_ACTIVATIONS)
@pytest.mark.parametrize("shape", [(3, 70, 384)])
def test_activation_and_its_grad(on, shape, kind, dtype):
    x, dy = tensor((*shape[:-1], shape[-1] * (2 if kind in GATED_ACTIVATIONS else 1)), dtype), tensor(shape, dtype, 1)
    fields = {"format": "e4m3", "kind": kind, "hp": True}
    spec = P.ActivationSpec(scaling=ROWS, power_of_two=True, data_t=True, **fields)
    out = on("cuda", lambda x: P.activation(x, None, spec), x)
    blocks.check(out, out.hp, spec)
    plain = P.ActivationSpec(**fields, data=False)
    assert_same_bits(out.hp, on("cuda", lambda x: P.activation(x, np.float32(0), plain), x).hp)
    spec = P.ActivationGradSpec(scaling=ROWS, power_of_two=True, **ALL, **fields)
    out = on("cuda", lambda dy, x: P.activation_grad(dy, x, None, spec), dy, x)
    blocks.check(out, out.hp, spec)
    plain = P.ActivationGradSpec(**fields, data=False)
    assert_same_bits(out.hp, on("cuda", lambda dy, x: P.activation_grad(dy, x, np.float32(0), plain), dy, x).hp)


def operand(rows, k, scaling, seed):
    """(data, scale_inv as a GEMM reads it, values in fp64) of a random operand [rows, k]."""
    x = np.random.default_rng(seed).standard_normal((rows, k)).astype(np.float32)
    side = (1, 128) if scaling == ROWS else (128, 128)
    codes, scale_inv = blocks.quantize(x, side, "e4m3", power_of_two=False)
    data = codes.view(ml_dtypes.float8_e4m3fn)
    scale = np.repeat(np.repeat(scale_inv.astype(np.float64), side[0], 0)[:rows], 128, 1)[:, :k]
    return data, scale_inv.T if scaling == ROWS else scale_inv, data.astype(np.float64) * scale


PAIRS = {"1d2d": (ROWS, SQUARES), "1d1d": (ROWS, ROWS), "2d1d": (SQUARES, ROWS)}


def check_gemm(on, m, n, k, pair, out_dtype, epilogue=""):
    lhs_scaling, rhs_scaling = PAIRS[pair]
    (lhs, a, lhs64), (rhs, b, rhs64) = operand(m, k, lhs_scaling, 0), operand(n, k, rhs_scaling, 1)
    rng = np.random.default_rng(2)
    bias = rng.standard_normal(n).astype(np.float16 if out_dtype == "float16" else ml_dtypes.bfloat16)
    c = rng.standard_normal((m, n)).astype(OUT[out_dtype])
    spec = P.GemmSpec(
        out_dtype=out_dtype,
        bias="bias" in epilogue,
        beta=1.0 if "add" in epilogue else 0.0,
        in_place="place" in epilogue,
        lhs_scaling=lhs_scaling,
        rhs_scaling=rhs_scaling,
    )

    def run(lhs, rhs, a, b, bias, c):
        extra = ({"bias": bias} if spec.bias else {}) | ({"c": c} if spec.beta else {})
        return P.gemm(lhs, rhs, spec, lhs_scale_inv=a, rhs_scale_inv=b, **extra)[0]

    out = on("cuda", run, lhs, rhs, a, b, bias, c)
    product = lhs64 @ rhs64.T
    add = (bias.astype(np.float64) if spec.bias else 0.0) + (c.astype(np.float64) if spec.beta else 0.0)
    expected = product + add
    magnitude = np.abs(lhs64) @ np.abs(rhs64).T
    bound = tolerance.gemm_error(magnitude, k, expected, out_dtype, hopper="precise")
    bound = bound + tolerance.FP32_UNIT * np.abs(add)
    if spec.in_place and out_dtype != "float32":  # the product is rounded before c is added
        bound += tolerance.unit_roundoff(out_dtype) * np.abs(product)
    error = np.abs(out.astype(np.float64) - expected)
    assert np.all(error <= bound), f"error {np.max(error / bound)} times the tolerance"


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(128, 128, 128), (256, 384, 512), (272, 400, 640), (512, 256, 2048), (8, 144, 256), (16, 16, 16), (64, 144, 400),
     (128, 256, 144), (24, 128, 384)],
)  # fmt: skip
def test_gemm(on, m, n, k, pair):
    check_gemm(on, m, n, k, pair, "bfloat16")
    check_gemm(on, m, n, k, pair, "float32")


@pytest.mark.parametrize("out_dtype", OUT)
@pytest.mark.parametrize("epilogue", ["bias", "add", "add in place", "bias, add"])
@pytest.mark.parametrize("pair", PAIRS)
def test_gemm_epilogue(on, pair, epilogue, out_dtype):
    check_gemm(on, 256, 384, 512, pair, out_dtype, epilogue)


def test_gemm_of_many_tokens_of_several_sequences(on):
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((3, 200, n)).astype(ml_dtypes.bfloat16) for n in (256, 384))
    spec = P.QuantizeSpec(format="e4m3", data_t=True, scaling=ROWS, power_of_two=True)
    wgrad = P.GemmSpec(contract_dims=2, out_dtype="float32", lhs_scaling=ROWS, rhs_scaling=ROWS)

    def run(x, dy):
        q, g = P.quantize(x, None, spec), P.quantize(dy, None, spec)
        return P.gemm(q.data_t, g.data_t, wgrad, lhs_scale_inv=q.scale_inv_t, rhs_scale_inv=g.scale_inv_t)[0]

    got, want = on("cuda", run, x, dy), on("cpu", run, x, dy)
    assert np.linalg.norm(got - want) <= tolerance.gemm_error_norm(768, hopper="precise") * np.linalg.norm(want)


@pytest.mark.parametrize("tokens", [(256,), (2, 72)])
def test_linear_is_near_flax(tokens):
    """Values and gradients of a whole linear with bias, one relative rms error of FP8 away from flax in fp32."""
    x = jax.random.normal(jax.random.key(0), (*tokens, 256), jnp.bfloat16)
    weights = jax.random.normal(jax.random.key(1), (*tokens, 384))
    layer, plain = te.flax.Dense(384, recipe=te.BlockScaling(), dtype=jnp.bfloat16), nn.Dense(384)
    variables = plain.init(jax.random.key(2), x)

    def grads(module, x):
        loss = lambda v, x: jnp.sum(module.apply(v, x).astype(jnp.float32) * weights)  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(variables, x)

    got, want = grads(layer, x)[1], grads(plain, x.astype(jnp.float32))[1]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 1.5 * tolerance.relative_rms_error("e4m3", "e4m3") * np.linalg.norm(b)
