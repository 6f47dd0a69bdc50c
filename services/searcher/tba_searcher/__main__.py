"""`python -m tba_searcher --config FILE`: parse the recipe, then import torch.

The environment variable TBA_SEARCHER_ID names this searcher; default: hostname-pid-random.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from tba.early_signals import quit_on_signals

if TYPE_CHECKING:
    from tba.config import Recipe


def run(recipe: Recipe) -> None:
    """Run one searcher until the run is over, SIGTERM, or an error."""
    # before torch is imported: threads that spin on shared cores cost most of the speed
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from tba_searcher.service import run_searcher

    run_searcher(recipe)


def main() -> int:
    """Run the service; return its exit code."""
    quit_on_signals("searcher")  # before the slow imports: SIGTERM may come at any time
    from tba.service_main import service_main

    return service_main("searcher", run)


if __name__ == "__main__":
    exit_code = main()
    # A thread may still be inside torch: an engine that hangs, a model that was loading when SIGTERM came. The
    # interpreter's normal exit would stop it there and abort the process with another exit code.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
