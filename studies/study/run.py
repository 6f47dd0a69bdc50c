"""Runs cells until the plan is done or the time is up, in as many processes as wanted."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from studies.data_file import append_line
from studies.study.cells import Cell, Line
from studies.study.data import read_cells, sources_digest
from studies.study.plan import Study


def run_cells(
    path: Path, *, models: Path, only: str = "", max_minutes: float | None = None, num_workers: int = 1
) -> None:
    """Run cells whose key contains `only` and append a line for each; finished ones decide what comes next."""
    began_s, digest, running = time.monotonic(), sources_digest(), dict[Future[dict[str, Any]], Cell]()
    with ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("fork")) as pool:
        while True:
            lines = read_cells(path, digest)
            if max_minutes is None or time.monotonic() - began_s < 60 * max_minutes:
                todo = [cell for cell in Study(lines).plan() if only in cell.key and cell not in running.values()]
                for cell in todo[: num_workers - len(running)]:
                    running[pool.submit(run_cell, cell, models)] = cell
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                cell, result = running.pop(done), done.result()
                append_line(path, {"key": cell.key, "digest": digest, "cell": cell.document(), "result": result})
                line = Line(cell=cell, result=result)
                shown = f"area {line.area:.3f}, final {line.final:.3f}, clipped {line.clip_share:.0%}"
                print(f"{len(lines) + 1:4d} {cell.key}: {shown}, {result['cpu_s']} CPU s", flush=True)


def run_cell(cell: Cell, models: Path) -> dict[str, Any]:
    """The result of one cell, on one thread."""
    import torch

    from studies.study.training import train
    from studies.study.world import starting_model

    torch.set_num_threads(1)
    return train(cell, starting_model(models, cell.world.task, cell.seed))
