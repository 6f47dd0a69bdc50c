"""`tba data prepare`: fetch or make the models and data sets of a recipe, and check them."""

from __future__ import annotations

import argparse

from tba.config import load_recipe
from tba.local.console import Console
from tba.local.prepare import prepare_recipe


def prepare_command(args: argparse.Namespace) -> int:
    """Fetch what is missing, check everything, show a prompt of each split; what is there is not touched."""
    prepare_recipe(load_recipe(args.recipe, sets=args.set), Console("normal"))
    return 0
