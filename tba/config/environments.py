"""The `[environments]` section: what answers the policy in the episodes of a task, and the limits of an episode.

    [environments.shop]
    environment = "my_shop:Shop"
    tools = ["my_shop:search"]
    truncated_reward = 0.0

Tokens of a reply are limited by `searcher.max_response_tokens`, and what stands before one by
`searcher.max_prompt_tokens`.
"""

from __future__ import annotations

from pydantic import Field, JsonValue, model_validator

from tba import plugins
from tba.errors import ConfigError
from tba.fields import StrictModel


class EnvironmentSection(StrictModel):
    """The environment of one task, its tools, and the limits of an episode."""

    environment: str | None = None
    """MODULE:CLASS of an environment (docs/environments.md), or the address of one, such as http://127.0.0.1:9000.
    None: tools alone, and an episode ends with the first reply that calls none."""
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the class."""
    tools: list[str] = Field(default_factory=list, max_length=128)
    """MODULE:FUNCTION of each tool: typed functions with a docstring."""
    max_turns: int = Field(default=16, ge=1, le=4096)
    """Most replies of an episode."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Most tokens of an episode, over all of its sequences. None: `trainer.micro_batch_tokens`, which no conversation
    may exceed."""
    max_tool_tokens: int = Field(default=512, ge=1)
    """Most tokens of the answer to one tool call; a longer one is cut, and says so."""
    turn_timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of one answer of the environment and its tools. Beyond it the episode fails, and is played again."""
    episode_timeout_s: float = Field(default=600.0, gt=0)
    """Time that the environment may take for a whole episode; beyond it the episode is truncated."""
    truncated_reward: float | None = Field(default=None, ge=-1e6, le=1e6)
    """Added to what the environment paid if a limit ended the episode. None: such episodes are not trained."""
    num_workers: int = Field(default=1, ge=1, le=64)
    """Processes that play the episodes of a searcher, each with many at once."""

    @model_validator(mode="after")
    def _check(self) -> EnvironmentSection:
        if self.environment is None and not self.tools:
            raise ValueError("it has no environment and no tools; name one of them")
        try:
            if self.environment is not None and not self.is_remote:
                plugins.check_name(self.environment, what="environment")
            for tool in self.tools:
                plugins.check_name(tool, what="tools")
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if self.settings and (self.environment is None or self.is_remote):
            raise ValueError("settings are arguments of a class; name it in environment, or remove them")
        return self

    @property
    def is_remote(self) -> bool:
        """Whether the environment is at an address."""
        return self.environment is not None and self.environment.startswith(("http://", "https://"))
