"""Choices of GEMM algorithms between processes: files, checkpoints, foreign versions. The CUDA module is a stand-in."""

import json
import threading

import jax.numpy as jnp
import pytest

from te_jax import checkpoint, config
from te_jax.primitives import gemm_algorithms, library

H200 = "NVIDIA H200, 132 multiprocessors"
HEX = "0123456789abcdef" * 8


class Module:
    """What the CUDA module has of algorithms."""

    def __init__(self, version=130100):
        self.version, self.choices, self.timing = version, {}, None

    def cublaslt_version(self):
        return self.version

    def set_gemm_timing(self, enabled):
        self.timing = enabled

    def load_gemm_algorithm(self, device, gemm, **choice):
        return self.add(device, gemm, source="loaded", **choice)

    def add(self, device, gemm, **choice):
        if self.choices.get((device, gemm), {}).get("algorithm") == choice.get("algorithm", HEX):
            return False
        known = {"algorithm": HEX, "source": "timed", "time_us": 9.0, "first_us": 10.0, "candidates": 8, "note": ""}
        self.choices[device, gemm] = known | choice
        return True

    def gemm_algorithms(self):
        return [{"device": device, "gemm": gemm, **choice} for (device, gemm), choice in self.choices.items()]


@pytest.fixture
def process(monkeypatch):
    """process() is what another process has: a module of its own."""

    def start(**kwargs):
        module = Module(**kwargs)
        monkeypatch.setattr(library, "registered_module", lambda platform: {"cuda": module}[platform])
        monkeypatch.setattr(library, "ensure_registered", lambda platform: None)
        return module

    return start


def test_another_process_takes_the_choices(process, tmp_path):
    path = tmp_path / "algorithms.json"
    first = process()
    first.add(H200, "m=16", time_us=7.5)
    first.add(H200, "m=32", source="first", note="no memory")
    gemm_algorithms.save(path)

    process()
    assert gemm_algorithms.load(path) == 1
    (choice,) = gemm_algorithms.report()
    assert (choice.device, choice.gemm, choice.source) == (H200, "m=16", "loaded")
    assert (choice.algorithm, choice.time_us, choice.first_us, choice.candidates) == (HEX, 7.5, 10.0, 8)
    assert gemm_algorithms.load(path) == 0  # it is there already


def test_a_file_keeps_what_others_wrote(process, tmp_path):
    path = tmp_path / "algorithms.json"
    process().add(H200, "m=16", time_us=1.0)
    gemm_algorithms.save(path)
    second = process()
    second.add(H200, "m=32")
    second.add("another GPU", "m=16")
    gemm_algorithms.save(path)
    second.choices[H200, "m=32"]["time_us"] = 3.0
    gemm_algorithms.save(path)
    devices = json.loads(path.read_text())["devices"]
    assert {device: sorted(gemms) for device, gemms in devices.items()} == {
        H200: ["m=16", "m=32"],
        "another GPU": ["m=16"],
    }
    assert (devices[H200]["m=16"]["time_us"], devices[H200]["m=32"]["time_us"]) == (1.0, 3.0)


