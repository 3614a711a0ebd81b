"""Block scaling in NumPy, one block after the other: nothing here is shared with the library's own code."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from te_jax.testing import oracle


def quantize(x: np.ndarray, block: tuple[int, int], format: str, power_of_two: bool) -> tuple[np.ndarray, np.ndarray]:
    """(codes uint8 [M, K], scale_inv f32 [M in blocks, K in blocks]) of x [M, K]."""
    rows, cols = (-(-size // side) for size, side in zip(x.shape, block, strict=True))
    codes, scale_inv = np.empty(x.shape, np.uint8), np.empty((rows, cols), np.float32)
    for i in range(rows):
        for j in range(cols):
            part = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            amax = float(np.abs(x[part].astype(np.float32)).max())  # NaN if there is one
            scale = oracle.scale_from_amax(amax, oracle.MAX[format], power_of_two=power_of_two)
            codes[part] = oracle.cast(x[part], scale, format)
            scale_inv[i, j] = np.float32(1) / np.float32(scale)
    return codes, scale_inv


def rows(x: np.ndarray, format: str, power_of_two: bool) -> tuple[np.ndarray, np.ndarray]:
    """data [*lead, C] in 1x128 blocks as codes, and scale_inv [C in blocks, *lead]."""
    codes, scale_inv = quantize(x.reshape(-1, x.shape[-1]), (1, 128), format, power_of_two)
    return codes.reshape(x.shape), scale_inv.T.reshape(-1, *x.shape[:-1])


def columns(x: np.ndarray, format: str, power_of_two: bool) -> tuple[np.ndarray, np.ndarray]:
    """data_t [C, *lead padded] in 1x128 blocks as codes, and scale_inv_t [*lead in blocks, C]."""
    *outer, tokens, cols = x.shape
    blocks = -(-tokens // 128)
    data_t = np.zeros((cols, *outer, blocks * 128), np.uint8)
    scale_inv_t = np.empty((*outer, blocks, cols), np.float32)
    for at in np.ndindex(*outer):
        codes, scale_inv = quantize(x[at].T, (1, 128), format, power_of_two)
        data_t[(slice(None), *at, slice(0, tokens))] = codes
        scale_inv_t[at] = scale_inv.T
    return data_t, scale_inv_t


def check(out, y, spec) -> None:
    """Every result of a pass in block scaling against y [*lead, C] as it was rounded, bit for bit but dbias."""
    y = np.asarray(y)
    expected = {}
    if spec.scaling == "block_128x128":
        codes, scale_inv = quantize(y, (128, 128), spec.format, spec.power_of_two)
        known = {"data": codes, "scale_inv": scale_inv, "data_t": codes.T, "scale_inv_t": scale_inv.T}
    else:
        data, scale_inv = rows(y, spec.format, spec.power_of_two)
        data_t, scale_inv_t = columns(y, spec.format, spec.power_of_two) if y.ndim > 1 else (None, None)
        known = {"data": data, "scale_inv": scale_inv, "data_t": data_t, "scale_inv_t": scale_inv_t}
    expected |= {name: known[name] for name in ("data", "scale_inv") if spec.data}
    expected |= {name: known[name] for name in ("data_t", "scale_inv_t") if spec.data_t}
    for name in ("data", "scale_inv", "data_t", "scale_inv_t"):
        got = getattr(out, name)
        assert (got is not None) == (name in expected), name
        if got is not None:
            got = oracle.codes(got) if name.startswith("data") else np.asarray(got)
            np.testing.assert_array_equal(got, expected[name], err_msg=name)
    assert out.scale is out.amax is None
    if spec.dbias:
        exact, lead = y.astype(np.float64), tuple(range(y.ndim - 1))
        total, rounding = exact.sum(lead), float(jnp.finfo(spec.dbias_dtype).eps) / 2
        assert out.dbias.dtype == spec.dbias_dtype
        error = np.abs(np.asarray(out.dbias, np.float64) - total)
        # float16 has subnormals among sums of small values.
        assert np.all(error <= 1e-6 * np.abs(exact).sum(lead) + rounding * np.abs(total) + 1e-7 * (rounding > 1e-4))
