"""QTensor: dequantization in every scaling, and as a pytree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax.quant.block_reference import BLOCK_1X128, BLOCK_128X128, gemm_layout, quantize_block, transposed
from te_jax.quant.tensor import QTensor
from te_jax.testing import cases

RNG = np.random.default_rng(0)
E4M3 = jnp.float8_e4m3fn


def per_tensor(x, **copies):
    fp8 = jnp.asarray(x * 64).astype(E4M3)
    made = {"data": fp8, "data_t": jnp.moveaxis(fp8, -1, 0)}
    return QTensor(**{name: made[name] for name in copies}, scale_inv=jnp.float32(2.0**-6), dtype="float32")


@pytest.mark.parametrize("copies", [{"data": 1}, {"data_t": 1}, {"data": 1, "data_t": 1}])
def test_per_tensor(copies):
    x = cases.exact(RNG, (2, 3, 16))
    q = per_tensor(x, **copies)
    assert q.shape == (2, 3, 16)
    assert q.dequantize().dtype == jnp.float32
    np.testing.assert_array_equal(q.dequantize(), x)
    assert q.dequantize(jnp.bfloat16).dtype == jnp.bfloat16


def test_blocks_of_data_and_of_the_transposed_copy():
    x = jnp.asarray(cases.exact(RNG, (2, 70, 40)))
    data, scale_inv = quantize_block(x, BLOCK_1X128)
    data_t, scale_inv_t = quantize_block(transposed(x, BLOCK_1X128), BLOCK_1X128)
    rows = QTensor(data=data, scale_inv=gemm_layout(scale_inv, BLOCK_1X128), scaling="block_1x128")
    assert rows.dequantize().dtype == jnp.bfloat16
    np.testing.assert_array_equal(rows.dequantize(jnp.float32), x)
    scale_inv_t = gemm_layout(scale_inv_t, BLOCK_1X128, 2)
    columns = QTensor(data_t=data_t, scale_inv_t=scale_inv_t, scaling="block_1x128")
    assert columns.shape == (2, 128, 40)  # padded to whole blocks
    np.testing.assert_array_equal(columns.dequantize(jnp.float32)[:, :70], x)
    both = QTensor(data=data, data_t=data_t, scale_inv=rows.scale_inv, scale_inv_t=scale_inv_t, scaling="block_1x128")
    np.testing.assert_array_equal(both.dequantize(jnp.float32), x)
    kernel, kernel_inv = quantize_block(x[0], BLOCK_128X128)
    both = QTensor(
        data=kernel, data_t=kernel.T, scale_inv=kernel_inv, scale_inv_t=kernel_inv.T, scaling="block_128x128"
    )
    np.testing.assert_array_equal(both.dequantize(jnp.float32), x[0])


def test_is_a_pytree():
    q = per_tensor(cases.exact(RNG, (4, 16)), data=1)
    leaves = jax.tree.leaves(q)
    assert [leaf.shape for leaf in leaves] == [(4, 16), ()]
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(q)] == [".data", ".scale_inv"]
    out = jax.jit(lambda q: q)(q)
    assert (out.format, out.scaling, out.dtype, out.data_t) == ("e4m3", "tensor", "float32", None)
    np.testing.assert_array_equal(jax.jit(lambda q: q.dequantize())(q), q.dequantize())


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"data": jnp.ones((4, 16))}, TypeError, r"QTensor: data: expected float8_e4m3fn, got float32"),
        ({"data_t": jnp.ones((4, 16), E4M3)}, ValueError, r"QTensor: data_t: expected \(16, 4\), got \(4, 16\)"),
        ({"scale_inv": None}, ValueError, r"QTensor: scale_inv: expected float32\[\], got None"),
        ({"scale_inv": jnp.ones(1)}, ValueError, r"QTensor: scale_inv: expected float32\[\], got float32\[1\]"),
        ({"scaling": "mx"}, ValueError, r"QTensor: scaling: expected one of .*got 'mx'"),
        ({"data": None}, ValueError, r"QTensor: data: expected data or data_t, got neither"),
    ],
)
def test_errors(change, error, match):
    fields = {"data": jnp.ones((4, 16), E4M3), "scale_inv": jnp.float32(1), **change}
    with pytest.raises(error, match=match):
        QTensor(**fields).dequantize()
