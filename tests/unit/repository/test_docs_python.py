"""The examples of docs/python.md use what there is."""

from __future__ import annotations

import re
from pathlib import Path

import tba

ROOT = Path(__file__).parents[3]


def test_the_examples_are_python_and_call_what_there_is() -> None:
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    examples = [block for block in re.findall(r"(?s)```python\n(.*?)```", text) if "run" in block]
    assert len(examples) > 2
    for example in examples:
        compile(example, "python.md", "exec")
        assert [name for name in re.findall(r"\b(?:run|live)\.(\w+)", example) if not hasattr(tba.Run, name)] == []
