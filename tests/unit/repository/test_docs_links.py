"""Every link of a Markdown page, and every mention of a page of docs/ elsewhere, leads somewhere.

CHANGELOG.md is left out: its old entries name the pages of their time; and README.head.md, the head of another page.
"""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MENTION = re.compile(r"(?<![\w/.:])docs/(?:[\w-]+/)*[\w.-]+\.(?:md|toml|png|jsonl)(?:#[\w-]+)?")
LEFT_OUT = {"CHANGELOG.md", "README.head.md"}
BUILT = {"cli.md", "keys.md", "python-api.md"}
"""Pages of docs/ that only the site has (tools/docs_site.py); its menu names them."""
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def _files() -> list[Path]:
    """Return the text files of the repository: those that git knows, or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / name for name in listed.stdout.splitlines() if Path(name).name not in LEFT_OUT]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:8192]]


@cache
def _anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page, as GitHub makes them from headings, and the anchors of `<a id>`."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return frozenset(slugs | set(re.findall(r'<a id="([\w-]+)">', text)))


def _leads_somewhere(target: Path, anchor: str) -> bool:
    return target.exists() and (not anchor or target.suffix != ".md" or anchor in _anchors(target))


@pytest.mark.parametrize("page", [path for path in _files() if path.suffix == ".md"], ids=lambda path: path.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    dead = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        name, _, anchor = link.partition("#")
        if ":" not in link and not _leads_somewhere((page.parent / name).resolve() if name else page, anchor):
            dead.append(link)
    assert dead == []


def test_every_mention_of_a_page_leads_somewhere() -> None:
    dead = []
    for path in _files():
        for mention in MENTION.findall(path.read_text(errors="ignore")):
            name, _, anchor = mention.partition("#")
            if path.name == "mkdocs.yml" and Path(name).name in BUILT:
                continue
            if not _leads_somewhere(ROOT / name, anchor):
                dead.append(f"{path.relative_to(ROOT)}: {mention}")
    assert dead == []


def test_the_bugs_of_peers_have_tests() -> None:
    """docs/adr/0058-episodes.md names a test for each; a test that is renamed or dropped shows here."""
    named = set(re.findall(r"\btest_\w+", (ROOT / "docs/adr/0058-episodes.md").read_text()))
    written = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(named) > 20
    assert named <= written
