"""Lay out the folder that docs/mkdocs.yml builds the documentation's site from: `make docs-site`.

    PYTHONPATH=. python tools/docs_site.py build/docs
    PYTHONPATH=. python tools/docs_site.py --search build/site

Pages keep their places in the repository, so that the same links work in both. Other files that a page links to are
copied too; mkdocs reports links that lead nowhere. Three pages are generated: the references of the command line (from
the parser), of recipe keys (from their models) and of Python (from docstrings, which mkdocstrings reads). pydantic is
the only package that it needs. With --search it repairs and checks the index of the search in a site that is built.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

from tools import cli_docs, keys_docs

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
BACKGROUND = "---\nsearch: {boost: 0.00005}\n---\n\n"
"""Stands before pages of folders in docs/ (decisions, tables of studies): the search shows all others above them. A
word in a title counts 1,000 times there."""
SOUGHT = ("w&b", "wandb", "weights", "biases", "resume", "gpus", "scorer", "judge", "lora", "early", "compare")
"""Words that the search has to find in titles of docs/how-do-i.md; a word in a title is shown first."""


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
        if path.suffix == ".md" and path.parent.parent == ROOT / "docs":
            target.write_text(BACKGROUND + path.read_text(encoding="utf-8"), encoding="utf-8")
    made = {"cli": cli_docs.page(), "keys": keys_docs.page(), "python-api": PYTHON_REFERENCE}
    for name, text in made.items():
        (folder / "docs" / f"{name}.md").write_text(text, encoding="utf-8")
    print(f"{len(seen) + len(made)} files in {folder}")


def repair_search(site: Path) -> None:
    """Write & into the index of the search as people type it; end if titles of "How do I" lack a word of `SOUGHT`."""
    path = site / "search" / "search_index.json"
    text = path.read_text(encoding="utf-8").replace("&amp;", "&")
    path.write_text(text, encoding="utf-8")
    index = json.loads(text)
    titles = " ".join(doc["title"] for doc in index["docs"] if doc["location"].startswith("docs/how-do-i/"))
    if missing := set(SOUGHT) - set(re.split(index["config"]["separator"], titles.lower())):
        sys.exit(f"error: the search finds {', '.join(sorted(missing))} in no title of docs/how-do-i.md")


def _linked(page: Path) -> list[Path]:
    """Return the files of this repository that a page links to; links with a colon lead elsewhere."""
    names = [name for name in LINK.findall(page.read_text()) if ":" not in name]
    paths = [(page.parent / name).resolve() for name in names]
    return [path for path in paths if path.is_relative_to(ROOT) and path.is_file()]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--search", site]:
            repair_search(Path(site))
        case [folder]:
            main(Path(folder))
        case _:
            sys.exit("usage: python tools/docs_site.py FOLDER, or --search SITE")
