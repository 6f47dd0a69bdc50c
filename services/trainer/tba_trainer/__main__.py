"""`python -m tba_trainer --config FILE`: parse the recipe first; import torch only when it is valid."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from tba.early_signals import EXIT_STOPPED, quit_on_signals
from tba_trainer.distributed.launch import exit_process

if TYPE_CHECKING:
    from tba.config import Recipe


def run(recipe: Recipe) -> int:
    """Run one trainer until the run is over, SIGTERM, or an error; return the exit code."""
    from tba_trainer.trainer import run_trainer

    return run_trainer(recipe)


def main() -> int:
    """Run the service, and return its exit code."""
    # before everything else is imported: from here on SIGTERM ends a start at once (`tba run` blocks it in torchrun)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    quit_on_signals("trainer", code=EXIT_STOPPED)
    from tba.service_main import service_main

    return service_main("trainer", run)


if __name__ == "__main__":
    exit_process(main())
