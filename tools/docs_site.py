"""Lay out the folder that mkdocs.yml builds the documentation's site from: `make docs-site`.

    python tools/docs_site.py build/docs

Pages keep their places in the repository, so that the same links work here and there. A file that no page is, and that
a page links to, is copied too; mkdocs says which links lead nowhere. Uses the standard library alone.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md", "charts/tba/README.md", "services/*/README.md"),
    "docs/site.css",
)
LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")


def main(folder: Path) -> None:
    """Write the folder again."""
    shutil.rmtree(folder, ignore_errors=True)
    waiting = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        if path.suffix == ".md":
            waiting += _linked(path)
    print(f"{len(seen)} files in {folder}")


def _linked(page: Path) -> list[Path]:
    """Return the files of this repository that a page links to; a link elsewhere has a colon."""
    names = [name for name in LINK.findall(page.read_text()) if ":" not in name]
    paths = [(page.parent / name).resolve() for name in names]
    return [path for path in paths if path.is_relative_to(ROOT) and path.is_file()]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/docs_site.py FOLDER")
    main(Path(sys.argv[1]))
