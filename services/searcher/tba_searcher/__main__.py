"""`python -m tba_searcher --config FILE`: parse the recipe first; torch is imported when it is valid.

The environment variable TBA_SEARCHER_ID names this searcher; default: hostname-pid-random.
"""

from __future__ import annotations

import os
import sys

from tba.config import Recipe
from tba.main import service_main


def run(recipe: Recipe) -> None:
    """Run one searcher until the run is over, SIGTERM, or an error."""
    # before torch: kernels of vLLM ask OpenMP, not torch, and threads that spin on shared cores cost most of the speed
    os.environ.setdefault("OMP_NUM_THREADS", str(recipe.searcher.torch_num_threads))
    from tba_searcher.service import run_searcher

    run_searcher(recipe)


if __name__ == "__main__":
    exit_code = service_main("searcher", run)
    # A thread may still be deep in torch: an engine that hangs, a model that was loading when SIGTERM came. The
    # interpreter's own way out would stop it there, and that aborts the process with another exit code.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
