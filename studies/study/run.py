"""Runs cells until the plan is done or the time is up, in as many processes as wanted, which share one data file."""

from __future__ import annotations

import fcntl
import hashlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from studies.data_file import append_line
from studies.study.cells import Cell, Line
from studies.study.data import read_cells, sources_digest
from studies.study.plan import Study

WAIT_FOR_OTHERS_S = 2 * 3600.0
"""A worker without a cell waits this long for the cells of others, which decide what comes next."""
POLL_S = 2.0


def run_workers(arguments: list[str], num_workers: int) -> None:
    """Run `arguments` once per worker, and wait for all.

    Raises:
        SystemExit: one failed.
    """
    # so that `finally` ends the workers when this process is asked to end
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    workers = [subprocess.Popen([sys.executable, *arguments]) for _ in range(num_workers)]
    try:
        codes = [worker.wait() for worker in workers]
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.terminate()
                worker.wait()
    if any(codes):
        raise SystemExit(f"workers ended with the exit codes {codes}; what they finished is in the data file")


def run_cells(path: Path, *, models: Path, only: str = "", max_minutes: float | None = None) -> None:
    """Run cells whose key contains `only` and append a line for each.

    Raises:
        SystemExit: other workers did not finish cells that the plan waits for.
    """
    began_s, digest, waiting_since_s = time.monotonic(), sources_digest(), None
    claims = models / ".claims"
    claims.mkdir(parents=True, exist_ok=True)
    while max_minutes is None or time.monotonic() - began_s < 60 * max_minutes:
        lines = read_cells(path, digest)
        todo = [cell for cell in Study(lines).plan() if only in cell.key]
        if not todo:
            return
        claimed = next(((cell, lock) for cell in todo if (lock := _claim(claims, cell, path, digest))), None)
        if claimed is None:
            waiting_since_s = waiting_since_s or time.monotonic()
            if time.monotonic() - waiting_since_s > WAIT_FOR_OTHERS_S:
                raise SystemExit(f"the cells of other workers have not come for {WAIT_FOR_OTHERS_S:.0f} s")
            time.sleep(POLL_S)
            continue
        waiting_since_s = None
        cell, lock = claimed
        with lock:
            result = run_cell(cell, models)
            append_line(path, {"key": cell.key, "digest": digest, "cell": cell.document(), "result": result})
        print(f"{len(lines) + 1:4d} {cell.key}: {_shown(cell, result)}, {result['cpu_s']} CPU s", flush=True)


def run_cell(cell: Cell, models: Path) -> dict[str, Any]:
    """The result of one cell."""
    from studies.study.training import train
    from studies.study.world import starting_model

    return train(cell, starting_model(models, cell.world.task, cell.seed))


def _claim(folder: Path, cell: Cell, path: Path, digest: str) -> IO[str] | None:
    """Take a cell for this process; None: another one has it, or has finished it since the plan was made.

    The claim is a file lock, so it ends with the process that holds it, however that ends.
    """
    lock = (folder / hashlib.sha256(cell.key.encode()).hexdigest()[:24]).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    if cell.key in read_cells(path, digest):
        lock.close()
        return None
    return lock


def _shown(cell: Cell, result: Mapping[str, Any]) -> str:
    line = Line(cell=cell, result=result)
    return f"area {line.area:.3f}, final {line.final:.3f}, clipped {line.clip_share:.0%}"
