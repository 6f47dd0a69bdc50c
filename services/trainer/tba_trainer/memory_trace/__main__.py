"""`python -m tba_trainer.memory_trace --config FILE --model FILE`: trace a step, print JSON."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path


def main() -> int:
    """Run the command line; return 0, or 2 with a sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m tba_trainer.memory_trace", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", required=True, metavar="FILE", help="recipe (TOML) or resolved config (JSON)")
    parser.add_argument("--model", required=True, type=Path, metavar="FILE", help="config.json of the model")
    args = parser.parse_args()
    from tba.config import load_recipe
    from tba.errors import TbaError
    from tba.service_main import EXIT_ERROR
    from tba_trainer.memory_trace.step import layers_to_trace, max_micro_batch_tokens, trace_recipe

    try:
        recipe, config = load_recipe(args.config), json.loads(args.model.read_bytes())
        found = trace_recipe(recipe, config)
        layers = sorted(layers_to_trace(recipe, config))
    except TbaError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_ERROR
    document = {"bytes": asdict(found), "state_bytes": found.state, "peak_bytes": found.peak}
    print(json.dumps(document | {"max_tokens": max_micro_batch_tokens(recipe), "layers_traced": layers}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
