"""A reward plugin with every way in which a scorer can misbehave; `response` says which."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tba_reward.registry import BadDataError, Example, Registry, Reward


class StubbornError(Exception):
    """Cannot be pickled back: its constructor wants two arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self.lock = threading.Lock()


def misbehave(prompt: str, response: str, data: Mapping[str, Any]) -> Any:
    """Do what `response` says."""
    if "pid_file" in data:
        Path(data["pid_file"]).write_text(str(os.getpid()))
    match response:
        case "hang":
            while True:
                pass
        case "sleep":
            time.sleep(data["for_s"])
        case "crash":
            os._exit(7)
        case "exit":
            raise SystemExit(3)
        case "raise":
            raise StubbornError("broken scorer", "x")
        case "timeout":
            raise TimeoutError("the scorer's own timeout")
        case "bad_data":
            raise BadDataError("no such thing")
        case "nan":
            return float("nan")
        case "inf":
            return -float("inf")
        case "text":
            return "1.0"
        case "none":
            return None
        case "pid":
            return os.getpid()
    return 0.5


def register(registry: Registry) -> None:
    """Add `slow` (in workers) and `inline` (in the service)."""
    example = Example(prompt="", response="fine", data={}, reward=0.5)
    registry.add(Reward(task="slow", version="slow-1", function=misbehave, example=example))
    registry.add(Reward(task="inline", version="inline-1", function=misbehave, example=example, fast=True))
