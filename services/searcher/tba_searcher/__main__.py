"""`python -m tba_searcher --config FILE`: parse the recipe first; torch is imported when it is valid.

The environment variable TBA_SEARCHER_ID names this searcher; default: hostname-pid-random.
"""

from __future__ import annotations

import sys

from tba.config import Recipe
from tba.main import service_main


def run(recipe: Recipe) -> None:
    """Run one searcher until the run is over, SIGTERM, or an error."""
    from tba_searcher.service import run_searcher

    run_searcher(recipe)


if __name__ == "__main__":
    sys.exit(service_main("searcher", run))
