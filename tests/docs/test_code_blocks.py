"""The Python code in README.md and docs/ runs as it stands."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["README.md", "docs/adding_an_op.md"])
def test_code_blocks(name):
    """The blocks of a page run in order, in one namespace."""
    text = (ROOT / name).read_text()
    blocks = [(text.count("\n", 0, match.start(1)), match[1]) for match in re.finditer(r"```python\n(.*?)```", text, re.S)]
    assert blocks
    namespace = {"__name__": "documentation"}
    for line, block in blocks:
        exec(compile("\n" * line + block, str(ROOT / name), "exec"), namespace)  # so that errors show the page's lines


def test_readme_shows_the_plan_that_is_printed(capsys):
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.S)
    exec(compile(block, "README.md", "exec"), {"__name__": "documentation"})
    printed = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("on ")]
    shown = next(b for b in re.findall(r"```\n(.*?)```", text, re.S) if b.startswith("Sequential")).splitlines()
    assert shown == printed
