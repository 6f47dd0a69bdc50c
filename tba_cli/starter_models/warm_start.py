"""`python -m tba_cli.starter_models.warm_start --config FILE`: make the starting model of a recipe."""

from __future__ import annotations

import sys

from tba.config import Recipe
from tba.errors import ConfigError
from tba.service_main import service_main


def run(recipe: Recipe) -> None:
    """Make the model of the recipe."""
    if recipe.model.warm_start is None:
        raise ConfigError("the recipe has no [model.warm_start] section, so there is no starting model to make")
    from tba_cli.starter_models.starting_model import make_starting_model

    num_threads = recipe.trainer.torch_num_threads
    report = make_starting_model(recipe.model.path, seed=recipe.run.seed, num_threads=num_threads)
    print(
        f"starting model: {report['num_parameters']} parameters, {report['wall_s']:.0f} s, "
        f"validation accuracy {report['validation_accuracy']:.2f}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(service_main("warmstart", run))
