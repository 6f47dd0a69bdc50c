"""The work of a model process: requests wait, are cut into batches by tokens, and each is answered once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tba_reward.model_server.model_messages import (
    BatchStarted,
    CancelRequest,
    FailureReason,
    FromChild,
    ScoreAnswer,
    ScoreRequest,
)


@dataclass(frozen=True, slots=True)
class NoScore:
    """Why a request has no score."""

    reason: FailureReason
    detail: str


@dataclass(frozen=True, slots=True)
class TokenizedRequest:
    """A request as the models need it.

    Attributes:
        num_tokens: length of its longest row.
        num_rows: rows that it adds to a batch.
    """

    request: ScoreRequest
    tokens: Any
    num_tokens: int
    num_rows: int = 1


class Judge(Protocol):
    """A set of models that is loaded."""

    @property
    def digest(self) -> str:
        """SHA-256 of all files of the models."""
        ...

    def prepare(self, request: ScoreRequest) -> TokenizedRequest | NoScore:
        """Tokenize one request."""
        ...

    def score(self, batch: Sequence[TokenizedRequest]) -> list[float | NoScore]:
        """Return one outcome per request, in order; they are computed as one batch.

        Raises:
            Exception: an error of the models; then no request of the batch has an outcome.
        """
        ...


def cut_batches(waiting: Sequence[TokenizedRequest], batch_tokens: int) -> list[list[TokenizedRequest]]:
    """Cut requests into batches of similar lengths, each of at most `batch_tokens` tokens with its padding.

    A request that is longer than that is a batch of its own, and so is one with `alone`.
    """
    batches = [[each] for each in waiting if each.request.alone]
    batch: list[TokenizedRequest] = []
    num_rows = 0
    for each in sorted((each for each in waiting if not each.request.alone), key=lambda each: each.num_tokens):
        # sorted: this one is the longest so far, and every row of the batch is padded to its length
        if batch and (num_rows + each.num_rows) * each.num_tokens > batch_tokens:
            batches.append(batch)
            batch, num_rows = [], 0
        batch.append(each)
        num_rows += each.num_rows
    return [*batches, batch] if batch else batches


class Batcher:
    """The requests that wait, and their batches.

    Args:
        judge: the models.
        batch_tokens: most tokens of one batch, padding included.
        send: sends a message to the service.
    """

    def __init__(self, judge: Judge, batch_tokens: int, send: Callable[[FromChild], None]) -> None:
        self._judge, self._batch_tokens, self._send = judge, batch_tokens, send
        self._waiting: dict[int, TokenizedRequest] = {}
        self._num_tokens = 0

    @property
    def is_full(self) -> bool:
        """Whether a batch is full, so that waiting for more requests wins nothing."""
        return self._num_tokens >= self._batch_tokens

    def take(self, message: ScoreRequest | CancelRequest) -> None:
        """Tokenize a request, or forget one that nobody waits for any more."""
        if isinstance(message, CancelRequest):
            cancelled = self._waiting.pop(message.number, None)
            if cancelled is not None:  # else it was answered already
                self._num_tokens -= cancelled.num_tokens * cancelled.num_rows
                self._answer(message.number, NoScore("exception", "its request has ended"))
            return
        try:
            tokenized = self._judge.prepare(message)
        except Exception as error:  # a tokenizer or chat template may raise anything; it is reported
            tokenized = _no_score(error)
        if isinstance(tokenized, NoScore):
            self._answer(message.number, tokenized)
            return
        self._waiting[message.number] = tokenized
        self._num_tokens += tokenized.num_tokens * tokenized.num_rows

    def compute(self) -> None:
        """Answer all requests that wait."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        self._num_tokens = 0
        for batch in cut_batches(waiting, self._batch_tokens):
            self._send(BatchStarted(numbers=[each.request.number for each in batch]))
            self._compute(batch)

    def _compute(self, batch: Sequence[TokenizedRequest]) -> None:
        """Answer one batch; if it fails, its halves, so that only the request that causes it fails."""
        try:
            outcomes = self._judge.score(batch)
        except torch.AcceleratorError:
            raise  # the device is lost to this process: it ends, and another one gets each request here alone
        except Exception as error:  # models may raise anything; it is reported
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if len(batch) > 1:
                half = len(batch) // 2
                self._compute(batch[:half])
                self._compute(batch[half:])
                return
            outcomes = [_no_score(error)]
        for each, outcome in zip(batch, outcomes, strict=True):
            self._answer(each.request.number, outcome)

    def _answer(self, number: int, outcome: float | NoScore) -> None:
        if isinstance(outcome, NoScore):
            self._send(ScoreAnswer(number=number, reason=outcome.reason, detail=outcome.detail))
        else:
            self._send(ScoreAnswer(number=number, value=outcome))


def _no_score(error: Exception) -> NoScore:
    # the CPU allocator raises a plain RuntimeError
    no_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
    reason: FailureReason = "out_of_memory" if no_memory else "exception"
    return NoScore(reason, f"{type(error).__name__}: {error}"[:500])
