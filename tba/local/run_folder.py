"""The folder of one run: every path in it, its lock, and who may begin, go on or start over.

runs/<name>/.tba-run       marks a run folder and is its lock (process id of the supervisor)
            recipe.json    the recipe as it was first resolved; written when the trainer is launched, so its
                           presence means that there is something to resume
            config.json    the same with real ports and addresses: what the services read
            endpoints.json addresses, while the run is going
            metrics.jsonl  every step and evaluation, from the trainer
            logs/ store/ redis/ polls.jsonl timing.json
            history.json summary.json report.html report.png model/     at the end
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tba.errors import ConfigError

MARKER = ".tba-run"


class RunFolder:
    """Paths under one run folder; nothing is created before `acquire`."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.marker_path = self.path / MARKER
        self.recipe_path = self.path / "recipe.json"
        self.config_path = self.path / "config.json"
        self.endpoints_path = self.path / "endpoints.json"
        self.polls_path = self.path / "polls.jsonl"
        self.timing_path = self.path / "timing.json"
        self.history_path = self.path / "history.json"
        self.summary_path = self.path / "summary.json"
        self.report_path = self.path / "report.html"
        self.report_png_path = self.path / "report.png"
        self.model_path = self.path / "model"
        self.logs_path = self.path / "logs"
        self.store_path = self.path / "store"
        self.redis_path = self.path / "redis"

    @property
    def has_begun(self) -> bool:
        """Whether a trainer was ever launched here."""
        return self.recipe_path.exists()

    @property
    def is_finished(self) -> bool:
        """Whether the run reached its end and was written up."""
        return self.summary_path.exists()

    def log_path(self, child: str) -> Path:
        """Where the output of one child goes."""
        return self.logs_path / f"{child}.log"

    @contextmanager
    def acquire(self, *, resume: bool, fresh: bool) -> Iterator[int]:
        """Lock the folder, after checking that what is in it goes with the flags; yields the lock's descriptor.

        Raises:
            ConfigError: the folder is in use, is not a run folder, holds a run (without resume and fresh), or holds
                none (with resume).
        """
        if resume and not self.has_begun:
            raise ConfigError(f"there is no run to resume in {self.path}; leave out --resume to begin it")
        if self.path.exists() and not self.marker_path.exists() and any(self.path.iterdir()):
            raise ConfigError(
                f"{self.path} exists and is not a run folder (no {MARKER} in it), so tba leaves it alone; "
                "move it away, or give another name with --run-name"
            )
        if self.has_begun and not (resume or fresh):
            raise ConfigError(
                f"run folder {self.path} exists already; go on with --resume, delete it and begin again with --fresh, "
                "or give another name with --run-name"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        lock_fd = self._lock()
        try:
            yield lock_fd
        finally:
            os.close(lock_fd)

    def clear(self) -> None:
        """Delete everything but the lock: a run begins, and what an older one left must not get in its way."""
        for entry in self.path.iterdir():
            if entry.name == MARKER:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def make_folders(self) -> None:
        """Create the folders that children write to."""
        for folder in (self.logs_path, self.redis_path):
            folder.mkdir(exist_ok=True)

    def write_json(self, path: Path, document: Any) -> None:
        """Write a JSON file so that a reader sees the old or the new one, never half of it."""
        half = path.with_name(path.name + ".part")
        half.write_text(json.dumps(document, indent=2) + "\n")
        os.replace(half, path)

    def _lock(self) -> int:
        """An exclusive lock that the kernel drops when its last holder (supervisor, guard) is gone."""
        lock_fd = os.open(self.marker_path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock_fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(lock_fd)
            raise ConfigError(
                f"run folder {self.path} is in use by another `tba run` (process {holder}); "
                "wait for its end, stop it, or give another name with --run-name"
            ) from None
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
        return lock_fd
