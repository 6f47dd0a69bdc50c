"""Write the tables of docs/api.md and docs/security.md that repeat the code: `make api-docs`.

Endpoints come from the OpenAPI documents of the services, and problems from the classes of `tba.errors`. Limits are the
constants of `LIMITED`; secrets are what the tests of Compose and the chart expect. Each table stands between
`<!-- NAME -->` and `<!-- end -->`. With --check nothing is written, and the exit code is 1 when a page differs from the
code.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import tba.errors
from tba.config import Recipe
from tba.errors import TbaError
from tests.support.secrets_seen import SEEN

DOCS = Path(__file__).parents[1] / "docs"
COMMON = frozenset({"/livez", "/readyz", "/metrics", "/version"})
LIMITED = ("tba.server.serve", "tba.server.app", "tba.server.auth", "tba.tokens")
RECIPE: dict[str, Any] = {"run": {"name": "docs"}, "model": {"path": "docs"}, "data": {"generator": "addition"}}


def pages() -> dict[str, dict[str, str]]:
    """Return the tables of each page: page name -> table name -> Markdown."""
    seen = [
        (name, ", ".join(sorted(it.sends)) or "none", "yes" if it.checks else "no", it.store, it.other)
        for name, it in SEEN.items()
    ]
    keys = "knows the digests of all tokens | keys of the object store"
    return {
        "api.md": {"problems": _table("slug | status | meaning", _problems()), **_endpoints()},
        "security.md": {
            "secrets": _table(f"pod or service | can send the token of | {keys} | other", seen),
            "limits": _table("constant | value | meaning", (row for name in LIMITED for row in _limits(name))),
        },
    }


def _table(head: str, rows: Iterable[tuple[str, ...]]) -> str:
    body = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return f"| {head} |\n|{'---|' * (head.count(' | ') + 1)}\n{body}"


def _problems() -> list[tuple[str, str, str]]:
    """Return (slug, status, meaning) of the errors that a service may answer with: status below 500, or 503."""
    kinds = [kind for kind in vars(tba.errors).values() if isinstance(kind, type) and issubclass(kind, TbaError)]
    kinds = sorted((kind for kind in kinds if kind.status < 500 or kind.status == 503), key=lambda kind: kind.status)
    return [(f"`{kind.slug}`", str(kind.status), " ".join((kind.__doc__ or "").split())) for kind in kinds]


def _limits(module_name: str) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, meaning) of the numeric constants of a module that have a docstring."""
    module = importlib.import_module(module_name)
    body = ast.parse(inspect.getsource(module)).body
    for assigned, doc in pairwise(body):
        match assigned, doc:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=str(text))):
                if isinstance(value := getattr(module, name), int | float):
                    yield f"`{name}`", f"{value:,}".removesuffix(".0"), " ".join(text.split())


def _endpoints() -> dict[str, str]:
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
    head = "call | roles | body | reply | description"
    return {f"endpoints: {name}": _table(head, part) for name, part in found.items()}


def _rows(document: dict[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    rows = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            roles = sorted(role for scheme in operation.get("security", []) for role in scheme["bearer"])
            # FastAPI puts the docstring here; the last paragraph names the roles, which have a column of their own
            text = operation.get("description", "").partition("\n\nRoles:")[0].replace("\n", " ")
            body = _schema(operation.get("requestBody", {}).get("content", {}))
            good = next(value for status, value in operation["responses"].items() if status.startswith("2"))
            reply = _schema(good.get("content", {}))
            rows.append((path, (f"`{method.upper()} {path}`", ", ".join(roles) or "anyone", body, reply, text)))
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


def filled(page: str, tables: dict[str, str]) -> str:
    """Return the page with its tables as the code makes them.

    Raises:
        ValueError: the page lacks a marker.
    """
    for name, table in tables.items():
        start, end = f"<!-- {name} -->\n", "<!-- end -->\n"
        before, found, rest = page.partition(start)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"no table between {start.strip()} and {end.strip()}; put the markers back")
        page = before + start + table + end + after
    return page


def main() -> int:
    """Write the pages, or with --check compare them with the code; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    args = parser.parse_args()
    is_current = True
    for name, tables in pages().items():
        page = (DOCS / name).read_text()
        new = filled(page, tables)
        is_current &= new == page
        if not args.check:
            (DOCS / name).write_text(new)
    return int(args.check and not is_current)


if __name__ == "__main__":
    sys.exit(main())
