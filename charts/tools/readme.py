"""Write charts/tba/README.md from README.head.md and values.yaml: `make chart-docs`.

A comment that begins with `# --` describes the key below it and continues in the comment lines that follow. Keys below
a described one are its default. A test compares the file with the output, and finds keys without a description.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
CHART = HERE.parent / "tba"
INDENT = 2
KEY = re.compile(r"( *)([A-Za-z][A-Za-z0-9]*):(?: |$)")
COMMENT = re.compile(r" *# ?(.*)")


@dataclass(frozen=True, slots=True)
class Value:
    """A described key of values.yaml."""

    path: tuple[str, ...]
    text: str
    default: Any


def described(values: str) -> Iterator[Value]:
    """Yield every described key of a values.yaml, in order.

    Raises:
        ValueError: a description has no key below it.
    """
    tree = yaml.safe_load(values)
    path: list[str] = []
    text: list[str] | None = None
    for number, line in enumerate(values.splitlines(), start=1):
        if comment := COMMENT.fullmatch(line):
            if comment[1].startswith("-- "):
                text = [comment[1].removeprefix("-- ")]
            elif text is not None:
                text.append(comment[1])
            continue
        if key := KEY.match(line):
            del path[len(key[1]) // INDENT :]
            path.append(key[2])
            if text is not None:
                yield Value(tuple(path), " ".join(part.strip() for part in text).strip(), at(tree, path))
            text = None
        elif text is not None:
            raise ValueError(f"values.yaml line {number}: the description above it has no key below; found {line!r}")


def undescribed(values: str) -> list[str]:
    """Return the dotted keys that have no description, neither of their own nor above or below them."""
    known = {value.path for value in described(values)}

    def missing(node: Any, path: tuple[str, ...]) -> Iterator[str]:
        if path in known:
            return
        if isinstance(node, dict) and node:
            for key, child in node.items():
                yield from missing(child, (*path, key))
        else:
            yield ".".join(path)

    return list(missing(yaml.safe_load(values), ()))


def at(tree: Any, path: list[str] | tuple[str, ...]) -> Any:
    """Return the value at a path of a parsed document."""
    for key in path:
        tree = tree[key]
    return tree


def text() -> str:
    """Return the content of the file."""
    head = (HERE / "README.head.md").read_text()
    rows = ["| value | default | meaning |", "|---|---|---|"]
    for value in described((CHART / "values.yaml").read_text()):
        default = json.dumps(value.default, ensure_ascii=False)
        meaning = value.text.replace("|", "\\|")
        rows.append(f"| `{'.'.join(value.path)}` | `{default}` | {meaning} |")
    return head + "\n" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    (CHART / "README.md").write_text(text())
