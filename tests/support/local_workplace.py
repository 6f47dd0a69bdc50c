"""A folder in which a test runs `tba run` as a person would: the real command line, stand-ins for the services."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAKES = ROOT / "tests" / "integration" / "cli" / "local_fakes"
DEADLINE_S = 180.0

RECIPE = """
[run]
name = "demo"
[model]
path = "model"
[data]
path = "prompts.jsonl"
[buffer]
port = 0
[reward]
port = 0
[searcher]
num_searchers = 2
[trainer]
num_steps = 6
sync_interval = 1
[local]
stop_timeout_s = 60
start_timeout_s = 120
"""


def prompt_line(prompt_id: str, split: str) -> str:
    return json.dumps(
        {"prompt_id": prompt_id, "task": "addition", "text": "1+1=", "data": {"answer": "2"}, "split": split}
    )


class Workplace:
    """A folder with a recipe, a model, prompts, and the stand-ins on the path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path / "runs" / "demo"
        self.started: list[subprocess.Popen[str]] = []
        self.environ = os.environ | {"PYTHONPATH": f"{FAKES}:{ROOT}", "OMP_NUM_THREADS": "1"}
        (path / "recipe.toml").write_text(RECIPE)
        (path / "prompts.jsonl").write_text(prompt_line("a", "train") + "\n" + prompt_line("b", "heldout") + "\n")
        (path / "model").mkdir()
        for name in ("config.json", "tokenizer.json"):
            (path / "model" / name).write_text('{"eos_token_id": 1}')

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "tba_cli.main", *words]

    def tba(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words),
            cwd=self.path,
            env=self.environ | environ,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )

    def run(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return self.tba("run", "recipe.toml", *words, **environ)

    def refused(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Call `tba run` in this process, which saves the imports, and assert exit code 2.

        It is for arguments that are refused before a child is started.
        """
        from tba_cli.main import main

        out, err = io.StringIO(), io.StringIO()
        with contextlib.chdir(self.path), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["run", "recipe.toml", *words])
        assert code == 2, err.getvalue() + out.getvalue()
        return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())

    def start(self, *words: str, **environ: str) -> subprocess.Popen[str]:
        started = subprocess.Popen(
            self.command("run", "recipe.toml", *words),
            cwd=self.path,
            env=self.environ | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(started)
        return started

    def children(self) -> list[int]:
        """Return the ids of processes with this run folder in their command line, or as working folder (Redis)."""
        found, name = [], str(self.folder)
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if name in (entry / "cmdline").read_text() or os.readlink(entry / "cwd").startswith(name):
                    found.append(int(entry.name))
        return found

    def commands(self) -> list[str]:
        found = []
        for pid in self.children():
            with contextlib.suppress(OSError):
                found.append(Path(f"/proc/{pid}/cmdline").read_text())
        return found

    def close(self) -> None:
        """Kill the supervisors that a failed test left running; their children end with them."""
        for started in self.started:
            with contextlib.suppress(ProcessLookupError):
                started.kill()
            started.communicate()

    def log(self, child: str) -> str:
        return (self.folder / "logs" / f"{child}.log").read_text()

    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())


def wait_until(what: str, is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.05)
