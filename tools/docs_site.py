"""Lay out the folder that docs/mkdocs.yml builds the documentation's site from: `make docs-site`.

    PYTHONPATH=. python tools/docs_site.py build/docs

Pages keep their places in the repository, so that the same links work in both. Other files that a page links to are
copied too; mkdocs reports links that lead nowhere. Two pages are generated: the command line reference comes from the
parser, and the Python reference from docstrings, which mkdocstrings reads. No package beyond tba's own is needed.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from tools import cli_docs

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md", "charts/tba/README.md", "services/*/README.md"),
    "docs/site.css",
)
PYTHON_REFERENCE = """\
# Python reference

All that `import tba` gives. The guide, with a run from beginning to end, is [python.md](python.md).

::: tba_cli.scripting
    options:
      heading: tba
      toc_label: tba

## Results

What calls return and take besides: immutable pydantic models, which `.model_dump()` makes dicts of. Times in `at_s` are
Unix seconds, all other `_s` are durations in seconds, versions are texts `LINEAGE-STEP`.

::: tba.api

## Errors

::: tba.errors
"""
LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")


def main(folder: Path) -> None:
    """Delete the folder and write it anew."""
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
    (folder / "docs" / "cli.md").write_text(cli_docs.page(), encoding="utf-8")
    (folder / "docs" / "python-api.md").write_text(PYTHON_REFERENCE, encoding="utf-8")
    print(f"{len(seen) + 2} files in {folder}")


def _linked(page: Path) -> list[Path]:
    """Return the files of this repository that a page links to; links with a colon lead elsewhere."""
    names = [name for name in LINK.findall(page.read_text()) if ":" not in name]
    paths = [(page.parent / name).resolve() for name in names]
    return [path for path in paths if path.is_relative_to(ROOT) and path.is_file()]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/docs_site.py FOLDER")
    main(Path(sys.argv[1]))
