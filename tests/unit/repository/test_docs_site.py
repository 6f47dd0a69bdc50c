"""The documentation's site: it has every page that it names, and what pages link to. mkdocs itself checks the links."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_site_has_the_pages_that_it_names_and_what_they_link_to(tmp_path: Path) -> None:
    out = tmp_path / "docs"
    (out / "of-another-time").mkdir(parents=True)
    words = [sys.executable, "tools/docs_site.py", out]
    done = subprocess.run(words, cwd=ROOT, env={"PYTHONPATH": "."}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert f"{len(found)} files in" in done.stdout
    nav = (ROOT / "docs" / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = set(re.findall(r"[\w./-]+\.md", nav))
    assert len(named) > 10
    assert named <= found
    # all that users read is named; decisions and tables are reached by links
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= named
    assert "docs/adr/0019-rooms.md" in found
    assert "examples/minimal.py" in found
    assert not (out / "of-another-time").exists()
