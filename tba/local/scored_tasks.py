"""Whether something scores every prompt."""

from __future__ import annotations

from collections.abc import Sequence

from tba.api import Prompt, RewardInfo
from tba.errors import ConfigError


def check_tasks(prompts: Sequence[Prompt], rewards: Sequence[RewardInfo]) -> None:
    """A prompt that nothing can score would be generated for and never trained on.

    Raises:
        ConfigError: there is one.
    """
    known = [reward.task for reward in rewards]
    for prompt in prompts:
        if prompt.task not in known:
            raise ConfigError(
                f"prompt {prompt.prompt_id!r} has the task {prompt.task!r}, which no reward scores; the reward "
                f"service knows {', '.join(known)}: correct the prompt, or give the task an entry in reward.tasks"
            )
