"""Reward functions as people write them for TRL, good and bad."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import numpy as np


def contains(prompts: list[str], completions: list[str], word: list[str], **kwargs: Any) -> list[float | None]:
    """1 for each completion with the word; None where there is no word to look for."""
    return [None if not w else float(w in c) for c, w in zip(completions, word, strict=True)]


def no_kwargs(completions: list[str], prompts: list[str], scale: list[float] = [1.0]) -> list[float]:  # noqa: B006
    """Takes only what it names."""
    return [len(c) * scale[0] for c in completions]


def sees_finish(prompts: list[str], completions: list[str], finish_reasons: list[str], **kwargs: Any) -> list[float]:
    """Names tba's own column."""
    assert "prompts" not in kwargs
    return [float(reason == "length") for reason in finish_reasons]


async def later(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """An async function, as newer releases of TRL take them."""
    await asyncio.sleep(0)
    return [0.25 for _ in completions]


def numpy_scores(prompts: list[str], completions: list[str], **kwargs: Any) -> Any:
    """An array instead of a list."""
    return np.full(len(completions), 0.5, dtype=np.float32)


def misbehaves(prompts: list[str], completions: list[str], **kwargs: Any) -> Any:
    """Does what the completion says."""
    match completions[0]:
        case "hang":
            while True:
                time.sleep(0.01)
        case "crash":
            os._exit(3)
        case "raise":
            raise KeyError("no such key")
        case "nothing":
            return None
        case "two":
            return [1.0, 2.0]
        case "text":
            return ["good"]
        case "nan":
            return [float("nan")]
    return [1.0]


class Judge:
    """A callable object, as TRL takes them too."""

    def __call__(self, prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        """The length."""
        return [float(len(c)) for c in completions]


judge = Judge()
