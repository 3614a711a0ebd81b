"""Block scaling against a NumPy float64 model that loops over blocks."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from te_jax.quant import block_reference as br
from te_jax.testing import cases, tolerance
from te_jax.testing.compare import assert_within

BLOCKS = [br.BLOCK_1X128, br.BLOCK_128X128]


def blocks_of(shape, block):
    for i in range(0, shape[0], block[0]):
        for j in range(0, shape[1], block[1]):
            yield (i // block[0], j // block[1]), (slice(i, i + block[0]), slice(j, j + block[1]))


def numpy_quantize(x, block, power_of_two):
    """(data as float64, scale_inv) of x [M, K], block by block."""
    data, scale_inv = np.empty(x.shape), np.empty((-(-x.shape[0] // block[0]), -(-x.shape[1] // block[1])))
    for at, where in blocks_of(x.shape, block):
        amax = np.abs(x[where].astype(np.float64)).max()
        scale = 448 / amax if 0 < amax < np.inf else 1.0
        if power_of_two:
            scale = 2.0 ** np.floor(np.log2(scale))
        scale = np.float32(scale)
        scaled = np.clip(x[where].astype(np.float32) * scale, -448, 448)
        data[where] = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        scale_inv[at] = np.float32(1) / scale
    return data, scale_inv


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("shape", [(128, 256), (3, 128), (130, 200), (1, 1)])
@pytest.mark.parametrize("block", BLOCKS)
def test_quantize_equals_numpy(block, shape, power_of_two):
    x = cases.wide(np.random.default_rng(0), shape)
    data, scale_inv = br.quantize_block(jnp.asarray(x), block, power_of_two=power_of_two)
    expected_data, expected_scale_inv = numpy_quantize(x, block, power_of_two)
    assert data.dtype == jnp.float8_e4m3fn
    assert scale_inv.shape == br.scale_shape(shape, block) == expected_scale_inv.shape
    np.testing.assert_array_equal(np.asarray(scale_inv), expected_scale_inv.astype(np.float32))
    np.testing.assert_array_equal(np.asarray(data).astype(np.float64), expected_data)
    if power_of_two:
        assert (np.frexp(scale_inv)[0] == 0.5).all()


@pytest.mark.parametrize("block", BLOCKS)
def test_round_trip_within_the_format(block):
    x = cases.wide(np.random.default_rng(1), (2, 130, 200), octaves=6)
    data, scale_inv = br.quantize_block(jnp.asarray(x), block)
    rows = np.repeat(np.asarray(scale_inv), block[0], axis=-2)[:, :130]
    scale = 1 / np.repeat(rows, 128, axis=-1)[..., :200].astype(np.float64)
    got = br.dequantize_block(data, scale_inv, block)
    assert_within(got, x, tolerance.quantization_error(x, "e4m3", scale))


@pytest.mark.parametrize("block", BLOCKS)
def test_leading_dimensions_are_a_loop(block):
    x = jnp.asarray(cases.normal(np.random.default_rng(2), (2, 3, 130, 140)), jnp.bfloat16)
    data, scale_inv = br.quantize_block(x, block)
    for i in range(2):
        for j in range(3):
            one = br.quantize_block(x[i, j], block)
            np.testing.assert_array_equal(np.asarray(data[i, j]).view(np.uint8), np.asarray(one[0]).view(np.uint8))
            np.testing.assert_array_equal(scale_inv[i, j], one[1])


def test_zero_nan_and_inf_blocks():
    x = np.ones((4, 256), np.float32)
    x[0, :128], x[1, 5], x[2, 200] = 0, np.nan, -np.inf
    data, scale_inv = br.quantize_block(jnp.asarray(x), br.BLOCK_1X128)
    expected_scale_inv = np.full((4, 2), 2.0**-8, np.float32)
    expected_scale_inv[0, 0] = expected_scale_inv[1, 0] = expected_scale_inv[2, 1] = 1
    np.testing.assert_array_equal(scale_inv, expected_scale_inv)
    expected = x.copy()
    expected[2, 200] = np.nan  # infinite in, NaN out
    np.testing.assert_array_equal(br.dequantize_block(data, scale_inv, br.BLOCK_1X128), expected)


@pytest.mark.parametrize(
    ("lhs_block", "rhs_block"),
    [(br.BLOCK_1X128, br.BLOCK_128X128), (br.BLOCK_1X128, br.BLOCK_1X128), (br.BLOCK_128X128, br.BLOCK_1X128)],
)
@pytest.mark.parametrize("k", [128, 300])
def test_gemm_against_float64(lhs_block, rhs_block, k):
    rng = np.random.default_rng(3)
    lhs, rhs = cases.normal(rng, (2, 70, k)), cases.wide(rng, (140, k), octaves=3)
    a, a_inv = br.quantize_block(jnp.asarray(lhs), lhs_block, power_of_two=False)
    b, b_inv = br.quantize_block(jnp.asarray(rhs), rhs_block, power_of_two=False)
    out = br.gemm_block(a, a_inv, lhs_block, b, b_inv, rhs_block, out_dtype=jnp.float32)
    exact_a = np.stack([_float64(a[i], a_inv[i], lhs_block) for i in range(2)])
    exact_b = _float64(b, b_inv, rhs_block)
    expected, magnitude = exact_a @ exact_b.T, np.abs(exact_a) @ np.abs(exact_b).T
    assert_within(out, expected, tolerance.gemm_error(magnitude, k, expected, "float32"))
    bf16 = br.gemm_block(a, a_inv, lhs_block, b, b_inv, rhs_block)
    assert bf16.dtype == jnp.bfloat16
    assert_within(bf16, expected, tolerance.gemm_error(magnitude, k, expected, "bfloat16"))
    full = lhs.astype(np.float64) @ rhs.T
    relative = np.linalg.norm(np.asarray(out) - full) / np.linalg.norm(full)
    assert relative < 1.5 * tolerance.relative_rms_error("e4m3", "e4m3")


def _float64(data, scale_inv, block):
    data, out = np.asarray(data).astype(np.float64), np.empty(data.shape)
    for at, where in blocks_of(data.shape, block):
        out[where] = data[where] * np.float64(np.asarray(scale_inv)[at])
    return out


def test_exact_inputs_give_exact_results():
    rng = np.random.default_rng(4)
    lhs, rhs = cases.exact(rng, (5, 384)), cases.exact(rng, (256, 384))
    a, a_inv = br.quantize_block(jnp.asarray(lhs), br.BLOCK_1X128)
    b, b_inv = br.quantize_block(jnp.asarray(rhs), br.BLOCK_128X128)
    out = br.gemm_block(a, a_inv, br.BLOCK_1X128, b, b_inv, br.BLOCK_128X128, out_dtype=jnp.float32)
    np.testing.assert_array_equal(out, lhs.astype(np.float64) @ rhs.T)


def test_gemm_layout():
    scale_inv = jnp.arange(24.0).reshape(4, 3, 2)
    one = br.gemm_layout(scale_inv, br.BLOCK_1X128)
    assert one.shape == br.gemm_scale_shape((4, 3, 130), br.BLOCK_1X128) == (2, 4, 3)
    np.testing.assert_array_equal(one[1], scale_inv[..., 1])
    two = br.gemm_layout(scale_inv, br.BLOCK_1X128, 2)
    assert two.shape == br.gemm_scale_shape((4, 3, 256), br.BLOCK_1X128, 2) == (3, 2, 4)
    np.testing.assert_array_equal(two[1, 0], scale_inv[:, 1, 0])
    for count in (1, 2):
        there = br.gemm_layout(scale_inv, br.BLOCK_1X128, count)
        np.testing.assert_array_equal(br.from_gemm_layout(there, br.BLOCK_1X128, count), scale_inv)
    square = scale_inv[0]
    assert br.gemm_layout(square, br.BLOCK_128X128) is square
    assert br.gemm_scale_shape((300, 200), br.BLOCK_128X128) == (3, 2)


def test_the_transposed_copy_is_padded_to_whole_blocks():
    x = jnp.ones((2, 70, 16))
    got = br.transposed(x, br.BLOCK_1X128)
    assert got.shape == br.transposed_shape(x.shape, br.BLOCK_1X128) == (16, 2, 128)
    assert got.sum() == x.size
    assert (got[..., 70:] == 0).all()
    assert br.transposed(x[0], br.BLOCK_128X128).shape == (16, 70)


def test_errors():
    x = jnp.ones((4, 128))
    data, scale_inv = br.quantize_block(x, br.BLOCK_1X128)
    with pytest.raises(ValueError, match=r"quantize_block: block: expected .*got \(1, 64\)"):
        br.quantize_block(x, (1, 64))
    with pytest.raises(ValueError, match="quantize_block: x: expected at least 2 dimensions"):
        br.quantize_block(x[0], br.BLOCK_128X128)
    with pytest.raises(ValueError, match=r"dequantize_block: scale_inv: expected \(1, 1\), got \(4, 1\)"):
        br.dequantize_block(data, scale_inv, br.BLOCK_128X128)
    square, square_inv = br.quantize_block(x, br.BLOCK_128X128)
    with pytest.raises(ValueError, match="gemm_block: blocks: expected 1x128 for at least one operand"):
        br.gemm_block(square, square_inv, br.BLOCK_128X128, square, square_inv, br.BLOCK_128X128)
    with pytest.raises(ValueError, match=r"gemm_block: rhs: expected \[N, 128\], got \(4, 64\)"):
        br.gemm_block(data, scale_inv, br.BLOCK_1X128, data[:, :64], scale_inv, br.BLOCK_1X128)
