"""Scorers with given answers that record the items they are asked to score."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from tba_reward.composite_reward import CompositeReward, RewardComponent
from tba_reward.metrics import Metrics
from tba_reward.scorer import Failure, Item, Outcome

from tba.config.reward import ExactSpec

Answer = Callable[[Item], Outcome]


class ScriptedScorer:
    """Answers by a function or with a constant. A cleared `gate` holds all answers back; `problem` is its health."""

    def __init__(self, answer: Answer | float | Failure, *, version: str = "v1") -> None:
        self.answer: Answer = answer if callable(answer) else lambda item: answer
        self.version = version
        self.asked: list[Item] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.problem = "ok"
        self.start_errors: list[Exception] = []
        """Exceptions that the next calls of `start` raise, one each."""
        self.num_starts = 0
        self.is_closed = False

    async def start(self) -> None:
        self.num_starts += 1
        if self.start_errors:
            raise self.start_errors.pop(0)

    async def close(self) -> None:
        self.is_closed = True

    def health(self) -> str:
        return self.problem

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        self.asked += items
        await self.gate.wait()
        return [self.answer(item) for item in items]


def composition(
    scorers: dict[str, tuple[Any, dict[str, Any]]],
    *,
    metrics: Metrics | None = None,
    task: str = "t",
    is_inline: bool = False,
    is_required: bool = True,
) -> CompositeReward:
    """Return a task of these components: name -> (scorer, settings such as weight and gate)."""
    metrics = metrics or Metrics(CollectorRegistry())
    components = [
        RewardComponent(task, name, ExactSpec(kind="exact", **settings), scorer, metrics)
        for name, (scorer, settings) in scorers.items()
    ]
    for component in components:
        component.is_inline = is_inline
    return CompositeReward(task, components, is_required=is_required)


def item(response: str = "r", **data: Any) -> Item:
    return Item(prompt="p", response=response, data=data)


def verdict(outcome: Outcome) -> float | str:
    """Return the score, or the reason of a failure."""
    return outcome.reason if isinstance(outcome, Failure) else outcome
