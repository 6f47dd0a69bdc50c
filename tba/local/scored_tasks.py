"""Whether something scores every prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tba.api import Prompt, RewardInfo
from tba.api.scores import STARTING
from tba.config import Recipe
from tba.config.reward import BUILT_IN_TASKS
from tba.errors import ConfigError

MAY_COME = frozenset({"ok", "idle", STARTING})
"""Health of a scorer that works, or whose first attempt to start has not ended."""


def tasks_of_recipe(recipe: Recipe) -> list[str]:
    """The tasks that a reward service with this recipe scores."""
    return sorted({*BUILT_IN_TASKS, *recipe.reward.tasks})


def check_tasks(prompts: Sequence[Prompt], known: Iterable[str]) -> None:
    """A prompt that nothing can score would be generated for and never trained on.

    Args:
        known: the tasks that are scored.

    Raises:
        ConfigError: there is one.
    """
    known = list(known)
    for prompt in prompts:
        if prompt.task not in known:
            raise ConfigError(
                f"prompt {prompt.prompt_id!r} has the task {prompt.task!r}, which no reward scores; the reward "
                f"service knows {', '.join(known)}: correct the prompt, or give the task an entry in reward.tasks"
            )


def check_healthy(rewards: Iterable[RewardInfo]) -> None:
    """A scorer that did not start is tried again for ever; who begins a run wants to know at once.

    Raises:
        ConfigError: the first attempt of a scorer to start has failed.
    """
    for reward in rewards:
        for scorer in reward.scorers:
            if scorer.health not in MAY_COME:
                raise ConfigError(
                    f"the reward service cannot score the task {reward.task!r}: scorer {scorer.name!r}: "
                    f"{scorer.health}; correct reward.tasks.{reward.task}, or mend what the scorer needs"
                )
