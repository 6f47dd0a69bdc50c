"""`python -m tba_trainer.rehearsal --config FILE --model FILE [--all-layers]`: trace a step, print JSON."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path


def main() -> int:
    """Return the exit code: 0, or 2 with a sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m tba_trainer.rehearsal", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", required=True, metavar="FILE", help="recipe (TOML) or resolved config (JSON)")
    parser.add_argument("--model", required=True, type=Path, metavar="FILE", help="config.json of the model")
    parser.add_argument("--all-layers", action="store_true", help="trace the whole model; takes minutes")
    args = parser.parse_args()
    from tba.config import load_recipe
    from tba.errors import TbaError
    from tba.service_main import EXIT_ERROR
    from tba_trainer.rehearsal.step import models_to_trace, rehearse_step

    try:
        recipe, config = load_recipe(args.config), json.loads(args.model.read_bytes())
        found, plan = rehearse_step(recipe, config, all_layers=args.all_layers)
        layers = sorted({each.num_layers for each in models_to_trace(recipe, config, all_layers=args.all_layers)})
    except TbaError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_ERROR
    document = {"bytes": asdict(found), "state_bytes": found.state, "peak_bytes": found.peak, "plan": asdict(plan)}
    print(json.dumps(document | {"layers_traced": layers}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
