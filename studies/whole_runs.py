"""Whole runs: programs of tba in processes of their own, and what they leave in their folder."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tba.api import RunCommand
from tba.clients import BufferClient
from tba.errors import ConfigError, ServiceError
from tba_cli.run_target import open_client

ROOT = Path(__file__).resolve().parents[1]
START_S, POLL_S = 300.0, 0.2
Begin = Callable[[subprocess.Popen[bytes]], None]


def run_module(
    words: Sequence[str], *, folder: Path, log: Path, environ: Mapping[str, str], begin: Begin | None = None
) -> tuple[int, float]:
    """Run `python -m WORDS` in a folder to its end, which comes with that of this process.

    Args:
        log: its output is added to it.
        environ: all variables, but for the place of the clone, whose worlds and studies nothing installs.
        begin: what to do as soon as it has been started.

    Returns:
        The exit code, and CPU seconds of it and its children.
    """
    variables = {**environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), environ.get("PYTHONPATH"))))}
    before_s = _children_cpu_s()
    with log.open("a") as file:
        process = subprocess.Popen([sys.executable, "-m", *words], cwd=folder, env=variables, stdout=file, stderr=file)
        try:
            if begin is not None:
                begin(process)
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    return code, _children_cpu_s() - before_s


def let_go(folder: Path, process: subprocess.Popen[bytes], num_searchers: int) -> float:
    """Hold the run until all searchers have their engines: their starts take the cores, and none of it is of interest.

    Returns:
        When it was let go.
    """
    deadline_s, client = time.monotonic() + START_S, None
    while time.monotonic() < deadline_s and process.poll() is None:
        time.sleep(POLL_S)
        try:
            client = client or _client(folder)
            info = client.run()
            ready = [item for item in info.components if item.kind == "searcher" and item.state == "running"]
            if len(ready) >= num_searchers and info.state == "paused":
                client.command("resume", RunCommand(reason="all searchers are ready"))
                client.close()
                return time.time()
            # `tba run` resumes a paused run once, while it starts
            if info.state == "running":
                client.command("pause", RunCommand(reason="held until all searchers are ready"))
        except (ConfigError, ServiceError, OSError):
            continue
    raise SystemExit(f"wait for {num_searchers} searchers: they were not ready within {START_S:g} s")


def records_of(folder: Path) -> list[dict[str, Any]]:
    """Return all records that the trainer of a run has written."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _client(folder: Path) -> BufferClient:
    return open_client(argparse.Namespace(url=None, run=None, run_dir=str(folder), token_file=None, ca_file=None))


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
