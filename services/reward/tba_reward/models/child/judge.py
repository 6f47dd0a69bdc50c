"""What a model process does with asks, whatever its models are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tba_reward.models.messages import Ask, FailureReason


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an ask has no score."""

    reason: FailureReason
    detail: str


@dataclass(frozen=True, slots=True)
class Job:
    """An ask as the models need it. `num_tokens`: of its longest row; `num_rows`: rows that it adds to a batch."""

    ask: Ask
    tokens: Any
    num_tokens: int
    num_rows: int = 1


class Judge(Protocol):
    """A set of models that is loaded."""

    @property
    def digest(self) -> str:
        """SHA-256 of all files of the models."""
        ...

    def prepare(self, ask: Ask) -> Job | Refusal:
        """Tokenize one ask."""
        ...

    def score(self, jobs: Sequence[Job]) -> list[float | Refusal]:
        """One outcome per job, in order; the jobs are computed together.

        Raises:
            Exception: whatever the models raise; then nothing is known about any of the jobs.
        """
        ...
