"""The benchmarks: implementations against the reference at small sizes, limits by hand, timing, reports, traces."""

import json
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax.testing import bench
from te_jax.testing.bench import SINGLE_GPU, Case

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import kernel_trace
import layers
import peers
import report
import single_gpu

LINEAR, MLP = Case("linear", 64, 128, 96), Case("mlp", 64, 64, 96)


# Values


@pytest.mark.parametrize("name", list(peers.implementations()))
@pytest.mark.parametrize("case", [LINEAR, MLP], ids=["linear", "mlp"])
def test_implementations_compute_the_case(case, name):
    """Same parameters, inputs and cotangents give the same results, within what each format explains."""
    impl = peers.implementations()[name]
    arrays = case.arrays()
    program = peers.build(impl, case, arrays, warm_up=2)
    expected = bench.reference_grads(case, arrays)
    errors = peers.check(program, expected)
    assert set(errors) == set(expected) == {"y", "dx"} | {f"d{p}" for p in case.param_shapes()}
    # Quantized where it says so: bfloat16 alone is ten times closer.
    assert (errors["y"] > 0.01) == (impl.dy != "bf16")


def test_wrong_results_are_found():
    arrays = LINEAR.arrays()
    program = peers.build(peers.implementations()["flax"], LINEAR, arrays)
    expected = bench.reference_grads(LINEAR, arrays)
    with pytest.raises(
        AssertionError, match="flax bf16, linear 128->96 bias, dw: expected a relative error of at most"
    ):
        peers.check(program, expected | {"dw": expected["dw"] * 1.05})


def test_reference_gradients_are_derivatives():
    """Against central differences in fp64, along one random direction of each argument."""
    case = Case("mlp", 4, 8, 16)
    arrays = {name: np.asarray(a, np.float64) for name, a in case.arrays().items()}

    def loss(a):
        h = a["x"] / np.sqrt((a["x"] ** 2).mean(-1, keepdims=True) + 1e-6) * a["gamma"]
        gate, up = np.split(h @ a["w1"], 2, axis=-1)
        return ((gate / (1 + np.exp(-gate)) * up) @ a["w2"] * a["dy"]).sum()

    grads = bench.reference_grads(case, case.arrays())
    rng = np.random.default_rng(0)
    for name in ("x", *case.param_shapes()):
        direction, step = rng.normal(size=arrays[name].shape), 1e-5
        moved = [loss(arrays | {name: arrays[name] + sign * step * direction}) for sign in (1, -1)]
        slope = (moved[0] - moved[1]) / (2 * step)
        np.testing.assert_allclose((np.asarray(grads[f"d{name}"]) * direction).sum(), slope, rtol=1e-4)


# Limits


def test_bytes_of_a_linear():
    """By hand: x, w and dy are read once in bfloat16, and each is written in FP8 twice (once without a backward)."""
    t, k, n = LINEAR.tokens, LINEAR.features, LINEAR.width
    assert LINEAR.bytes() == 4 * (t * k + k * n + t * n)
    assert LINEAR.bytes(backward=False) == 3 * (t * k + k * n)
    assert LINEAR.bytes(current=True) == LINEAR.bytes() + 2 * (t * k + k * n + t * n)


def test_bytes_of_an_mlp():
    t, k, n = MLP.tokens, MLP.features, MLP.width
    forward = (2 + 2) * t * k + (2 + 2) * 3 * k * n + (4 + 2) * t * n
    backward = (2 + 2) * t * k + (6 + 4) * t * n + (4 + 2) * t * k
    assert MLP.bytes() == forward + backward


