"""The Python code in README.md and docs/ runs as it stands, and prints what the README shows."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]


def run(name):
    """Runs the Python blocks of a page in order, in one namespace; errors show the page's lines."""
    text = (ROOT / name).read_text()
    blocks = list(re.finditer(r"```python\n(.*?)```", text, re.S))
    assert blocks
    namespace = {"__name__": "documentation"}
    for match in blocks:
        line = text.count("\n", 0, match.start(1))
        exec(compile("\n" * line + match[1], str(ROOT / name), "exec"), namespace)
    return text


def test_readme(capsys):
    text = run("README.md")
    printed = capsys.readouterr().out.splitlines()[:-1]  # without the line on this machine's library
    shown = next(block for block in re.findall(r"```\n(.*?)```", text, re.S) if block.startswith("Sequential"))
    assert shown.splitlines() == printed


def test_adding_an_op(capsys):
    run("docs/adding_an_op.md")
    assert "snake+quantize" in capsys.readouterr().out
