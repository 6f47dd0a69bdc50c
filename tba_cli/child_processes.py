"""Child processes: the environment of each, and programs of tba_cli.starter_models that run to their end.

Those programs need torch, which this process never imports.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tba.errors import ConfigError
from tba_cli.orphan_reaper import OrphanReaper

PROGRAM_TIMEOUT_S = 3600.0
"""To convert a large model takes minutes."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def child_environ(
    environ: Mapping[str, str],
    *,
    num_threads: int,
    searcher_id: str | None = None,
    gpus: Sequence[int] | None = None,
    tokens_file: Path | None = None,
) -> dict[str, str]:
    """Return the environment of a child.

    Args:
        tokens_file: the child's own, in place of the one in config.json.
    """
    # TBA_SECTION__KEY variables are in config.json already, and would override the real ports there
    child = {name: value for name, value in environ.items() if not (name.startswith("TBA_") and "__" in name)}
    child.update({name: str(num_threads) for name in _THREAD_VARIABLES})
    # lines must come at once through a pipe, and everything was fetched before the children start
    child.update({"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"})
    if searcher_id is not None:
        child["TBA_SEARCHER_ID"] = searcher_id
    if tokens_file is not None:
        child["TBA_AUTH__TOKENS_FILE"] = str(tokens_file)
    if gpus is not None:
        child["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    return child


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
