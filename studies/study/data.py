"""The data file of the study: which code made a line, and which lines count.

Every line has the digest of the code that decides results. Lines of other code are no results of this code: they are
neither counted as done nor mixed into a table, unless the file beside it says that cells of it came out the same.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections import Counter
from pathlib import Path

from studies.data_file import ROOT, read_lines
from studies.study.cells import Cell, Line
from studies.study.world import TASKS
from tba.config import TrainerSection

DECIDES = (
    "services/trainer/tba_trainer/learner",
    "services/trainer/tba_trainer/model",
    "services/trainer/tba_trainer/objectives",
    "tba/config/objective.py",
    "tba/config/schedules.py",
    "tba_cli/generators",
    "tba_cli/starter_models",
    "examples/worlds/chain",
    "examples/worlds/starter.py",
    *(f"studies/study/{name}.py" for name in ("methods", "training", "world")),
)
"""The code that decides the result of a cell, as files and folders."""
DEFAULTS = ("max_grad_norm", "adam_beta1", "adam_beta2", "weight_decay", "guards")
"""Keys of [trainer] whose defaults do."""


@functools.cache
def sources_digest() -> str:
    """Digest of that code without its comments, docstrings and layout, which decide nothing."""
    digest = hashlib.sha256()
    for path in (ROOT / name for name in DECIDES):
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(meaning(file.read_text()).encode())
    # what runs take from defaults and recipes, and no more of those: other keys may change
    defaults = TrainerSection()
    taken = [getattr(defaults, name) for name in DEFAULTS] + [task.start for task in TASKS.values()]
    digest.update(repr(taken).encode())
    return digest.hexdigest()[:16]


def meaning(source: str) -> str:
    """The syntax tree of a module, without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [each for each in node.body if not _is_text(each)]
    return ast.dump(tree)


def read_cells(path: Path, digest: str | None = None) -> dict[str, Line]:
    """Finished cells by key.

    Args:
        digest: only lines of this code and of the code that it took over; None: all lines.
    """
    wanted = None if digest is None else same_results(path, digest)
    lines = {}
    for document in read_lines(path):
        if wanted is None or document["digest"] in wanted:
            line = Line(cell=Cell.of(document["cell"]), result=document["result"])
            lines[line.cell.key] = line
    return lines


def same_results(path: Path, digest: str) -> set[str]:
    """Return the digests whose lines are results of the code `digest`: its own, and those that were taken over."""
    adoptions = [(each["old"], each["new"]) for each in read_lines(path.with_name(f"{path.stem}.adopted.jsonl"))]
    found, size = {digest}, 0
    while size < len(found):
        size = len(found)
        found |= {old for old, new in adoptions if new in found}
    return found


def digests(path: Path) -> dict[str, int]:
    """How many lines are of which code, in the order of the file."""
    return dict(Counter(document["digest"] for document in read_lines(path)))


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
