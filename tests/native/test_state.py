"""te_jax_scale_read and te_jax_scale_write on CPU against plain NumPy, and what they refuse."""

import jax
import numpy as np
import pytest
from handlers import F32, FP8_MAX, call

from te_jax.primitives.spec import ScaleReadSpec, ScaleWriteSpec

W = 2.0**-64
HISTORY = 5
FORMATS = "e4m3 e5m2 e4m3"
Q = 3
SHAPES = [((Q, HISTORY), F32), ((Q,), F32), ((Q, 66), F32)]


def read(leaves, **fields):
    return np.array(call("scale_read", ScaleReadSpec(formats=FORMATS, **fields), [((), F32)] * Q, *leaves))


def write(leaves, amaxes, used="111", **fields):
    spec = ScaleWriteSpec(formats=FORMATS, used=used, **fields)
    return call("scale_write", spec, SHAPES, *leaves, *np.array(amaxes, np.float32))


def zeros():
    return [np.zeros(shape, dtype) for shape, dtype in SHAPES]


@pytest.mark.parametrize(("margin", "most_recent"), [(0, False), (2, False), (0, True)])
def test_plain_steps(margin, most_recent):
    """History, scale and parity of steps with one use each, bit for bit; the rung is that of the amax."""
    rng = np.random.default_rng(1)
    leaves, seen = zeros(), np.zeros((0, Q), np.float32)
    fp8_max = np.float32([FP8_MAX[word] for word in FORMATS.split(" ")])
    for step in range(8):
        want = np.zeros(Q, np.float32)
        if step:
            recent = seen[:HISTORY]
            want = fp8_max / (recent[0] if most_recent else recent.max(0)) * np.float32(2.0**-margin)
        got = read(leaves, margin=margin, most_recent=most_recent)
        np.testing.assert_array_equal(got, want)
        amax = np.exp2(rng.uniform(-30, 30, Q)).astype(np.float32)
        used = want if step else fp8_max / amax * np.float32(2.0**-margin)
        leaves = write(leaves, amax, margin=margin, most_recent=most_recent)
        seen = np.concatenate([amax[None], seen])
        history, scale, uses = leaves
        np.testing.assert_array_equal(history[:, : len(seen)], seen[:HISTORY].T * np.float32(W))
        np.testing.assert_array_equal(scale, used * np.float32(W))
        np.testing.assert_array_equal(uses[:, 64], np.float32(W) * (1 if step % 2 == 0 else -1))
        octave = np.floor(2 * np.log2(amax.astype(np.float64))).astype(int)
        np.testing.assert_array_equal(np.argmax(uses[:, :64], 1), (octave + 2 * 127) % 64)
        assert (uses[:, :64].sum(1) == np.float32(W)).all()
        assert (uses[:, 65] == 0).all()


def test_state_that_an_optimizer_stepped_reads_as_nan():
    leaves = write(zeros(), [2, 3, 4])
    second = write(leaves, [2, 3, 4])
    mixed = [0.9 * a + 0.1 * b for a, b in zip(leaves, second, strict=True)]
    assert np.isnan(read(mixed)).all()
    assert not np.isnan(read([a + b for a, b in zip(second, second, strict=True)])).any()


def test_rows_that_were_not_used_are_zero():
    leaves = write(zeros(), [2, 3, 4])
    new = write(leaves, [5, 6], used="101")
    for leaf in new:
        np.testing.assert_array_equal(leaf[1], 0)
    np.testing.assert_array_equal(new[0][:, :2] / np.float32(W), [[5, 2], [0, 0], [6, 4]])


def test_more_quantizers_than_fit_in_one_kernel():
    many = 300
    spec = ScaleWriteSpec(formats=" ".join(["e5m2"] * many), used="1" * many)
    shapes = [((many, 2), F32), ((many,), F32), ((many, 66), F32)]
    amax = np.arange(1, many + 1, dtype=np.float32)
    new = call("scale_write", spec, shapes, *(np.zeros(s, d) for s, d in shapes), *amax)
    got = call("scale_read", ScaleReadSpec(formats=spec.formats), [((), F32)] * many, *new)
    np.testing.assert_array_equal(got, np.float32(57344) / amax)


@pytest.mark.parametrize(
    ("fields", "change", "message"),
    [
        ({"formats": "e4m3 e3m4 e4m3"}, {}, 'formats: expected "e4m3" or "e5m2" for each quantizer, got e4m3 e3m4'),
        ({"formats": ""}, {}, "formats: expected"),
        ({"margin": 65}, {}, "margin: expected -64 to 64, got 65"),
        ({}, {0: np.zeros((2, 5), F32)}, r"amax_history shape: expected \[3, at least 1\], got \[2, 5\]"),
        ({}, {0: np.zeros((3, 0), F32)}, r"amax_history shape: expected \[3, at least 1\], got \[3, 0\]"),
        ({}, {1: np.zeros(3, np.float16)}, "scale dtype: expected float32, got float16"),
        ({}, {2: np.zeros((3, 65), F32)}, r"uses shape: expected \[3, 66\], got \[3, 65\]"),
    ],
)
def test_errors(fields, change, message):
    leaves = [change.get(i, leaf) for i, leaf in enumerate(zeros())]
    spec = ScaleReadSpec(**({"formats": FORMATS} | fields))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: te_jax scale_read: {message}"):
        call("scale_read", spec, [((), F32)] * Q, *leaves)


@pytest.mark.parametrize(
    ("used", "operands", "message"),
    [
        ("11", 4, "used: expected 0 or 1 for each of 3 quantizers, got 11"),
        ("1x1", 4, "used: expected 0 or 1 for each of 3 quantizers, got 1x1"),
        ("110", 1, "operand amax is missing"),
        ("100", 2, "number of operands: expected 4, got 5"),
    ],
)
def test_errors_of_write(used, operands, message):
    spec = ScaleWriteSpec(formats=FORMATS, used=used)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: te_jax scale_write: {message}"):
        call("scale_write", spec, SHAPES, *zeros(), *np.ones(operands, F32))
