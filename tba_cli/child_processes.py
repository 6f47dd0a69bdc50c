"""Run programs as child processes, and make the environment of each child.

The programs need torch, which this process never imports.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from tba.errors import ChildError, ConfigError, pip_install
from tba_cli.orphan_reaper import OrphanReaper

PROGRAM_TIMEOUT_S = 3600.0
"""Deadline of a program; converting a large model takes minutes."""
STDERR = 2
"""The file descriptor of stderr."""
PIPED = {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"}
"""Environment of a child whose output is read: its lines are not buffered, and are UTF-8 in every locale."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def child_environ(
    environ: Mapping[str, str],
    *,
    num_threads: int | None,
    searcher_id: str | None = None,
    gpus: Sequence[int] | None = None,
    tokens_file: Path | None = None,
) -> dict[str, str]:
    """Return the environment of a child.

    Args:
        num_threads: threads of each numeric library; None: as the variables of `environ` say, else one.
        gpus: numbers of the GPUs that the child may use; None: as `environ` says.
        tokens_file: a file of tokens that replaces the one in config.json.
    """
    # TBA_SECTION__KEY variables are in config.json already, and would override the real ports there
    child = {name: value for name, value in environ.items() if not (name.startswith("TBA_") and "__" in name)}
    for name in _THREAD_VARIABLES:
        child[name] = child.get(name, "1") if num_threads is None else str(num_threads)
    # the children share the cores: a thread that spins while it waits for others keeps a core from them
    child.setdefault("OMP_WAIT_POLICY", "passive")
    child.setdefault("TBA_LOG_FORMAT", "console")  # people read the lines, which go to a pipe
    # everything was fetched before the children start
    child.update({**PIPED, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"})
    if searcher_id is not None:
        child["TBA_SEARCHER_ID"] = searcher_id
    if tokens_file is not None:
        child["TBA_AUTH__TOKENS_FILE"] = str(tokens_file)
    if gpus is not None:
        child["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    return child


def run_program(module: str, words: Sequence[str]) -> str:
    """Run a program that needs torch or transformers, and return its stdout."""
    environ = child_environ(os.environ, num_threads=1)  # threads that spin make small models slower
    environ["PYTHONHASHSEED"] = "0"  # the order of a set decides some questions of reasoning-gym
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with _program(module, words, env=environ, encoding="utf-8", errors="replace", **pipes) as program:
        try:
            out, err = program.communicate(timeout=PROGRAM_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{module} did not end within {PROGRAM_TIMEOUT_S:.0f} s") from None
    if program.returncode == 0:
        return out
    raise ConfigError(_last_words(err.splitlines(), program.returncode))


def ask_program(module: str, words: Sequence[str] = (), **files: str) -> Any:
    """Run a program whose stdout is JSON, and return the parsed value.

    Args:
        files: texts by flag; each is written to a temporary file, whose path the program gets as `--FLAG PATH`.
    """
    with tempfile.TemporaryDirectory(prefix="tba-program-") as place:
        for name, text in files.items():
            path = Path(place) / f"{name}.json"
            path.write_text(text, encoding="utf-8")
            words = [*words, f"--{name}", str(path)]
        return json.loads(run_program(module, words))


def run_in_sight(module: str, words: Sequence[str]) -> None:
    """Run a long program that shows its own progress: everything that it prints goes to stderr.

    Raises:
        ChildError: it failed.
        KeyboardInterrupt: this process was asked to end.
    """
    with interrupt_on_signals(), _program(module, words, stdout=STDERR) as program:
        program.wait()
    if program.returncode != 0:
        raise ChildError(_last_words([], program.returncode))


@contextmanager
def _program(module: str, words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a program for a `with` block, and kill it at the end if it still runs, or when this process dies."""
    reaper = OrphanReaper()
    command = [sys.executable, "-m", module, *words]
    # Ctrl-C does not reach a process of another session
    program = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **options)
    try:
        reaper.add(program.pid)
        yield program
        reaper.discard(program.pid)
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()
        reaper.close()


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Make SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt, so that children are stopped and copies deleted.

    This does nothing outside the main thread, which alone gets signals. A SIGHUP that is ignored stays ignored.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # a shell starts background commands with SIGINT ignored; `nohup` has SIGHUP ignored, which stays so
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: interrupt}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handlers[signal.SIGHUP] = interrupt
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _last_words(lines: Sequence[str], code: int) -> str:
    """Return in one line why a program failed. `lines`: its stderr, whose last line is quoted; []: not captured."""
    last = next((line for line in reversed(lines) if line.strip()), "" if code < 0 else f"exit code {code}")
    if code < 0:
        last = f"{last}{'; ' if last else ''}it was ended by signal {-code} ({signal.Signals(-code).name})"
    last = last.removeprefix("error: ")
    for package in ("reasoning-gym", "tba-trainer", "tokenizers", "torch", "transformers"):
        name = package.replace("-", "_")
        # a module that `python -m` is given is named otherwise than one that it imports
        if f"No module named '{name}" in last or f"specification for '{name}" in last:
            return f"{last}; {pip_install(package)}"
    return last
