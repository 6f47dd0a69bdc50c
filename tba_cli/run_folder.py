"""The folder of one run: every path in it, its lock, and the rules for begin, resume and start over.

runs/<name>/.tba-run       marks a run folder and is its lock (process id of the supervisor)
            recipe.json    the recipe as it was first resolved; written when the trainer is launched, so its
                           presence means that there is something to resume
            recipe_file.json    the content of the recipe file then: a resume compares it (local/resume.py)
            config.json    the same with real ports and addresses, for the services
            endpoints.json addresses, while the run is in progress
            ended.json     when and why the last start ended; a start that was killed leaves none
            metrics.jsonl  every step and evaluation, from the trainer
            secrets/       the password of Redis and a tokens file for each child, new at every start;
                           tokens/all.json has every token, for the commands of the owner of the run
            logs/ store/ redis/ timing.json
            history.json summary.json model/     at the end

Only its owner may read it (0700): it holds prompts, completions, weights and tokens.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tba.errors import ConfigError
from tba.store.file import explain_no_locks
from tba.temporary_folders import temporary_folder
from tba.tokens import new_tokens_files

MARKER = ".tba-run"
MAX_DOCUMENT_BYTES = 2**30
MAX_LOG_LINES, MAX_LOG_CHARS = 5, 2000
"""Most lines and characters of the end of a log in an error."""


class RunFolder:
    """Paths under one run folder; nothing is created before `acquire`."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.marker_path = self.path / MARKER
        self.recipe_path = self.path / "recipe.json"
        self.recipe_file_path = self.path / "recipe_file.json"
        self.config_path = self.path / "config.json"
        self.endpoints_path = self.path / "endpoints.json"
        self.ended_path = self.path / "ended.json"
        self.timing_path = self.path / "timing.json"
        self.history_path = self.path / "history.json"
        self.summary_path = self.path / "summary.json"
        self.model_path = self.path / "model"
        self.logs_path = self.path / "logs"
        self.store_path = self.path / "store"
        self.redis_path = self.path / "redis"
        self.secrets_path = self.path / "secrets"
        self.redis_password_path = self.secrets_path / "redis_password"
        self.redis_conf_path = self.secrets_path / "redis.conf"
        self.redis_socket_path = self.secrets_path / "redis.sock"

    @property
    def has_begun(self) -> bool:
        """Whether a trainer was ever launched here."""
        return self.recipe_path.exists()

    @property
    def is_in_use(self) -> bool:
        """Whether a supervisor, or a child that one left behind, holds the lock."""
        try:
            lock_fd = os.open(self.marker_path, os.O_RDONLY)
        except OSError:
            return False
        try:
            # a shared lock fails only while a supervisor or its reaper holds the exclusive one
            fcntl.flock(lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks, where no run can be started
            return False
        finally:
            os.close(lock_fd)
        return False

    @property
    def locked_at_ns(self) -> int:
        """Unix time in nanoseconds when a start last took the lock, so it changes with every start; 0: never."""
        try:
            return self.marker_path.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    @property
    def is_finished(self) -> bool:
        """Whether the run reached its end and its summary was written."""
        return self.summary_path.exists()

    def log_path(self, child: str) -> Path:
        """Return the log file of one child."""
        return self.logs_path / f"{child}.log"

    def end_of_log(self, child: str) -> str:
        """Return the last lines of a child's log as one line, for an error."""
        try:
            lines = self.log_path(child).read_text(errors="replace", encoding="utf-8").splitlines()
        except FileNotFoundError:
            lines = []
        return " | ".join(line.strip() for line in lines[-MAX_LOG_LINES:])[-MAX_LOG_CHARS:] or "nothing"

    def tokens_path(self, who: str) -> Path:
        """Return the path of a service's tokens file; `all`: the file with every token."""
        return self.secrets_path / "tokens" / f"{who}.json"

    def check(self, *, resume: bool, fresh: bool) -> None:
        """Raise ConfigError unless the content of the folder fits the flags."""
        holds_work = self.summary_path.exists() or any(self.store_path.glob("runs/*/checkpoints/*/manifest.json"))
        if holds_work and not self.has_begun and not fresh:
            raise ConfigError(
                f"{self.path} holds the work of a run, but its recipe.json is gone; put a copy of it back, delete the "
                "work and begin again with --fresh, or give another name with --run-name"
            )
        if resume and not self.has_begun:
            raise ConfigError(f"there is no run to resume in {self.path}; leave out --resume to begin it")
        if self.path.exists() and not self.marker_path.exists() and any(self.path.iterdir()):
            raise ConfigError(
                f"{self.path} exists and is not a run folder (no {MARKER} in it), so tba leaves it alone; "
                "move it away, or give another name with --run-name"
            )
        if self.has_begun and not (resume or fresh):
            raise ConfigError(
                f"run folder {self.path} exists already; continue with --resume, delete it and begin again with "
                "--fresh, or give another name with --run-name"
            )

    def check_entries(self) -> None:
        """Raise ConfigError if an entry is a device, pipe or link to a file (reading may never end), or a huge JSON."""
        for entry in os.scandir(self.path) if self.path.is_dir() else ():
            is_file = entry.is_file(follow_symlinks=False)
            if not (is_file or entry.is_dir()):
                raise ConfigError(f"{entry.path} is no plain file, so this folder is not read; remove or replace it")
            if is_file and entry.name.endswith(".json") and entry.stat().st_size > MAX_DOCUMENT_BYTES:
                raise ConfigError(f"{entry.path} has more than {MAX_DOCUMENT_BYTES:,} bytes; a run writes less")

    @contextmanager
    def acquire(self, *, resume: bool, fresh: bool) -> Iterator[int]:
        """Call `check`, create the folder, and lock it; yield the descriptor of the lock."""
        self.check(resume=resume, fresh=fresh)
        self.path.mkdir(parents=True, exist_ok=True)
        self.path.chmod(0o700)
        with ExitStack() as stack:
            stack.callback(os.close, lock_fd := self._lock())
            if not self._takes_socket():
                short = stack.enter_context(temporary_folder("tba-redis-", parent=Path("/tmp")))
                self.redis_socket_path = short / self.redis_socket_path.name
            yield lock_fd

    def clear(self) -> None:
        """Delete everything but the lock, so that nothing of an older run disturbs the new one."""
        for entry in self.path.iterdir():
            if entry.name == MARKER:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def discard_empty(self) -> None:
        """Delete the folder, with its lock, if the start failed before it made anything of a run."""
        if not self.has_begun and not (self.logs_path.is_dir() and any(self.logs_path.iterdir())):
            shutil.rmtree(self.path)

    def make_folders(self) -> None:
        """Create the folders that children write to, and new secrets for this start."""
        for folder in (self.logs_path, self.redis_path):
            folder.mkdir(exist_ok=True)
        self.make_secrets()

    def make_secrets(self) -> None:
        """Make new tokens and a new password, in files that only their owner can read."""
        password = secrets.token_hex(24)
        # a reader that takes nothing must not fill the memory
        conf = f"requirepass {password}\nclient-output-buffer-limit normal 1gb 0 0\n"
        texts = {self.redis_password_path: f"{password}\n", self.redis_conf_path: conf}
        texts |= {self.tokens_path(who): json.dumps(tokens) + "\n" for who, tokens in new_tokens_files().items()}
        for folder in (self.secrets_path, self.secrets_path / "tokens"):
            folder.mkdir(mode=0o700, exist_ok=True)
        for path, text in texts.items():
            # a new file: an old one would keep the mode that it has
            path.unlink(missing_ok=True)
            # made with this mode, so that nobody else can read it even for a moment
            with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600), encoding="utf-8") as file:
                file.write(text)

    def write_json(self, path: Path, document: Any) -> None:
        """Write a JSON file atomically: a reader sees the old or the new one."""
        half = path.with_name(path.name + ".part")
        half.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        os.replace(half, path)

    def _takes_socket(self) -> bool:
        """Return whether a Unix socket works in the folder: not with a long path, on exFAT or some network disks."""
        self.secrets_path.mkdir(mode=0o700, exist_ok=True)
        self.redis_socket_path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.bind(str(self.redis_socket_path))
            except OSError:
                return False
        self.redis_socket_path.unlink()
        return True

    def _lock(self) -> int:
        """Lock the folder, without a wait; return the descriptor. The kernel unlocks when its last holder is gone."""
        lock_fd = os.open(self.marker_path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # another `tba run` may have deleted the folder since the file was opened
            if os.stat(self.marker_path).st_ino != os.fstat(lock_fd).st_ino:
                raise FileNotFoundError
        except FileNotFoundError:
            os.close(lock_fd)
            raise ConfigError(f"run folder {self.path} was just deleted by another `tba run`; start again") from None
        except BlockingIOError:
            holder = os.read(lock_fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(lock_fd)
            raise ConfigError(
                f"run folder {self.path} is in use by another `tba run` (process {holder}); "
                "wait for its end, stop it, or give another name with --run-name"
            ) from None
        except OSError as error:
            os.close(lock_fd)
            raise ConfigError(f"{explain_no_locks(self.path, error)}; local.runs_dir names it") from None
        # the process id is for people; the lock itself is the kernel's
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
        return lock_fd


def num_plain_bytes(folder: Path) -> int:
    """Return the total bytes of the files below a folder; ConfigError if it holds links or special files."""
    num_bytes = 0
    for place, names, files in os.walk(folder):
        for path in (Path(place) / name for name in (*names, *files)):
            found = path.lstat()
            if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
                raise ConfigError(f"{path} is neither a file nor a folder, so {folder} is not copied; replace it")
            num_bytes += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return num_bytes


def view_hint(folder: RunFolder) -> str:
    """Return the command that opens the page of a run."""
    is_named = folder.path.parent == (Path.cwd() / "runs")
    return f"tba view {folder.path.name}" if is_named else f"tba view --run-dir {folder.path}"
