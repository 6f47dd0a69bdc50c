"""Write the table of alerts of docs/operations.md from files/rules.yaml: `make chart-docs`.

The table stands between `<!-- alerts -->` and `<!-- end -->`. The runbook links of the rules
are the anchors of its rows.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

RULES = Path(__file__).parents[1] / "tba" / "files" / "rules.yaml"
PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
START, END = "<!-- alerts -->\n", "<!-- end -->\n"
HEAD = "| alert | severity | after | meaning | remedy |\n|---|---|---|---|---|\n"
LABEL = re.compile(r"\{\{ \$labels\.(\w+) \}\}")
VALUE = re.compile(r"\{\{ \$value[^}]*\}\}")


def rows(text: str) -> list[str]:
    """Return one row of Markdown for each alert of a rules file."""
    return [_row(rule) for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def _row(rule: dict[str, Any]) -> str:
    name, notes = rule["alert"], rule["annotations"]
    summary = VALUE.sub("N", LABEL.sub(lambda found: found[1].upper(), notes["summary"]))
    anchor = f'<a id="{name.lower()}"></a>{name}'
    cells = (anchor, rule["labels"]["severity"], rule.get("for", "at once"), f"{summary}. {notes['description']}")
    return "| " + " | ".join((*cells, notes["remedy"])) + " |\n"


def filled(page: str) -> str:
    """Return the page with the table as the rules make it.

    Raises:
        ValueError: the page lacks a marker.
    """
    before, found, rest = page.partition(START)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"{PAGE} has no table between {START.strip()} and {END.strip()}; put the markers back")
    return before + START + HEAD + "".join(rows(RULES.read_text())) + END + after


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
