"""The main function of every service: read the recipe, run the service, report expected errors in one sentence."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tba.config import Recipe, load_recipe
from tba.early_signals import EXIT_INTERRUPTED
from tba.errors import FencedError, ModelError, TbaError
from tba.logs import configure_logging
from tba.store.file import explain_full_disk
from tba.tls import with_bare_urls

EXIT_ERROR = 2
EXIT_FENCED = 3
EXIT_CONFIG = 4
"""Exit code of a searcher that cannot work with its model, so that a restart cannot help."""


def service_main(
    name: str,
    run: Callable[[Recipe], int | None],
    argv: Sequence[str] | None = None,
    *,
    stand_ins: Mapping[str, Any] | None = None,
) -> int:
    """Parse the command line, read the recipe, and run one service until it ends.

    Args:
        name: `buffer`, `reward`, `searcher` or `trainer`.
        run: blocks until the service ends; may return an exit code.
        argv: command line; None: that of this process.
        stand_ins: sections that this service does not use; each takes the place of one that the recipe file lacks.

    Returns:
        The exit code: 0 or the service's own; 2 for an error explained on stderr; 3 if a newer lineage owns the run;
        4 for a searcher that cannot work with its model; 130 for Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tba_{name}", description=f"The {name} service of tba.")
    parser.add_argument("--config", required=True, metavar="FILE", help="recipe (TOML) or resolved config (JSON)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override, for example buffer.port=0"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks of expected errors too")
    args = parser.parse_args(argv)
    try:
        recipe = load_recipe(args.config, sets=args.set, stand_ins=stand_ins)
        configure_logging(service=name, run=recipe.run.name)
        return run(recipe) or 0
    except TbaError as error:
        if args.debug:
            raise
        print(f"error: {name}: {with_bare_urls(str(error))}", file=sys.stderr, flush=True)
        if name == "searcher" and isinstance(error, ModelError):
            return EXIT_CONFIG
        # a supervisor must not restart a trainer that was replaced
        return EXIT_FENCED if isinstance(error, FencedError) else EXIT_ERROR
    except OSError as error:
        # an OSError is a defect anywhere else, and a full disk is what operators meet
        what = explain_full_disk(error, os.getcwd(), tempfile.gettempdir())
        if what is None:
            raise
        print(f"error: {name}: {what}", file=sys.stderr, flush=True)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
