"""The reference of recipe keys, from the JSON schema of a recipe: tools/docs_site.py writes it into the site.

    python -m tools.keys_docs

A key has one row: name, default, the first sentence of its docstring, what no value means, and the values it takes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tba.config import Recipe

HEAD = """\
# Recipe keys

Every key of a recipe, with its default and one sentence. `tba config schema` prints all about them, with types and
bounds, for editors. On the command line a key is `--set SECTION.KEY=VALUE`.
"""
SENTENCES = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9`])")
NO_VALUE = re.compile(r"none: |default", re.IGNORECASE)
"""How a sentence begins that says what is done without a value."""

VALUES = {"Schedule", "JsonValue"}
"""Types of values that are no sections."""
MAPS = {"additionalProperties", "patternProperties"}


def page() -> str:
    """Return the reference as a Markdown page."""
    schema = Recipe.model_json_schema()
    models = {name: model for name, model in schema["$defs"].items() if name not in VALUES}
    schedule = schema["$defs"]["Schedule"]["anyOf"][1]
    return "\n".join([HEAD, *_sections(models, schema, ""), *_section("A schedule", schedule, {})])


def _sections(models: dict[str, Any], model: dict[str, Any], path: str) -> Iterator[str]:
    """Yield the lines of all sections below a model."""
    for name, field in model["properties"].items():
        inner = f"{path}{name}" + (".NAME" if MAPS & field.keys() else "")
        title = f"`[[{inner}]]`" if "items" in field else f"`[{inner}]`"
        children = [models[ref] for ref in _references(field) if ref in models]
        shared: dict[str, Any] = {}
        if len(children) > 1:  # kinds of scorers
            first, *others = (child["properties"] for child in children)
            shared = {key: it for key, it in first.items() if all(other.get(key) == it for other in others)}
            yield from _section(title, {"description": "What every kind has.", "properties": shared}, {})
            shared["kind"] = None  # it stands in the title
        for child in children:
            kind = f'`kind = "{child["properties"]["kind"]["const"]}"` in ' if shared else ""
            yield from _section(kind + title, child, shared)
            yield from _sections(models, child, f"{inner}.")


def _references(node: Any) -> Iterator[str]:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node if isinstance(node, list) else ()):
        yield from [value.rpartition("/")[2]] if key == "$ref" else _references(value)


def _section(title: str, model: dict[str, Any], left_out: dict[str, Any]) -> Iterator[str]:
    """Yield the lines about a model's own keys; a key that is a section has lines of its own."""
    rows = [
        f"| `{key}` | {_default(model, key)} | {_about(field)} |"
        for key, field in model["properties"].items()
        if key not in left_out and set(_references(field)) <= VALUES
    ]
    if rows:
        about = SENTENCES.split(" ".join(model["description"].split()))[0]
        yield from (f"## {title}", "", about, "", "| key | default&nbsp;value | meaning |", "|---|---|---|", *rows, "")


def _default(model: dict[str, Any], key: str) -> str:
    default = model["properties"][key].get("default")
    if isinstance(default, dict) and "value" in default:
        default = default["value"]  # of a constant schedule
    given = "none" if default is None else f"`{default:_}`" if type(default) is int else f"`{json.dumps(default)}`"
    return "required" if key in model.get("required", ()) else given


def _about(field: dict[str, Any]) -> str:
    first, *others = SENTENCES.split(" ".join(field.get("description", "").split()))
    said = " ".join([first, *filter(NO_VALUE.match, others)])
    parts = [field, *field.get("anyOf", [])]
    values = [str(value) for part in parts for value in part.get("enum", part.get("examples", []))]
    if not all(value in said for value in values):
        said += f" Values: {', '.join(f'`{value}`' for value in values)}."
    return said.replace("|", "\\|")


if __name__ == "__main__":
    print(page())
