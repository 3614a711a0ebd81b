"""Damaged checkpoints: an error that names the item, or what was saved; never other bits, and nothing is changed."""

import gc
import hashlib
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import te_jax as te
from te_jax import checkpoint
from te_jax.checkpoint.checksums import _device_sums, _sums, checksums
from te_jax.quant import state
from te_jax.testing.compare import assert_trees_identical

# Orbax leaves reads unawaited when one of several fails.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def unawaited_reads():
    """They are collected, and ignored, with the test that made them."""
    yield
    gc.collect()


RECIPE = te.DelayedScaling(amax_history_len=4)


def training_state():
    rng = np.random.default_rng(0)
    kernel = rng.standard_normal((64, 32))
    fp8 = {name: jnp.asarray(rng.random(leaf.shape), jnp.float32) for name, leaf in state.init(8, RECIPE).items()}
    params = {"kernel": jnp.asarray(kernel, jnp.bfloat16), "frozen": jnp.asarray(kernel, jnp.float8_e4m3fn)}
    return {"params": params, state.COLLECTION: {"m": fp8}}, {"mu": jnp.asarray(kernel, jnp.float32)}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    directory = tmp_path_factory.mktemp("stored")
    variables, opt_state = training_state()
    checkpoint.save(directory, 1, variables, recipe=RECIPE, opt_state=opt_state)
    return directory


@pytest.fixture
def copy(stored, tmp_path):
    shutil.copytree(stored, tmp_path / "run")
    return tmp_path / "run"


def restore(directory, step=1):
    variables, opt_state = training_state()
    zeros = {name: jnp.zeros_like(leaf) for name, leaf in opt_state.items()}
    return checkpoint.restore(directory, variables, recipe=RECIPE, opt_state=zeros, step=step)


def fingerprint(directory):
    return {path: hashlib.sha256(path.read_bytes()).digest() for path in directory.rglob("*") if path.is_file()}


def flip(data, rng):
    where = rng.integers(len(data))
    return data[:where] + bytes([data[where] ^ (1 << rng.integers(8))]) + data[where + 1 :]


DAMAGES = {
    "flipped": flip,
    "truncated": lambda data, rng: data[: len(data) // 2],
    "lost": lambda data, rng: None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_file(copy, damage):
    """Every file in turn: if the restore succeeds, every bit is right."""
    rng = np.random.default_rng(7)
    files = sorted(path for path in (copy / "1").rglob("*") if path.is_file())
    refused = 0
    for path in files:
        good = path.read_bytes()
        bad = DAMAGES[damage](good, rng)
        path.unlink() if bad is None else path.write_bytes(bad)
        before = fingerprint(copy)
        try:
            out = restore(copy)
        except ValueError as error:
            refused += 1
            assert str(error).startswith("te_jax.checkpoint.restore: "), error  # noqa: PT017
            assert str(copy / "1") in str(error), error  # noqa: PT017
        else:
            assert_trees_identical((out.variables, out.opt_state), training_state())
        assert fingerprint(copy) == before
        path.write_bytes(good)
    assert refused >= len(files) // 4  # orbax doesn't need them all
    restore(copy)


@pytest.mark.parametrize("item", ["params", "opt_state"])
def test_bits_of_arrays(copy, item):
    """What storage doesn't notice, the checksums do; both name the item."""
    folder = copy / "1" / item / "ocdbt.process_0" / "d"
    path = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    data, said = path.read_bytes(), []
    for where in np.linspace(0, len(data) - 1, 16).astype(int):
        path.write_bytes(data[:where] + bytes([data[where] ^ 0x10]) + data[where + 1 :])
        try:
            out = restore(copy)
        except ValueError as error:
            said.append(str(error))
        else:  # bytes that mean nothing
            assert_trees_identical((out.variables, out.opt_state), training_state())
    assert len(said) > 8
    assert all(text.startswith(f"te_jax.checkpoint.restore: {item}") for text in said), said
    sums = checkpoint.describe(copy)["checksums"][item]
    by_checksum = [text for text in said if "checksum" in text]
    assert by_checksum
    for text in by_checksum:
        assert any(f"{item}/{name}: expected checksum {digits} (saved in" in text for name, digits in sums.items())


def test_missing_items(copy):
    shutil.rmtree(copy / "1" / "opt_state")
    with pytest.raises(
        ValueError, match=r"step: expected a complete checkpoint at .*/1, got items without metadata: \['opt"
    ):
        restore(copy)
    with pytest.raises(FileNotFoundError, match="expected a complete step, got none in"):
        restore(copy, step=None)


def test_item_that_was_never_stored(copy):
    variables, _ = training_state()
    with pytest.raises(
        ValueError, match=r"extras: expected a stored item, got no such item in .*/1, which has \['fp8_sta"
    ):
        checkpoint.restore(copy, variables, recipe=RECIPE, opt_state=training_state()[1], extras={"position": 0})


def test_array_files_that_are_gone(copy):
    shutil.rmtree(copy / "1" / "params" / "d")
    shutil.rmtree(copy / "1" / "params" / "ocdbt.process_0")
    with pytest.raises(ValueError, match=r"te_jax.checkpoint.restore: params: expected what was saved in .*/1, got"):
        restore(copy)


def test_document_that_was_changed(copy):
    path = copy / "1" / "te_jax" / "metadata"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "recipe": None}))
    with pytest.raises(ValueError, match=r"te_jax/metadata: expected its CRC-32 \d+, got \d+ in it: it is damaged"):
        restore(copy)


# ------------------------------------------------------------------------------------------------- the checksum

DTYPES = [
    "float32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "uint16",
    "int32",
    "bool",
    "int4",
    "float4_e2m1fn",
    "complex64",
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_and_devices_have_the_same_checksum(dtype):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((6, 4)) * 4).astype(dtype)
    np.testing.assert_array_equal(_sums(x), _device_sums(x))


def fmix32(h):
    """The finalizer of MurmurHash3, in Python's integers."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
    h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
    return h ^ (h >> 16)


def test_the_checksum_is_what_is_written_about_it():
    x = np.array([[1.5, -2.0, 0.0], [np.nan, 3.0, -0.0]], np.float32)
    halves = []
    for seed in (0x243F6A88, 0x85A308D3):
        words = enumerate(int(word) for word in x.view(np.uint32).ravel())
        halves.append(sum(fmix32(word ^ (place * 0x9E3779B1 + seed) % 2**32) for place, word in words) % 2**32)
    expected = "".join(f"{half:08x}" for half in halves)
    assert checksums({"x": x}) == checksums({"x": jnp.asarray(x)}) == {"x": expected}


def test_what_a_checksum_tells_apart():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    others = [x[::-1], x[:, ::-1], -x, x.T.reshape(3, 4), x.astype(np.float16), x.astype(np.int32), np.zeros_like(x)]
    changed = [x.copy() for _ in range(12)]
    for i, y in enumerate(changed):
        y.view(np.uint32).ravel()[i] ^= 1
    sums = {checksums([y])["0"] for y in [x, *others, *changed]}
    assert len(sums) == 1 + len(others) + len(changed)
    assert checksums({"a": 1, "b": 1.0, "c": True}) == checksums({"a": np.int64(1), "b": np.float64(1), "c": np.True_})
