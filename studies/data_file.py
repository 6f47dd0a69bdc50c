"""Data files of benchmarks: JSON lines that survive a crash, and the digest of the code that made a line."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SERVICES = tuple(f"services/{name}/tba_{name}" for name in ("buffer", "reward", "searcher", "trainer"))
PRODUCT = ("tba", "tba_cli", *SERVICES)
"""The code that decides what a run does."""


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the documents of a data file, if there is one; a torn last line does not count."""
    for text in path.read_text().splitlines(keepends=True) if path.is_file() else ():
        if text.endswith("\n"):
            yield json.loads(text)


def append_line(path: Path, document: Mapping[str, Any]) -> None:
    """Add a line with commit and time, in the place of one that a crash cut short; it is on disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({**document, "commit": _commit(), "at": time.strftime("%Y-%m-%d %H:%M")}) + "\n"
    with path.open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # or a line of another process is cut off as torn
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def source_digest(paths: Iterable[str], *texts: str, root: Path = ROOT) -> str:
    """Return the digest of files, folders and texts: results with another one come from other code.

    Args:
        paths: relative to `root`; of a folder every file but what Python and pip make.
        texts: what else decides results, such as a resolved recipe.
    """
    digest = hashlib.sha256()
    for path in sorted(paths):
        below = sorted((root / path).rglob("*")) if (root / path).is_dir() else [root / path]
        for file in below:
            if file.is_file() and file.suffix != ".pyc" and ".egg-info" not in str(file):
                digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:16]


def _commit() -> str:
    """Return the commit that runs, with `+changes` where the tree differs from it."""
    git = ["git", "-C", os.fspath(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    return (head.stdout.strip() or "unknown") + ("+changes" if changed.stdout.strip() else "")
