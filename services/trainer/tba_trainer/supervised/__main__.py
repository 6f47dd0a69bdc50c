"""`python -m tba_trainer.supervised sft|reward --config FILE --item N --examples FILE [--heldout FILE] --out FOLDER`.

Train one item of `[[sft]]` or `[[reward_training]]`. With several processes this one starts them (torchrun) and waits.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tba.early_signals import EXIT_INTERRUPTED, EXIT_STOPPED, quit_on_signals
from tba_trainer.distributed.launch import exit_process, launch

MODULE = "tba_trainer.supervised"


def main() -> int:
    """Return the exit code: 0; 2 with a sentence on stderr; 143 or 130 where a signal ended it after a checkpoint."""
    quit_on_signals("supervised training", code=EXIT_STOPPED)  # until the steps begin
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__, allow_abbrev=False)
    parser.add_argument("kind", choices=["sft", "reward"])
    parser.add_argument("--config", required=True, metavar="FILE", help="recipe (TOML) or resolved config (JSON)")
    parser.add_argument("--item", required=True, type=int, metavar="N", help="number of the item in the recipe, from 0")
    parser.add_argument("--examples", required=True, type=Path, metavar="FILE", help="JSONL")
    parser.add_argument("--heldout", type=Path, metavar="FILE", help="JSONL that is only evaluated on")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="appears complete or not at all")
    args = parser.parse_args()
    from tba.config import load_recipe
    from tba.errors import ConfigError, TbaError
    from tba.service_main import EXIT_ERROR
    from tba.store.file import explain_full_disk

    try:
        recipe = load_recipe(args.config)
        items = recipe.sft if args.kind == "sft" else recipe.reward_training
        if not 0 <= args.item < len(items):
            raise ConfigError(f"the recipe has {len(items)} items to train this way, and --item is {args.item}")
        num_processes = recipe.sft[args.item].num_processes if args.kind == "sft" else 1
        if num_processes > 1 and "WORLD_SIZE" not in os.environ:  # torchrun sets it in the processes that it starts
            return launch(num_processes, sys.argv[1:], stop_timeout_s=recipe.local.stop_timeout_s, module=MODULE)
        from tba_trainer.supervised.training import train_item

        return train_item(recipe, args.item, kind=args.kind, examples=args.examples, heldout=args.heldout, out=args.out)
    except TbaError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_ERROR
    except OSError as error:
        what = explain_full_disk(error, args.out.parent, tempfile.gettempdir())
        if what is None and error.filename is None:
            raise
        # such as a file system that is read-only
        what = what or f"{error.filename} cannot be used: {error.strerror}"
        print(f"error: {what}", file=sys.stderr, flush=True)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    exit_process(main())
