"""The Python code in README.md and docs/ runs as it stands, and prints what the README shows."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]


def blocks(name):
    """(language, first line, text) of the fenced blocks of a page."""
    text = (ROOT / name).read_text()
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M):
        yield match[1], text.count("\n", 0, match.start(2)), match[2]


def run(name):
    """Runs the Python blocks of a page in order, in one namespace; errors show the page's lines."""
    code = [(line, text) for language, line, text in blocks(name) if language == "python"]
    assert code
    namespace = {"__name__": "documentation"}
    for line, text in code:
        exec(compile("\n" * line + text, str(ROOT / name), "exec"), namespace)


def test_readme(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it saves a checkpoint
    run("README.md")
    printed = capsys.readouterr().out.splitlines()[:-1]  # without the line on this machine's library
    (shown,) = [text for language, _, text in blocks("README.md") if not language and text.startswith("Sequential")]
    assert shown.splitlines() == printed


def test_adding_an_op(capsys):
    run("docs/adding_an_op.md")
    assert "snake+quantize" in capsys.readouterr().out
