"""Reward functions as people write them for TRL, good and bad."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import numpy as np


def contains(prompts: list[str], completions: list[str], word: list[str], **kwargs: Any) -> list[float | None]:
    """Return 1 for each completion with its word, and 0 for others; None if the word is empty."""
    return [None if not w else float(w in c) for c, w in zip(completions, word, strict=True)]


def no_kwargs(completions: list[str], prompts: list[str], scale: list[float] = [1.0]) -> list[float]:  # noqa: B006
    """Return scaled lengths; the signature has no **kwargs."""
    return [len(c) * scale[0] for c in completions]


def sees_finish(prompts: list[str], completions: list[str], finish_reasons: list[str], **kwargs: Any) -> list[float]:
    """Return 1 for responses cut at the length limit; it reads tba's own column `finish_reasons`."""
    assert "prompts" not in kwargs
    return [float(reason == "length") for reason in finish_reasons]


async def later(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """An async function, as newer releases of TRL take them."""
    await asyncio.sleep(0)
    return [0.25 for _ in completions]


def numpy_scores(prompts: list[str], completions: list[str], **kwargs: Any) -> Any:
    """Return a numpy array instead of a list."""
    return np.full(len(completions), 0.5, dtype=np.float32)


def misbehaves(prompts: list[str], completions: list[str], **kwargs: Any) -> Any:
    """Misbehave as the first completion says."""
    match completions[0]:
        case "hang":
            while True:
                pass
        case "wait":
            time.sleep(600)
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


def misbehaves_anywhere(completions: list[str], **kwargs: Any) -> list[float]:
    """Misbehave as each completion of the call says, in order."""
    for completion in completions:
        misbehaves([], [completion])
    return [1.0] * len(completions)


class Judge:
    """A callable object, as TRL takes them too."""

    def __call__(self, prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(c)) for c in completions]


judge = Judge()


def whole_call(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Return the number of items of the call for each item; raise if one completion is "bad"."""
    if "bad" in completions:
        raise ValueError("a bad completion")
    assert len(prompts) == len(completions) == len(answer)
    return [float(len(completions))] * len(completions)


def only_completions(completions: list[str]) -> list[float]:
    """Return lengths; the signature has neither prompts nor **kwargs."""
    return [float(len(c)) for c in completions]


def num_tokens(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """TRL's first example: longer completions are better, in tokens."""
    return [float(len(ids)) for ids in completion_ids]


def think_format(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    """Return 1 for each conversational completion that contains `</think>`."""
    assert all(message["role"] == "assistant" for (message,) in completions)
    return [float("</think>" in completion[0]["content"]) for completion in completions]


def last_question(prompts: list[list[dict[str, str]]], completions: Any, **kwargs: Any) -> list[float]:
    """Return the length of the last message of each conversational prompt."""
    assert "prompt" not in kwargs
    return [float(len(messages[-1]["content"])) for messages in prompts]


def at_least(completions: list[str], threshold: int, scale: float = 1.0, **kwargs: Any) -> list[float]:
    """Return `scale` for each completion of at least `threshold` characters; a recipe gives both arguments."""
    return [scale * (len(c) >= threshold) for c in completions]


def logs(completions: list[str], log_extra: Any = None, log_metric: Any = None, **kwargs: Any) -> list[float]:
    """Use the functions that newer releases of TRL offer for logging."""
    log_extra("text", completions)
    log_metric("accuracy", 0.5)
    return [1.0] * len(completions)


def needs_state(completions: list[str], trainer_state: Any) -> list[float]:
    """Use a state that only TRL's trainer can give."""
    return [float(trainer_state.global_step)] * len(completions)


def one_for_all(completions: list[str], shape: str, **kwargs: Any) -> Any:
    """Return one number for all completions, in the shape that the recipe names."""
    return {"list": [0.5], "number": 0.5, "array": np.array([0.5])}[shape]


def raises_always(completions: list[str], **kwargs: Any) -> list[float]:
    """Read a misspelt column, which always raises KeyError."""
    return [kwargs["solutoin"][0]] * len(completions)
