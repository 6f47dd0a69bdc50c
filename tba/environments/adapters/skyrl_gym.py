"""Environments of SkyRL-Gym: `settings = {id = "gsm8k_multi_turn", max_turns = 5}`.

Other settings are its `env_config`; they and the data of a prompt (`reward_spec`) are the `extras`. An id MODULE:ID
imports the module, which registers the environment. There is no seed: what it draws by itself differs between episodes.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, cast

from tba.environments.adapters import required, version_of
from tba.environments.protocol import Reply, Reset, Step


class SkyRLGym:
    """Implements `Environment` with an environment of SkyRL-Gym."""

    version = version_of("skyrl-gym")

    def __init__(self, id: str, **settings: Any) -> None:
        self._gym, self._environment = required("skyrl_gym", "skyrl-gym"), cast("Any", None)
        module, _, self._id = id.rpartition(":")
        if module:
            importlib.import_module(module)
        self._config, self._settings = required("omegaconf", "skyrl-gym").OmegaConf.create(settings), settings

    def reset(self, seed: int, data: Mapping[str, Any]) -> Reset:
        """Make the environment; its first messages come behind those of the prompt."""
        self._environment = self._gym.make(self._id, env_config=self._config, extras={**self._settings, **data})
        return Reset(self._environment.init([])[0])

    def step(self, reply: Reply) -> Step:
        """Answer a reply. `postprocessed_action` is not used: sampled tokens stay as they are."""
        found = self._environment.step(reply.content)
        return Step(found["observations"], found["reward"], found["done"])

    def close(self) -> None:
        """Close the environment."""
        if self._environment is not None:
            self._environment.close()
