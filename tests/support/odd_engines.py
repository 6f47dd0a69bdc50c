"""Simulated engines that fail in one way, for `searcher.engine` of a searcher in a process of its own."""

from __future__ import annotations

import time
from pathlib import Path

from tba_searcher.engines.engine import Completion, EngineDiedError, EngineSettings
from tba_searcher.engines.simulated import SimulatedEngine

from tba.versions import PolicyVersion

AN_HOUR_S = 3600.0
NUM_STEPS = 8


class DyingEngine(SimulatedEngine):
    """Dies after a few steps that bring responses."""

    def __init__(self, folder: Path, version: PolicyVersion, settings: EngineSettings) -> None:
        super().__init__(folder, sorted(folder.glob("*.safetensors")), version, settings)
        self._num_left = NUM_STEPS

    def step(self) -> list[Completion]:
        """Decode, or die."""
        if not self._num_left:
            raise EngineDiedError("out of memory")
        completions = super().step()
        self._num_left -= bool(completions)
        return completions


class LateEngine(DyingEngine):
    """Takes an hour to start."""

    def __init__(self, folder: Path, version: PolicyVersion, settings: EngineSettings) -> None:
        super().__init__(folder, version, settings)
        time.sleep(AN_HOUR_S)


class HangingEngine(DyingEngine):
    """Does not come back from its first step."""

    def step(self) -> list[Completion]:
        """Hang."""
        time.sleep(AN_HOUR_S)
        return []
