"""`tba config check|show|schema`: recipes, without starting anything."""

from __future__ import annotations

import argparse
import json

from tba.config import Recipe, load_recipe


def check_command(args: argparse.Namespace) -> int:
    """Load the recipe; an error names the key, the value and what to do."""
    recipe = load_recipe(args.recipe, sets=args.set)
    print(f"{args.recipe}: ok (run {recipe.run.name!r}, {recipe.trainer.num_steps} steps)")
    return 0


def show_command(args: argparse.Namespace) -> int:
    """Print every value that the recipe, the environment and the flags result in, defaults included."""
    print(load_recipe(args.recipe, sets=args.set).model_dump_json(indent=2))
    return 0


def schema_command(args: argparse.Namespace) -> int:
    """Print the JSON schema of a recipe; editors and the Helm chart read it."""
    print(json.dumps(Recipe.model_json_schema(), indent=2))
    return 0
