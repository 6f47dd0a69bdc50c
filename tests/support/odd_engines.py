"""Simulated engines that hang, to be named in `searcher.engine` of a searcher process."""

from __future__ import annotations

import time
from pathlib import Path

from tba_searcher.engines.engine import Completion, EngineSettings
from tba_searcher.engines.simulated import SimulatedEngine

from tba.versions import PolicyVersion

AN_HOUR_S = 3600.0


class HangingEngine(SimulatedEngine):
    """An engine whose first step does not return for an hour."""

    def __init__(self, folder: Path, version: PolicyVersion, settings: EngineSettings) -> None:
        super().__init__(folder, sorted(folder.glob("*.safetensors")), version, settings)

    def step(self) -> list[Completion]:
        time.sleep(AN_HOUR_S)
        return []


class LateEngine(HangingEngine):
    """An engine that takes an hour to start."""

    def __init__(self, folder: Path, version: PolicyVersion, settings: EngineSettings) -> None:
        super().__init__(folder, version, settings)
        time.sleep(AN_HOUR_S)
