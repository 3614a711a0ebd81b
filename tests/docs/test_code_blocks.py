"""The Python code in README.md and docs/ runs as it stands, and prints what the README shows."""

import pathlib
import re

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]


def blocks(name):
    """(language, first line, text) of the fenced blocks of a page."""
    text = (ROOT / name).read_text()
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M):
        yield match[1], text.count("\n", 0, match.start(2)), match[2]


def run(name):
    """Runs the Python blocks of a page in order, in one namespace, which it returns; errors show the page's lines."""
    code = [(line, text) for language, line, text in blocks(name) if language == "python"]
    assert code
    namespace = {"__name__": "documentation"}
    for line, text in code:
        exec(compile("\n" * line + text, str(ROOT / name), "exec"), namespace)
    return namespace


def test_readme(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it saves a checkpoint
    run("README.md")
    printed = capsys.readouterr().out.splitlines()[:-1]  # without the line on this machine's library
    (shown,) = [text for language, _, text in blocks("README.md") if not language and text.startswith("Sequential")]
    assert shown.splitlines() == printed


def test_adding_an_op(capsys):
    run("docs/adding_an_op.md")
    assert "snake+quantize" in capsys.readouterr().out


def test_an_op_and_a_rule_from_outside_are_under_60_lines():
    page = [text for language, _, text in blocks("docs/adding_an_op.md") if language == "python"]
    code = [text for text in page if "class Snake" in text]  # the op, in a chain; the rule, in a chain
    assert len(code) == 2
    assert sum(len([line for line in text.splitlines() if line.strip()]) for text in code) < 60
    imported = set(re.findall(r"^(?:from te_jax[\w.]* )?import .*$", "\n".join(code), re.M))
    public = {"import te_jax as te", "from te_jax import ops", "from te_jax import fusion"}
    assert {line for line in imported if "te_jax" in line} == public


def test_collective():
    page = run("docs/collective.md")
    assert page["t"] == 4
    x, w1, w2 = (np.asarray(page[name], np.float64) for name in ("x", "w1", "w2"))
    want = np.asarray(jax.nn.gelu(x @ w1), np.float64) @ w2
    assert np.linalg.norm(np.asarray(page["mlp_y"], np.float64) - want) < 0.06 * np.linalg.norm(want)
    np.testing.assert_allclose(np.asarray(page["y"], np.float64), x @ w1, rtol=0.02, atol=0.02)
    assert np.isfinite(page["nnx_value"])
    kernel = page["nnx_grads"]["mlp"]["fc1"]["kernel"]
    assert kernel.shape == page["grads"]["params"]["mlp"]["fc1"]["kernel"].shape


def test_chains(capsys):
    run("docs/chains.md")
    printed = capsys.readouterr().out
    assert "ops_2/Linear(ops_1) + Bias(ops_1): Bias" not in printed
    assert "ops_2/Linear(ops_1): Linear" in printed
    assert "StartResidual(ops_0_0) + RMSNorm(ops_0_1): d-norm+add" in printed


def test_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="was trained with DelayedScaling.* the model has CurrentScaling") as said:
        run("docs/checkpoints.md")
    assert len(said) == 1


def test_nnx(capsys):
    run("docs/nnx.md")
    assert "dy: current scaling" in capsys.readouterr().out


def test_numerics():
    """The four ways of training give the same FP8 state and parameters."""
    namespace = run("docs/numerics.md")
    want = namespace["by_hand"]
    for name in ("optimized", "overwritten"):
        for a, b in zip(jax.tree.leaves(namespace[name]), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_health(capsys):
    run("docs/health.md")
    assert capsys.readouterr().out == "0 0.0\n"


def test_interop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("docs/interop.md")


def test_offload():
    namespace = run("docs/offload.md")
    assert np.isfinite(namespace["value"])
    assert {leaf.shape[0] for leaf in jax.tree.leaves(namespace["grads"]["params"])} == {3}
