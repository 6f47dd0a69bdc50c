"""`python -m tba_trainer --config FILE`: parse the recipe first; torch is imported when it is valid."""

from __future__ import annotations

from tba.config import Recipe
from tba.main import service_main
from tba_trainer.parallel.leaving import leave


def run(recipe: Recipe) -> int:
    """Run one trainer until the run is over, SIGTERM, or an error; returns the exit code."""
    from tba_trainer.run import run_trainer

    return run_trainer(recipe)


if __name__ == "__main__":
    leave(service_main("trainer", run))
