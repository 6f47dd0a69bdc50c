"""`python -m tba_cli.starter_models.tiny --make MAKER SEED FOLDER`: make small models and data sets."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from tba_cli.starter_models.sample_datasets import SHAPES, write_dataset


def make(maker: str, out: Path, *, seed: int) -> None:
    """Make the model or data set of a maker in a folder beside `out`, then move it to `out`.

    Raises:
        ValueError: there is no such maker; names all.
    """
    half_made = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(half_made, ignore_errors=True)
    half_made.parent.mkdir(parents=True, exist_ok=True)
    if maker in SHAPES:
        write_dataset(half_made, SHAPES[maker], seed=seed)
    else:
        # it imports torch, which data sets do not need
        from tba_cli.starter_models.random_models import KINDS, write_model

        if maker not in KINDS:
            raise ValueError(f"there is no maker {maker!r}; the makers are {', '.join([*SHAPES, *KINDS])}")
        write_model(half_made, KINDS[maker], seed=seed)
    half_made.rename(out)


def main() -> int:
    """Make everything that is named; return 0, or 2 with a sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m tba_cli.starter_models.tiny", description=__doc__)
    parser.add_argument(
        "--make",
        nargs=3,
        action="append",
        required=True,
        metavar=("MAKER", "SEED", "FOLDER"),
        help="what to make, the seed of its weights or rows, and the folder, which must not exist; may be repeated",
    )
    args = parser.parse_args()
    try:
        for maker, seed, folder in args.make:
            make(maker, Path(folder), seed=int(seed))
    except (OSError, ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