def test_products():
    shapes = {g.name: (g.m, g.n, g.k, g.lhs, g.rhs) for g in MLP.gemms()}
    t, k, n = MLP.tokens, MLP.features, MLP.width
    assert shapes == {
        "fc1 fprop": (t, 2 * n, k, "e4m3", "e4m3"),
        "fc2 fprop": (t, k, n, "e4m3", "e4m3"),
        "fc2 dgrad": (t, n, k, "e5m2", "e4m3"),
        "fc2 wgrad": (n, k, t, "e4m3", "e5m2"),
        "fc1 dgrad": (t, k, 2 * n, "e5m2", "e4m3"),
        "fc1 wgrad": (k, 2 * n, t, "e4m3", "e5m2"),
    }
    assert sum(g.flops for g in MLP.gemms()) == 3 * 2 * t * 3 * k * n
    assert [g.name for g in MLP.gemms(backward=False)] == ["fc1 fprop", "fc2 fprop"]


# Issue 3's column "limit", ms, from rates measured one by one.
PUBLISHED = [0.181, 0.722, 0.630, 1.903, 0.664, 2.679, 2.369, 7.212]


@pytest.mark.parametrize(
    ("case", "ms"), list(zip(SINGLE_GPU, PUBLISHED, strict=True)), ids=lambda v: getattr(v, "name", v)
)
def test_limits_are_near_those_published(case, ms):
    """At one rate for every product (1335 TFLOP/s; single shapes are 1291 to 1435) and 4.2 TB/s."""
    estimate = sum(g.flops for g in case.gemms()) / 1335e9 + case.bytes() / 4.2e9
    assert estimate == pytest.approx(ms, rel=0.06)


def test_limit_row(monkeypatch):
    limit = single_gpu.Limit(LINEAR, gpu=False)
    assert limit.row({}) == {}
    limit.bursts = dict.fromkeys(("gemms fast", "gemms precise", "gemms fast fwd", "copy"), lambda count: None)
    limit.copied = 4_000_000  # in 1 us: 4 TB/s
    times = {"gemms fast": [3e-3], "gemms precise": [4e-3], "gemms fast fwd": [1e-3], "copy": [1e-6]}
    row = limit.row(times)
    assert row["copy_tbs"] == 4
    assert row["limit_ms"] == pytest.approx(3 + LINEAR.bytes() / 4e9, abs=1e-5)
    assert row["limit_precise_ms"] == pytest.approx(4 + LINEAR.bytes() / 4e9, abs=1e-5)
    assert row["limit_current_ms"] == pytest.approx(3 + LINEAR.bytes(current=True) / 4e9, abs=1e-5)


# Timing


def test_every_contestant_is_timed_in_turn():
    calls = []
    bursts = {name: lambda count, name=name: calls.append((name, count)) for name in "abc"}
    times = bench.interleaved(bursts, rounds=3, burst_s=1e-6, pause_s=0)
    assert {name: len(t) for name, t in times.items()} == {"a": 3, "b": 3, "c": 3}
    assert [name for name, _ in calls[6:]] == list("abcbcacab")  # after a warm-up of two bursts each
    assert all(count >= 10 for _, count in calls[6:])


def test_statistics():
    assert bench.median_ms([3e-3, 1e-3, 2e-3]) == 2
    assert bench.spread([1.0, 2.0, 3.0]) == 0.25
    assert bench.geomean([1, 4]) == pytest.approx(2)


# Reports


def row(impl, recipe, case, tokens, ms, limit=1.0, accumulation="fast", **more):
    known = {"case": case, "tokens": tokens, "impl": impl, "recipe": recipe, "accumulation": accumulation}
    known |= {"device": "NVIDIA H200"}
    return known | {"fwd_ms": ms / 3, "fwd_bwd_ms": ms, "gemm_ms": limit / 2, "limit_ms": limit} | more


ROWS = [
    row("te_jax", "delayed", "a", 8192, 1.25),
    row("te_jax", "delayed", "b", 8192, 1.0),
    row("TransformerEngine", "delayed", "a", 8192, 1.5),
    row("TransformerEngine", "delayed", "b", 8192, 0.9),
    row("flax", "bf16", "a", 8192, 3.0, accumulation=""),
    row("flax split", "bf16", "a", 8192, 2.5, accumulation=""),
]


