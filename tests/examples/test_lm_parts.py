"""The parts of the language-model example."""

import functools
import os
import pathlib
import signal
import sys

import jax
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

import lm_console
import lm_data
import lm_model
import lm_report

import te_jax as te
from te_jax.testing import hlo


@pytest.fixture
def corpus():
    return lm_data.Corpus(np.arange(5000, dtype=np.uint32).astype(np.uint8), np.arange(300, dtype=np.uint8))


def test_batches_depend_on_seed_and_step_only(corpus):
    first = corpus.batch(3, 7, 4, 16)
    assert first.shape == (4, 17)
    np.testing.assert_array_equal(first, corpus.batch(3, 7, 4, 16))
    assert (first != corpus.batch(3, 8, 4, 16)).any()
    assert (first != corpus.batch(4, 7, 4, 16)).any()
    np.testing.assert_array_equal(np.diff(first, axis=1) % 256, 1)  # consecutive bytes of the corpus


def test_held_out_batches_cover_the_held_out_bytes(corpus):
    batches = corpus.held_out_batches(2, 3, 16)
    assert batches.shape == (2, 3, 17)
    assert batches[0, 0, 0] == corpus.held_out[0]
    assert batches[-1, -1, -1] == corpus.held_out[-1]


def test_split_is_by_file(tmp_path):
    for i in range(60):
        (tmp_path / f"m{i}.py").write_bytes(bytes([i]) * 10)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_bytes(b"\xff" * 10)
    corpus = lm_data.load(str(tmp_path))
    separator = {ord("\n")}
    train, held_out = set(corpus.train.tolist()) - separator, set(corpus.held_out.tolist()) - separator
    assert not train & held_out
    assert len(train | held_out | separator) == 60
    assert 0xFF not in train | held_out


def test_load_needs_files(tmp_path):
    with pytest.raises(ValueError, match=r"load: root: expected a folder with many \.py files"):
        lm_data.load(str(tmp_path))


def test_unigram_entropy():
    uniform = np.tile(np.arange(256, dtype=np.uint8), 100)
    np.testing.assert_allclose(lm_data.Corpus(uniform, uniform).unigram_entropy(), np.log(256))


def test_custom_calls_follows_private_functions():
    text = """
    module @jit_f {
      func.func public @main(%arg0: tensor<2xf32>) -> tensor<2xf32> {
        %0 = stablehlo.custom_call @te_jax_gemm(%arg0) : (tensor<2xf32>) -> tensor<2xf32>
        %1 = stablehlo.custom_call @Sharding(%0) : (tensor<2xf32>) -> tensor<2xf32>
        %2 = func.call @layer(%1) : (tensor<2xf32>) -> tensor<2xf32>
        %3 = call @layer(%2) : (tensor<2xf32>) -> tensor<2xf32>
      }
      func.func private @layer(%arg0: tensor<2xf32>) -> tensor<2xf32> {
        %0 = stablehlo.custom_call @te_jax_gemm(%arg0) : (tensor<2xf32>) -> tensor<2xf32>
        %1 = call @inner(%0) : (tensor<2xf32>) -> tensor<2xf32>
      }
      func.func private @inner(%arg0: tensor<2xf32>) -> tensor<2xf32> {
        %0:2 = stablehlo.custom_call @te_jax_quantize(%arg0) : (tensor<2xf32>) -> (tensor<2xf32>, tensor<f32>)
      }
      func.func private @unused(%arg0: tensor<2xf32>) -> tensor<2xf32> {
        %0 = stablehlo.custom_call @te_jax_norm(%arg0) : (tensor<2xf32>) -> tensor<2xf32>
      }
    }"""
    assert hlo.count_custom_calls(text) == {"te_jax_gemm": 3, "te_jax_quantize": 2}


def test_loss_log_resumes_where_the_checkpoint_is(tmp_path):
    path = tmp_path / "losses.jsonl"
    log = lm_report.LossLog(path, 0)
    log.extend((step, 1.0 / (step + 1)) for step in range(5))
    log.close()
    path.write_text(path.read_text() + '{"step": 5, "lo')  # killed while writing
    assert len(lm_report.read_log(path)) == 5
    log = lm_report.LossLog(path, 3)
    log.extend([(3, 0.5)])
    log.close()
    assert [entry["step"] for entry in lm_report.read_log(path)] == [0, 1, 2, 3]
    assert lm_report.read_log(path)[-1]["loss"] == 0.5


@pytest.fixture
def interruptible():
    """SIGINT as in a terminal; a job in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_first_signal_is_noted_the_second_one_is_not():
    with lm_console.StopOnSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == signal.SIGTERM
    with lm_console.StopOnSignal() as stop:
        assert stop.received is None
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_model_takes_kernels_that_were_quantized_before():
    model = lm_model.LanguageModel(
        vocabulary=64, layers=2, width=64, heads=2, hidden_features=128, recipe=te.DelayedScaling(), remat=True
    )
    tokens = jax.random.randint(jax.random.key(0), (4, 16), 0, 64)
    variables = model.init(jax.random.key(1), tokens)

    def loss(variables, tokens):
        return (model.apply(variables, tokens) ** 2).mean()

    quantized = te.quantize_kernels(model, variables, tokens)
    kernels = quantized[te.state.KERNELS]
    assert set(kernels) == {"layers", "head"}
    assert {leaf.shape[0] for leaf in jax.tree.leaves(kernels["layers"])} == {model.layers}
    gradients = jax.jit(functools.partial(te.accumulate_gradients, loss, num_microbatches=2))
    got, want = gradients(quantized, tokens), gradients(variables, tokens)
    jax.tree.map(np.testing.assert_array_equal, got, want)
