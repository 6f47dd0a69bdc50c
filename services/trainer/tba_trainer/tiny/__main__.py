"""`python -m tba_trainer.tiny --make MAKER SEED FOLDER`: small models and data sets, each whole or not at all."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from tba_trainer.tiny.data import SHAPES, write_dataset


def make(maker: str, out: Path, *, seed: int) -> None:
    """Make what `maker` names in a folder beside `out`, then move it there.

    Raises:
        ValueError: there is no such maker; the text names all.
    """
    half_made = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(half_made, ignore_errors=True)
    half_made.parent.mkdir(parents=True, exist_ok=True)
    if maker in SHAPES:
        write_dataset(half_made, SHAPES[maker], seed=seed)
    else:
        from tba_trainer.tiny.models import KINDS, write_model  # torch: not for data

        if maker not in KINDS:
            raise ValueError(f"there is no maker {maker!r}; the makers are {', '.join([*SHAPES, *KINDS])}")
        write_model(half_made, KINDS[maker], seed=seed)
    half_made.rename(out)


def main() -> int:
    """Exit code 0, or 2 with a sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m tba_trainer.tiny", description=__doc__)
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
