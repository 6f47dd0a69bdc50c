"""`python -m tba_searcher --config FILE`: parse the recipe first; torch is imported when it is valid.

The environment variable TBA_SEARCHER_ID names this searcher; default: hostname-pid-random.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from tba.starting import quit_on_signals

if TYPE_CHECKING:
    from tba.config import Recipe


def run(recipe: Recipe) -> None:
    """Run one searcher until the run is over, SIGTERM, or an error."""
    # before torch: kernels of vLLM ask OpenMP, not torch, and threads that spin on shared cores cost most of the speed
    os.environ.setdefault("OMP_NUM_THREADS", str(recipe.searcher.torch_num_threads))
    from tba_searcher.service import run_searcher

    run_searcher(recipe)


def main() -> int:
    """Exit code of the service; signals first, then everything else is imported."""
    quit_on_signals("searcher")
    from tba.main import service_main

    return service_main("searcher", run)


if __name__ == "__main__":
    exit_code = main()
    # A thread may still be deep in torch: an engine that hangs, a model that was loading when SIGTERM came. The
    # interpreter's own way out would stop it there, and that aborts the process with another exit code.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
