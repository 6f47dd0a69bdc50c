"""Every line of the docs, and of the error messages, that installs something names what is in this repository."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    ROOT / "README.md",
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "tba").rglob("*.py"),
    *(ROOT / "services").rglob("*.py"),
]
LINES = [
    (file.relative_to(ROOT), line)
    for file in FILES
    for line in re.findall(r"pip install ([^`\n#|]*)", file.read_text())
    if "tba" in line or "-e" in line
]


def test_there_are_lines() -> None:
    assert len(LINES) > 12


@pytest.mark.parametrize(("file", "line"), LINES, ids=[f"{file}-{number}" for number, (file, _) in enumerate(LINES)])
def test_an_install_line_works_from_a_clone(file: Path, line: str) -> None:
    assert not re.search(r"(?<![./\w])'?tba(-\w+)?\b", line), f"{file}: no index has a package of this project: {line}"
    for folder, extras in re.findall(r"(\.(?:/services/\w+)?)\[([\w,]+)\]", line):
        known = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(extras.split(",")) <= known.keys(), f"{file}: {line}"
