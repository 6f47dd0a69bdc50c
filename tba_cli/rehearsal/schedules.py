"""What a recipe's schedules and intervals come to over its run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tba.config import Recipe
from tba.config.schedules import Schedule

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The scheduled values of one step."""

    step: int
    """1 is the first."""
    learning_rate: float
    beta: float
    most_on_policy_prob: float
    sampling_temperature: float | None
    """None: each rollout draws its own (`searcher.temperature_mix`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a run comes to."""

    num_rollouts_trained: int
    num_visits_to_first_batch: int
    """Until `sampling.min_size_to_sample` rollouts are stored."""
    num_versions: int
    num_checkpoints: int
    versions_bytes: int
    """Written over the whole run; older ones are deleted."""
    checkpoints_bytes: int


def points(recipe: Recipe) -> list[Point]:
    """Return the values of the first step, the last one, and the quarters between."""
    last = recipe.trainer.num_steps - 1
    # a schedule counts finished steps: its value at 0 is that of the first step
    return [
        Point(
            step=done + 1,
            learning_rate=recipe.trainer.learning_rate.at(done),
            beta=recipe.objective.beta.at(done),
            most_on_policy_prob=recipe.sampling.most_on_policy_prob.at(done),
            sampling_temperature=(
                None if recipe.searcher.temperature_mix else recipe.searcher.sampling_temperature.at(done)
            ),
        )
        for done in (round(share * last) for share in SHARES)
    ]


def odd_ends(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for each schedule that does not end where the run does."""
    num_steps = recipe.trainer.num_steps
    schedules: dict[str, Schedule] = {
        "trainer.learning_rate": recipe.trainer.learning_rate,
        "objective.beta": recipe.objective.beta,
        "sampling.most_on_policy_prob": recipe.sampling.most_on_policy_prob,
        "searcher.sampling_temperature": recipe.searcher.sampling_temperature,
    }
    for key, schedule in schedules.items():
        if schedule.steps is None:
            continue
        if schedule.steps > num_steps:
            yield (
                f"{key} is a schedule of {schedule.steps} steps and the run has {num_steps}: it ends at "
                f"{schedule.at(num_steps - 1):.3g} and never reaches {schedule.final:g}"
            )
        elif schedule.steps < num_steps:
            yield f"{key} has its final value {schedule.final:g} from step {schedule.steps + 1} on"


def totals(recipe: Recipe, *, version_bytes: int, checkpoint_bytes: int) -> Totals:
    """Return what the run comes to.

    Args:
        version_bytes: of one published version.
        checkpoint_bytes: of one checkpoint.
    """
    sampling, section = recipe.sampling, recipe.trainer
    # the starting model, every k steps, and the last one
    num_versions = 1 + math.ceil(section.num_steps / section.sync_interval)
    num_checkpoints = math.ceil(section.num_steps / section.checkpoint_interval)
    return Totals(
        num_rollouts_trained=section.num_steps * sampling.prompts_per_batch * sampling.group_size,
        num_visits_to_first_batch=math.ceil(sampling.min_size_to_sample / sampling.rollouts_per_visit),
        num_versions=num_versions,
        num_checkpoints=num_checkpoints,
        versions_bytes=num_versions * version_bytes,
        checkpoints_bytes=num_checkpoints * checkpoint_bytes,
    )