def test_ratios_are_to_the_fastest_of_the_others():
    ours = report.Key("te_jax", "delayed", "fast")
    assert report.ratios(ROWS, ours, [report.Key("flax", "bf16", ""), report.Key("flax split", "bf16", "")]) == {
        ("a", 8192): 2.0
    }
    assert report.limit_shares(ROWS, ours) == {("a", 8192): 0.8, ("b", 8192): 1.0}
    lines = report.summary(ROWS)
    share = next(line for line in lines if "share of the limit at 8192" in line)
    assert "(lowest 0.800, a, 8192)" in share
    assert share.endswith("not met")
    engine = next(line for line in lines if "times TransformerEngine" in line)
    assert f"{math.sqrt(1.2 * 0.9):.3f} (lowest 0.900, b, 8192)" in engine


def test_table_shows_every_figure_and_failure():
    failed = {"case": "b", "tokens": 8192, "impl": "flax", "recipe": "bf16", "accumulation": "", "error": "it broke"}
    failed |= {"device": "NVIDIA H200"}
    text = report.table([*ROWS, failed])
    a, b = (next(line for line in text.splitlines() if line.startswith(f"| {case} |")) for case in "ab")
    assert "0.417 / 1.250" in a
    assert a.endswith("| 0.500 | 1.000 |")
    assert "failed" in b
    assert "flax bf16, b, 8192: it broke" in text


def test_the_newest_row_of_a_case_counts(tmp_path):
    old = row("te_jax", "delayed", "a", 8192, 9.0)
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in (old, *ROWS)))
    assert report.read(file) == ROWS


def test_runs_with_different_flags_stay_apart(tmp_path):
    """In the file, in the table and in comparisons. The order of flags is no difference."""
    mode, other = "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT", "--xla_other=1"
    added = [
        row("te_jax", "delayed", "a", 8192, 1.1, flags=mode),
        row("flax", "bf16", "a", 8192, 2.2, accumulation="", flags=mode),
        row("te_jax", "delayed", "a", 8192, 7.0, flags=f"{mode} {other}"),
        row("te_jax", "delayed", "a", 8192, 8.0, flags=f"{other}  {mode}"),
    ]
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in (*ROWS, *added)))
    rows = report.read(file)
    assert [r["fwd_bwd_ms"] for r in rows] == [r["fwd_bwd_ms"] for r in (*ROWS, *added[:2], added[3])]
    text = report.table(rows)
    header, a = (
        next(x for x in text.splitlines() if x.startswith(start)).split(" | ") for start in ("| case", "| a |")
    )
    cells = dict(zip(header, a, strict=True))
    assert cells["te_jax delayed"].endswith("/ 1.250")
    assert cells["te_jax delayed [concurrent]"].endswith("/ 1.100")
    assert cells["te_jax delayed [concurrent --xla_other=1]"].endswith("/ 8.000")
    assert "- te_jax delayed: times flax bf16: 2.000" in text  # to 2.5, not to the other run's 2.2
    assert "- te_jax delayed [concurrent]: times flax bf16: 2.000 (lowest 2.000, a, 8192), 1 case;" in text


@pytest.mark.parametrize("trial", [{"device": "cpu"}, {"scale": 16}], ids=str)
def test_nothing_is_wanted_of_a_trial(trial):
    lines = report.summary([r | trial for r in ROWS])
    assert lines
    assert len(lines) == len(report.summary(ROWS))
    assert not any("wanted" in line for line in lines)
    assert any("wanted" in line for line in report.summary(ROWS))


def test_plots_need_limits(tmp_path):
    rows = [{k: v for k, v in r.items() if k != "limit_ms"} for r in ROWS]
    with pytest.raises(ValueError, match=r"expected rows with limits, .*, got 6 rows without"):
        report.plot(rows, tmp_path / "plot.png")


def run_single_gpu(monkeypatch, capsys, *args):
    """What it prints where it exits by itself."""
    monkeypatch.setattr(sys, "argv", ["single_gpu.py", *map(str, args)])
    with pytest.raises(SystemExit):
        single_gpu.main()
    return capsys.readouterr()