def test_saving_at_the_same_time_loses_nothing(process, tmp_path, monkeypatch):
    path = tmp_path / "algorithms.json"
    process()
    tables = iter([{"format": 1, "cublaslt": 130100, "devices": {H200: {f"m={16 * i}": {}}}} for i in range(8)])
    lock = threading.Lock()

    def table():
        with lock:
            return next(tables)

    monkeypatch.setattr(gemm_algorithms, "table", table)
    threads = [threading.Thread(target=gemm_algorithms.save, args=(path,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(json.loads(path.read_text())["devices"][H200]) == 8
    assert sorted(p.name for p in tmp_path.iterdir()) == ["algorithms.json", "algorithms.json.lock"]


def test_another_cublaslt_is_not_mixed_in(process, tmp_path):
    path = tmp_path / "algorithms.json"
    process(version=130000).add(H200, "m=16")
    gemm_algorithms.save(path)
    new = process(version=130100)
    with pytest.warns(RuntimeWarning, match="expected those of cuBLASLt 130100, which runs here, got those of 130000"):
        assert gemm_algorithms.load(path) == 0
    assert gemm_algorithms.report() == []
    new.add(H200, "m=32")
    gemm_algorithms.save(path)
    assert list(json.loads(path.read_text())["devices"][H200]) == ["m=32"]


GOOD = {"algorithm": HEX, "time_us": 1.0, "first_us": 2, "candidates": 3}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"format": 1, "cublaslt": 130100}',
        b'{"format": 1, "cublaslt": 130100, "devices": []}',
        b'{"format": 1, "cublaslt": 130100, "devices": {"H200": 3}}',
    ],
)
def test_what_is_not_such_a_file_is_named_and_replaced(process, tmp_path, text):
    path = tmp_path / "algorithms.json"
    path.write_bytes(text)
    process().add(H200, "m=16")
    with pytest.raises(ValueError, match=r"algorithms\.json: expected GEMM algorithms that te_jax saved"):
        gemm_algorithms.load(path)
    gemm_algorithms.save(path)
    assert list(json.loads(path.read_text())["devices"][H200]) == ["m=16"]


@pytest.mark.parametrize(
    "wrong",
    [{"algorithm": "zz"}, {"candidates": -1}, {"candidates": 2.5}, {"candidates": 2**70}, {"time_us": "1"}, None],
    ids=str,
)
def test_of_a_damaged_file_nothing_is_taken(process, tmp_path, wrong):
    path = tmp_path / "algorithms.json"
    gemms = {"m=16": GOOD, "m=32": wrong and GOOD | wrong}
    path.write_text(json.dumps({"format": 1, "cublaslt": 130100, "devices": {H200: gemms}}))
    process()
    with pytest.raises(ValueError, match="m=32"):
        gemm_algorithms.load(path)
    assert gemm_algorithms.report() == []


def test_others_may_read_the_file(process, tmp_path):
    path, other = tmp_path / "algorithms.json", tmp_path / "other"
    other.touch()
    process().add(H200, "m=16")
    gemm_algorithms.save(path)
    assert path.stat().st_mode == other.stat().st_mode


def test_a_foreign_format_is_not_read(process):
    process()
    with pytest.warns(RuntimeWarning, match="expected format 1, got 2"):
        assert gemm_algorithms.load_table({"format": 2, "devices": {}}) == 0


def test_without_cuda_there_is_nothing():
    if library.registered_module("cuda") is not None:
        pytest.skip("this process has the CUDA module")
    assert gemm_algorithms.report() == []
    assert gemm_algorithms.load_table({"format": 2}) == 0
    gemm_algorithms.use("first")
    with pytest.raises(ValueError, match="expected timed or first, got 'best'"):
        gemm_algorithms.use("best")


def test_the_environment_is_followed_at_registration(process, tmp_path, monkeypatch):
    path = tmp_path / "algorithms.json"
    process().add(H200, "m=16")
    gemm_algorithms.save(path)
    at_exit = []
    monkeypatch.setattr(gemm_algorithms.atexit, "register", lambda *call: at_exit.append(call))
    monkeypatch.setattr(library, "has_cuda_backend", lambda: True)
    monkeypatch.setenv("TE_JAX_GEMM_ALGORITHMS", "first")
    monkeypatch.setenv("TE_JAX_GEMM_ALGORITHMS_FILE", str(path))
    module = process()
    gemm_algorithms._start("cuda", module)
    assert module.timing is False
    assert list(module.choices) == [(H200, "m=16")]

    module.add(H200, "m=32")
    ((function, *args),) = at_exit
    function(*args)
    assert sorted(json.loads(path.read_text())["devices"][H200]) == ["m=16", "m=32"]


