"""Text environments of Gymnasium: `settings = {id = "my_module:Maze-v0"}`. Other settings go to the environment.

Observations and actions are `gymnasium.spaces.Text`. `reset` gets the seed, and the data of the prompt as options. A
reply that is not in the action space is no step: the policy is told so, and replies again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tba.environments.adapters import required, version_of
from tba.environments.protocol import Reply, Reset, Step
from tba.errors import ConfigError


class Gymnasium:
    """Implements `Environment` with an environment of Gymnasium."""

    version = version_of("gymnasium")

    def __init__(self, id: str, **settings: Any) -> None:
        gymnasium = required("gymnasium", "gymnasium")
        self._environment = gymnasium.make(id, **settings)
        for space in (self._environment.action_space, self._environment.observation_space):
            if not isinstance(space, gymnasium.spaces.Text):
                raise ConfigError(f"{id} has the space {space!r:.80}, which is not Text; take an environment of texts")

    def reset(self, seed: int, data: Mapping[str, Any]) -> Reset:
        """Begin the episode."""
        return Reset([self._environment.reset(seed=seed, options=dict(data))[0]])

    def step(self, reply: Reply) -> Step:
        """Take the step of a reply."""
        action, space = reply.content.strip(), self._environment.action_space
        if not space.contains(action):
            return Step([f"error: no step was taken; an action is {space!r:.400}"])
        text, reward, terminated, truncated, _ = self._environment.step(action)
        # what has terminated is over, whatever limit was reached too
        info = {"stop_condition": "terminated" if terminated else "truncated", "truncated": not terminated}
        return Step([text], float(reward), terminated or truncated, info)

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()
