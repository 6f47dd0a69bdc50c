"""tests/promise.txt: the tests that hold the promise. Its ids are those of tests that there are."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[3]
LIST = ROOT / "tests" / "promise.txt"
AT_LEAST, AT_MOST = 50, 70


def ids() -> list[str]:
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def names_in(path: Path) -> set[str]:
    """The test functions of a file, by what stands behind `::` in their ids."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, functions)}


def test_every_id_is_that_of_a_test() -> None:
    for node_id in ids():
        file, _, test = node_id.partition("::")
        assert (ROOT / file).is_file(), f"{node_id}: the file is gone; name where its test is now"
        assert test.startswith("test_"), f"{node_id}: name one test, not a file"
        assert test in names_in(ROOT / file), f"{node_id}: no test there has this name; name where it is now"


def test_the_list_is_short_and_has_each_id_once() -> None:
    assert AT_LEAST <= len(ids()) <= AT_MOST
    assert [node_id for node_id, num in Counter(ids()).items() if num > 1] == []