def test_wrong_arguments_are_named(monkeypatch, capsys, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text('{"kernel": "copy"}\n')
    unlimited = tmp_path / "unlimited.jsonl"
    unlimited.write_text(json.dumps({k: v for k, v in ROWS[0].items() if k != "limit_ms"}) + "\n")
    for args, message in (
        (("--report", tmp_path / "missing"), "--report: "),
        (("--plot", tmp_path / "missing"), "--plot: "),
        (("--report", other), "expected lines of single_gpu.py --out, got KeyError('case')"),
        (("--plot", unlimited), "expected rows with limits"),
        (("--rows", 0, 99), "expected some of these, got [99]"),
        (("--rows", -1), "expected some of these, got [-1]"),
        (("--impls", "flux"), "got ['flux']"),
    ):
        assert message in run_single_gpu(monkeypatch, capsys, *args).err
    assert "  7  rmsnorm+swiglu mlp 4096/14336, 8192 tokens" in run_single_gpu(monkeypatch, capsys, "--rows", 8).err


def test_help_maps_rows_and_implementations(monkeypatch, capsys):
    lines = [line.split(maxsplit=1) for line in run_single_gpu(monkeypatch, capsys, "--help").out.splitlines()]
    assert ["2", "linear 4096->14336 bias, 2048 tokens"] in lines
    assert ["fp8_direct", "Fp8DirectDotGeneralOp delayed"] in lines
    help_lines = [" ".join(line) for line in lines]
    for name, impl in peers.implementations().items():
        assert " ".join(f"{name}  {impl.label}".split()) in [" ".join(x.split()) for x in help_lines]


# Layers


def test_train_steps_start_from_the_same_model():
    """In Flax and in te_jax: the same first loss, to bfloat16's rounding, of the same float32 parameters."""
    size = layers.Size(batch=1, seq=16, features=32, hidden=64, heads=2, kv_heads=1)
    found = {}
    for name in ("te_jax none", "flax bf16"):
        step, state, tokens = layers.train_step(size, 2, name)
        shapes = sorted((p.shape, str(p.dtype)) for p in jax.tree.leaves(state.params))
        found[name] = shapes, float(step(state, tokens)[1])
    ours, flax = found.values()
    assert ours[0] == flax[0]
    assert {dtype for _, dtype in ours[0]} == {"float32"}
    assert ours[1] == pytest.approx(flax[1], rel=2e-3)


# Traces


def test_profile_of_a_trace():
    """Two calls: kernels that overlap count once as busy time, and a gap between kernels is idle."""
    names = ("nvjet_qqtst_128x256", "void te_jax::WriteKernel<1>", "cudnn_generated_fort_native_sdpa", "loop_fusion_3")
    kernels = [kernel_trace.Kernel(names[0], 0, 4e6), kernel_trace.Kernel(names[1], 2e6, 4e6)]
    kernels += [kernel_trace.Kernel(names[2], 8e6, 1e6), kernel_trace.Kernel(names[3], 9e6, 1e6)]
    found = kernel_trace.profile(kernels, 2)
    assert (found.span_ms, found.busy_ms, found.idle_ms, found.launches) == (5, 4, 1, 2)
    assert found.by_class == {
        "GEMM": (2, 0.5), "te_jax passes": (2, 0.5), "attention (cuDNN)": (0.5, 0.5), "XLA": (0.5, 0.5)
    }  # fmt: skip
    assert "| GEMM | 2.0000 | 50.0% | 0.5 |" in kernel_trace.table("title", found)
    with pytest.raises(ValueError, match="expected a trace with device events"):
        kernel_trace.profile([], 1)


def test_burst_calls_as_often_as_asked():
    calls = []
    bench.burst_of(lambda x: calls.append(x) or jnp.zeros(()), 7)(3)
    assert calls == [7] * 3
    jax.effects_barrier()
