"""Run programs of tba_cli.starter_models as child processes, so that this process never imports torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from tba.errors import ConfigError
from tba_cli.orphan_reaper import OrphanReaper
from tba_cli.resolve import child_environ

PROGRAM_TIMEOUT_S = 3600.0
"""To convert a large model takes minutes."""


def run_program(module: str, words: Sequence[str]) -> str:
    """Run a program that needs torch or transformers, and return its stdout.

    The program ends with this process, even when this process is killed.

    Raises:
        ConfigError: the program is not installed, ran into its deadline, or says what is wrong.
    """
    reaper = OrphanReaper()
    program = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        env=child_environ(os.environ, num_threads=1),  # threads that spin make small models slower
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        reaper.add(program.pid)
        out, err = program.communicate(timeout=PROGRAM_TIMEOUT_S)
        reaper.discard(program.pid)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{module} did not end within {PROGRAM_TIMEOUT_S:.0f} s") from None
    finally:  # Ctrl-C does not reach a process of another session
        if program.poll() is None:
            program.kill()
            program.wait()
        reaper.close()
    if program.returncode == 0:
        return out
    last = (err.strip().splitlines() or [f"exit code {program.returncode}"])[-1]
    missing = any(f"No module named '{name}" in last for name in ("tokenizers", "torch", "transformers"))
    hint = "; install the extra: pip install 'tba[models]'" if missing else ""
    raise ConfigError(f"{last.removeprefix('error: ')}{hint}")
