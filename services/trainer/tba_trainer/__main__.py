"""`python -m tba_trainer --config FILE`: parse the recipe first; import torch only when it is valid."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from tba.early_signals import EXIT_STOPPED, quit_on_signals

if TYPE_CHECKING:
    from tba.config import Recipe


def run(recipe: Recipe) -> int:
    """Run one trainer until the run is over, SIGTERM, or an error; return the exit code."""
    from tba_trainer.trainer import run_trainer

    return run_trainer(recipe)


def main() -> int:
    """Return the exit code of the service."""
    # before everything else is imported: from here on SIGTERM ends a start at once
    quit_on_signals("trainer", code=EXIT_STOPPED)
    from tba.service_main import service_main

    return service_main("trainer", run)


def exit_process(code: int) -> NoReturn:
    """End this process with an exit code; in a team, without the interpreter's teardown.

    Everything must be closed and joined before.

    Raises:
        SystemExit: in a trainer of one process, as usual.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":  # set by torchrun; process_group.py reads it too, but imports torch
        raise SystemExit(code)
    # Threads of gloo and NCCL may outlive `destroy_process_group` (a device mesh still holds the group). One that wakes
    # during the teardown aborts the process ("terminate called without an active exception", exit code -6), and a
    # finished trainer would count as failed.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_process(main())
