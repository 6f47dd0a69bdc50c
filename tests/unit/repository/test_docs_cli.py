"""docs/cli.md is the page that the parser makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_reference_of_the_command_line_is_that_of_the_parser() -> None:
    done = subprocess.run([sys.executable, "tools/cli_docs.py", "--check"], cwd=ROOT, env={"PYTHONPATH": "."})
    assert done.returncode == 0, "run `make cli-docs`"


def test_every_command_has_its_part_of_the_page() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    assert page.count("\n## tba ") == page.count("| [`tba ")
    for flag in (
        "`--from-run RUN` | score stored rollouts",
        "`N\\|recipe` | how many",
        "`--json` | print JSON, in bytes",
    ):
        assert flag in page