def test_a_wrong_environment_is_an_error_every_time(process, monkeypatch):
    module = process()
    module.registrations = lambda command_buffers: {}
    module.types = dict
    monkeypatch.setattr(library, "_load", lambda platform: (None, module))
    for name in ("_registered", "_started"):
        monkeypatch.setattr(library, name, set())
    monkeypatch.setenv("TE_JAX_GEMM_ALGORITHMS", "best")
    for _ in range(2):
        with pytest.raises(ValueError, match="TE_JAX_GEMM_ALGORITHMS: expected timed or first, got 'best'"):
            library._register("cuda")
    monkeypatch.setenv("TE_JAX_GEMM_ALGORITHMS", "first")
    library._register("cuda")
    assert module.timing is False


def test_the_environment_is_checked(monkeypatch):
    monkeypatch.delenv("TE_JAX_GEMM_ALGORITHMS", raising=False)
    assert config.gemm_algorithms() in config.GEMM_ALGORITHMS
    monkeypatch.setenv("TE_JAX_GEMM_ALGORITHMS", "Timed")
    assert config.gemm_algorithms() == "timed"
    monkeypatch.setenv("TE_JAX_GEMM_ALGORITHMS", "best")
    with pytest.raises(ValueError, match="TE_JAX_GEMM_ALGORITHMS: expected timed or first, got 'best'"):
        config.gemm_algorithms()


def test_a_checkpoint_brings_them_along(process, tmp_path):
    variables = {"params": {"kernel": jnp.ones((4,))}}
    process().add(H200, "m=16")
    checkpoint.save(tmp_path, 1, variables, recipe=None)
    process()
    checkpoint.restore(tmp_path, variables, recipe=None)
    (choice,) = gemm_algorithms.report()
    assert (choice.gemm, choice.source) == ("m=16", "loaded")


def test_a_checkpoint_of_another_cublaslt_is_restored_without_them(process, tmp_path):
    variables = {"params": {"kernel": jnp.full((4,), 3.0)}}
    process(version=130000).add(H200, "m=16")
    checkpoint.save(tmp_path, 1, variables, recipe=None)
    process()
    with pytest.warns(RuntimeWarning, match="GEMM algorithms are not loaded: expected those of cuBLASLt 130100"):
        restored = checkpoint.restore(tmp_path, variables, recipe=None)
    assert restored.variables["params"]["kernel"].tolist() == [3.0] * 4
    assert gemm_algorithms.report() == []


def test_what_decides_whether_results_repeat_is_in_a_checkpoint(process, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(gemm_algorithms, "_setting", None)
    monkeypatch.setenv("TE_JAX_GEMM_ALGORITHMS_FILE", "algorithms.json")
    flags = "--xla_gpu_autotune_level=0 --xla_dump_to=x --xla_gpu_deterministic_ops"
    monkeypatch.setenv("XLA_FLAGS", flags)
    process()
    setting = {
        "gemm_algorithms": "timed",
        "gemm_algorithms_file": "algorithms.json",
        "xla_flags": {"xla_gpu_autotune_level": "0", "xla_gpu_deterministic_ops": ""},
    }
    assert gemm_algorithms.determinism() == setting
    gemm_algorithms.use("first")
    assert gemm_algorithms.determinism() == {**setting, "gemm_algorithms": "first"}

    variables = {"params": {"kernel": jnp.ones((4,))}}
    checkpoint.save(tmp_path, 1, variables, recipe=None)
    assert checkpoint.describe(tmp_path)["determinism"] == gemm_algorithms.determinism()
    assert "this process has" not in caplog.text
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    checkpoint.restore(tmp_path, variables, recipe=None)
    assert "this process has" not in caplog.text
    monkeypatch.setenv("XLA_FLAGS", "")
    checkpoint.restore(tmp_path, variables, recipe=None)
    assert f"was saved with {setting | {'gemm_algorithms': 'first'}}, this process has" in caplog.text
