"""`python -m tba_trainer --config FILE`: parse the recipe first; torch is imported when it is valid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tba.starting import EXIT_STOPPED, quit_on_signals
from tba_trainer.parallel.leaving import leave

if TYPE_CHECKING:
    from tba.config import Recipe


def run(recipe: Recipe) -> int:
    """Run one trainer until the run is over, SIGTERM, or an error; returns the exit code."""
    from tba_trainer.run import run_trainer

    return run_trainer(recipe)


def main() -> int:
    """Exit code of the service; signals first, then everything else is imported."""
    quit_on_signals("trainer", code=EXIT_STOPPED)
    from tba.main import service_main

    return service_main("trainer", run)


if __name__ == "__main__":
    leave(main())
