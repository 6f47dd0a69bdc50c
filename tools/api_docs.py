"""Write the endpoint tables of docs/api.md from the OpenAPI documents of the services: `make api-docs`.

Each table stands between `<!-- endpoints: SERVICE -->` and `<!-- end -->`. With --check nothing is written, and the
exit code is 1 when the page differs from the code.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tba.config import Recipe

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
COMMON = frozenset({"/livez", "/readyz", "/metrics", "/version"})
HEAD = "| call | roles | body | reply | description |\n|---|---|---|---|---|\n"
RECIPE: dict[str, Any] = {"run": {"name": "docs"}, "model": {"path": "docs"}, "data": {"generator": "addition"}}


def tables() -> dict[str, str]:
    """Return the Markdown table of each part of the page: `every`, `buffer`, `reward`."""
    from tba_buffer.api.app import build_app as build_buffer
    from tba_reward.app import build_app as build_reward

    recipe = Recipe.model_validate(RECIPE)
    documents = {
        "buffer": build_buffer(recipe, None).openapi(),
        "reward": build_reward(recipe, tokens=None).openapi(),
    }
    rows = {name: _rows(document) for name, document in documents.items()}
    found = {"every": [row for path, row in rows["buffer"] if path in COMMON]}
    found |= {name: [row for path, row in rows[name] if path not in COMMON] for name in documents}
    return {name: HEAD + "".join(part) for name, part in found.items()}


def _rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            roles = sorted(role for scheme in operation.get("security", []) for role in scheme["bearer"])
            # FastAPI puts the docstring here; the last paragraph names the roles, which have a column of their own
            text = operation.get("description", "").partition("\n\nRoles:")[0].replace("\n", " ")
            body = _schema(operation.get("requestBody", {}).get("content", {}))
            good = next(value for status, value in operation["responses"].items() if status.startswith("2"))
            reply = _schema(good.get("content", {}))
            cells = (f"`{method.upper()} {path}`", ", ".join(roles) or "anyone", body, reply, text)
            rows.append((path, "| " + " | ".join(cells) + " |\n"))
    return rows


def _schema(content: dict[str, Any]) -> str:
    """Return the name of a JSON body's model, or the type of another body."""
    for kind, value in content.items():
        name = value.get("schema", {}).get("$ref", "").rpartition("/")[2]
        if name:
            return f"`{name}`"
        if kind != "application/json":
            return kind.removeprefix("application/").partition(";")[0]
    return ""


def filled(page: str) -> str:
    """Return the page with its tables as the code makes them.

    Raises:
        ValueError: the page lacks a marker.
    """
    for name, table in tables().items():
        start, end = f"<!-- endpoints: {name} -->\n", "<!-- end -->\n"
        before, found, rest = page.partition(start)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"{PAGE} has no table between {start.strip()} and {end.strip()}; put the markers back")
        page = before + start + table + end + after
    return page


def main() -> int:
    """Write the page, or compare it with the code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    args = parser.parse_args()
    page = PAGE.read_text()
    new = filled(page)
    if args.check:
        return int(new != page)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
