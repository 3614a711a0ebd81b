"""quantize and dequantize on CUDA: bit for bit those of the CPU handlers, which are tested against references."""

import functools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from te_jax import primitives as P
from te_jax.quant.division import divide
from te_jax.testing.bits import assert_same_bits, quantize_fp64

DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def tensor(shape, dtype, seed=0):
    """Normal values over some orders of magnitude, so that there are subnormal codes and saturated ones."""
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        return (rng.standard_normal(shape) * np.exp2(rng.integers(-12, 4, shape))).astype(DTYPES[dtype])


def special(kind, dtype):
    x = tensor((48, 160), "f32", seed=7)
    tiny = {"f32": 1e-41, "bf16": 1e-39, "f16": 3e-7}[dtype]
    match kind:
        case "nan":
            x[17, 33] = np.nan
        case "inf":
            x[0, 0], x[47, 159] = np.inf, -np.inf
        case "zeros":
            x = np.zeros_like(x)
        case "negative zeros":
            x = -np.zeros_like(x)
        case "subnormals":
            x = x * np.float32(tiny)
        case "amax 1e-37":
            x = x / np.abs(x).max() * np.float32(1e-37)
        case "largest":
            x[5, 5] = ml_dtypes.finfo(DTYPES[dtype]).max
    return x.astype(DTYPES[dtype])


def compare(on, spec, x, scale):
    scale = np.float32(scale)
    results = {p: on(p, lambda x, s: P.quantize(x, s, spec), x, scale) for p in ("cpu", "cuda")}
    for name, cpu, cuda in zip(P.QuantizeOut._fields, results["cpu"], results["cuda"], strict=True):
        if cpu is None or name == "dbias":
            continue
        assert_same_bits(cuda, cpu, name)
    if spec.dbias:
        expected = x.astype(np.float64).sum(tuple(range(x.ndim - 1)))
        bound = np.abs(x.astype(np.float64)).sum(tuple(range(x.ndim - 1)))
        assert np.all(np.abs(results["cuda"].dbias - expected) <= 1e-6 * bound)
    return results["cuda"]


@pytest.mark.parametrize("scale", [0.0, 3.7, 1e4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FP8)
@pytest.mark.parametrize("shape", [(1, 16), (5, 48), (3, 43, 400), (129, 144)])
def test_row_copy(on, shape, fmt, dtype, scale):
    spec = P.QuantizeSpec(format=fmt, amax=True, dbias=True)
    x = tensor(shape, dtype)
    out = compare(on, spec, x, scale)
    assert_same_bits(out.data, quantize_fp64(x, out.scale, FP8[fmt]), "data against numpy")
    assert out.amax == np.abs(x.astype(np.float32)).max()


@pytest.mark.parametrize("scale", [0.0, 3.7])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FP8)
@pytest.mark.parametrize("shape", [(16, 16), (144, 272), (2, 8, 160), (400, 128)])
def test_both_copies(on, shape, fmt, dtype, scale):
    out = compare(on, P.QuantizeSpec(format=fmt, data_t=True, amax=True, dbias=True), tensor(shape, dtype), scale)
    assert_same_bits(out.data_t, np.moveaxis(out.data, -1, 0), "data_t against data")


@pytest.mark.parametrize("dtype", DTYPES)
def test_dbias_is_rounded_once_to_the_dtype_asked_for(on, dtype):
    x = tensor((272, 144), "bf16")
    name = np.dtype(DTYPES[dtype]).name
    wide, narrow = (
        on(
            "cuda",
            lambda x, d=d: P.quantize(x, np.float32(2), P.QuantizeSpec(format="e5m2", dbias=True, dbias_dtype=d)),
            x,
        )
        for d in ("float32", name)
    )
    assert_same_bits(narrow.dbias, wide.dbias.astype(DTYPES[dtype]))


def test_transposed_copy_alone(on):
    x = tensor((272, 144), "bf16")
    out = compare(on, P.QuantizeSpec(format="e4m3", data=False, data_t=True), x, 2.0)
    assert_same_bits(out.data_t, quantize_fp64(x, 2.0, FP8["e4m3"]).T)


SPECIAL = ["nan", "inf", "zeros", "negative zeros", "subnormals", "amax 1e-37", "largest"]


@pytest.mark.parametrize("scale", [0.0, 1.0, 2.0**100, np.nan, -1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FP8)
@pytest.mark.parametrize("kind", SPECIAL)
def test_special_values(on, kind, fmt, dtype, scale):
    spec = P.QuantizeSpec(format=fmt, data_t=True, amax=True)
    out = compare(on, spec, special(kind, dtype), scale)
    if kind == "nan":
        assert np.isnan(out.amax)
    if not scale >= 0:
        assert np.isnan(out.data.astype(np.float32)).all()


@pytest.mark.parametrize("margin", [-3, 2])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_seeded_scale(on, power_of_two, margin):
    for seed in range(20):
        spec = P.QuantizeSpec(format="e4m3", margin=margin, power_of_two=power_of_two)
        out = compare(on, spec, tensor((16, 64), "f32", seed), 0.0)
        assert not power_of_two or np.frexp(out.scale)[0] == 0.5


@pytest.mark.parametrize("if_unseeded", [False, True])
@pytest.mark.parametrize("scale", [0.0, 2.0, np.nan])
def test_amax_alone(on, scale, if_unseeded):
    x = tensor((300, 144), "bf16")
    spec = P.QuantizeSpec(format="e4m3", data=False, amax=True, if_unseeded=if_unseeded)
    out = compare(on, spec, x, scale)
    assert out.amax == (0.0 if if_unseeded and scale != 0 else np.abs(x.astype(np.float32)).max())


def test_many_tiles_repeat_exactly(on):
    """More tiles than blocks of the amax kernel, and the same bits twice, column sums included."""
    x = tensor((8192, 2048), "bf16")
    spec = P.QuantizeSpec(format="e5m2", data_t=True, amax=True, dbias=True)
    first, second = (compare(on, spec, x, 0.0) for _ in range(2))
    for name, a, b in zip(P.QuantizeOut._fields, first, second, strict=True):
        if a is not None:
            assert_same_bits(a, b, name)


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("fmt", FP8)
@pytest.mark.parametrize("scale_inv", [1.0, 0.3, 2.0**-126, np.nan])
def test_dequantize_every_code(on, scale_inv, fmt, out_dtype):
    data = np.tile(np.arange(256, dtype=np.uint8), 3).reshape(48, 16).view(FP8[fmt])
    run = functools.partial(P.dequantize, spec=P.DequantizeSpec(out_dtype=out_dtype))
    cpu, cuda = (on(p, run, data, np.float32(scale_inv)) for p in ("cpu", "cuda"))
    assert_same_bits(cuda, cpu)
    with np.errstate(over="ignore"):
        expected = (data.astype(np.float32) * np.float32(scale_inv)).astype(jnp.dtype(out_dtype))
    assert_same_bits(cuda, expected)


def test_scales_computed_in_jnp_are_those_of_the_kernels(on):
    """te_jax.quant.division gives numpy's bits on both platforms, which XLA's own division does not on a GPU."""
    amax = np.exp2(np.random.default_rng(0).uniform(-117, 127, 1_000_000)).astype(np.float32)
    scale = np.float32(448) / amax
    for platform in ("cpu", "cuda"):
        assert_same_bits(on(platform, lambda a: divide(448.0, a), amax), scale, f"448 / amax, {platform}")
        assert_same_bits(on(platform, lambda s: divide(1.0, s), scale), np.float32(1) / scale, f"1 / s, {platform}")
