"""Simulated engines that hang, for `searcher.engine` of a searcher in a process of its own."""

from __future__ import annotations

import time
from pathlib import Path

from tba_searcher.engines.engine import Completion, EngineSettings
from tba_searcher.engines.simulated import SimulatedEngine

from tba.versions import PolicyVersion

AN_HOUR_S = 3600.0


class HangingEngine(SimulatedEngine):
    """Does not come back from its first step."""

    def __init__(self, folder: Path, version: PolicyVersion, settings: EngineSettings) -> None:
        super().__init__(folder, sorted(folder.glob("*.safetensors")), version, settings)

    def step(self) -> list[Completion]:
        """Hang."""
        time.sleep(AN_HOUR_S)
        return []


class LateEngine(HangingEngine):
    """Takes an hour to start."""

    def __init__(self, folder: Path, version: PolicyVersion, settings: EngineSettings) -> None:
        super().__init__(folder, version, settings)
        time.sleep(AN_HOUR_S)
