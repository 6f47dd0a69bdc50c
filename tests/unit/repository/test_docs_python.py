"""docs/python-api.md is the page that signatures and docstrings make, and its examples use what there is."""

from __future__ import annotations

import re
from pathlib import Path

import griffe
import pytest

import tba
from tools import python_docs

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def reference() -> python_docs.Reference:
    return python_docs.Reference()


def test_the_reference_of_python_is_that_of_the_code(reference: python_docs.Reference) -> None:
    assert python_docs.PAGE.read_text() == reference.page(), "run `make python-docs`"


def test_the_reference_has_every_member_of_a_run_and_what_calls_return() -> None:
    text = python_docs.PAGE.read_text()
    found = set(re.findall(r"(?m)^### Run\.(\w+)$", text))
    assert found == {name for name in vars(tba.Run) if not name.startswith("_")}
    for heading in ("## tba.run", "### class Rollouts", "### class RunInfo", "### class TrainedStep"):
        assert f"\n{heading}\n" in text
    assert "| `ChildError` | `TbaError`, `RuntimeError` |" in text
    # own names of types are spelled out
    assert 'order: Literal["best", "worst", "newest", "oldest"] = "oldest"' in text


def test_an_argument_that_no_docstring_describes_is_refused(reference: python_docs.Reference) -> None:
    code = 'def f(a: int, b: int):\n    """Do.\n\n    Args:\n        a: one.\n    """\n'
    module = griffe.visit("m", Path("m.py"), code, docstring_parser="google")
    with pytest.raises(SystemExit, match=r"m\.f has arguments that its docstring leaves out: b"):
        list(reference._function(module["f"], "f"))


@pytest.mark.parametrize("page", ["python.md", "python-api.md"])
def test_the_examples_are_python_and_call_what_there_is(page: str) -> None:
    blocks = re.findall(r"(?s)```python\n(.*?)```", (ROOT / "docs" / page).read_text())
    # a signature is none
    examples = [block for block in blocks if "run" in block and not re.search(r"\) -> |^tba\.Run\(\n", block)]
    assert len(examples) > 2
    for example in examples:
        compile(example, page, "exec")
        assert [name for name in re.findall(r"\b(?:run|live)\.(\w+)", example) if not hasattr(tba.Run, name)] == []
