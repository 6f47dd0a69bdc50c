"""`python -m tba_searcher.evaluation --config FILE --job FILE`: parse both, then import torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tba.config import Recipe
from tba.service_main import service_main


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate one model; return the exit code of `tba.service_main.service_main`."""
    parser = argparse.ArgumentParser(prog="python -m tba_searcher.evaluation", add_help=False)
    parser.add_argument("--job", required=True, type=Path, metavar="FILE", help="written by `tba evaluate`")
    args, rest = parser.parse_known_args(argv)

    def run(recipe: Recipe) -> None:
        from tba.evaluation.evaluation_job import load_job
        from tba_searcher.evaluation.evaluator import evaluate

        evaluate(recipe, load_job(args.job))

    return service_main("evaluator", run, rest)


if __name__ == "__main__":
    sys.exit(main())
