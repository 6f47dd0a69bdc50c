"""The work of a model process: collect requests, cut them into batches by tokens, and answer each request once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tba_reward.child_messages import BatchStarted, CancelRequest, FromModels, ScoreAnswer, ScoreRequest
from tba_reward.scorer import Failure, Outcome


@dataclass(frozen=True, slots=True)
class TokenizedRequest:
    """A request with its token ids.

    Attributes:
        num_tokens: length of its longest row, tokens still to be generated included.
        num_rows: rows that the request adds to a batch.
    """

    request: ScoreRequest
    tokens: Any
    num_tokens: int
    num_rows: int = 1


class Judge(Protocol):
    """A loaded set of models that scores requests."""

    @property
    def digest(self) -> str:
        """SHA-256 of all files of the models."""
        ...

    def prepare(self, request: ScoreRequest) -> TokenizedRequest | Failure:
        """Tokenize one request."""
        ...

    def score(self, batch: Sequence[TokenizedRequest]) -> list[Outcome]:
        """Return one outcome per request, in order, computed as one batch.

        Raises:
            Exception: any error of the models; then no request of the batch has an outcome.
        """
        ...


def cut_batches(sizes: Sequence[tuple[int, int]], batch_tokens: int) -> list[list[int]]:
    """Cut inputs into batches of similar lengths, each of at most `batch_tokens` tokens, padding included.

    An input that is longer than `batch_tokens` is a batch of its own.

    Args:
        sizes: for each input the tokens of its longest row, and its number of rows.

    Returns:
        For each batch the indices of its inputs in `sizes`.
    """
    batches, num_rows = list[list[int]](), 0
    for at in sorted(range(len(sizes)), key=lambda at: sizes[at][0]):
        longest, rows = sizes[at]  # sorted: it is the longest so far, and every row is padded to its length
        if batches and (num_rows + rows) * longest <= batch_tokens:
            batches[-1].append(at)
            num_rows += rows
        else:
            batches.append([at])
            num_rows = rows
    return batches


class Batcher:
    """Collects requests, computes them in batches, and sends the answers."""

    def __init__(self, judge: Judge, batch_tokens: int, send: Callable[[FromModels], None]) -> None:
        self._judge, self._batch_tokens, self._send = judge, batch_tokens, send
        self._waiting: dict[int, TokenizedRequest] = {}
        self._num_tokens = 0

    @property
    def is_full(self) -> bool:
        """Whether the waiting requests fill a batch, so that there is no reason to wait for more."""
        return self._num_tokens >= self._batch_tokens

    def take(self, message: ScoreRequest | CancelRequest) -> None:
        """Tokenize a request and keep it for the next batch; drop a cancelled one and answer it with a Failure."""
        if isinstance(message, CancelRequest):
            cancelled = self._waiting.pop(message.number, None)
            if cancelled is not None:  # else it was answered already
                self._num_tokens -= cancelled.num_tokens * cancelled.num_rows
                self._answer(message.number, Failure("exception", "its request has ended"))
            return
        try:
            tokenized = self._judge.prepare(message)
        except Exception as error:  # a tokenizer or chat template may raise anything; it is reported
            tokenized = _failure_of(error)
        if isinstance(tokenized, Failure):
            self._answer(message.number, tokenized)
            return
        self._waiting[message.number] = tokenized
        self._num_tokens += tokenized.num_tokens * tokenized.num_rows

    def compute(self) -> None:
        """Compute all waiting requests in batches, and send their answers."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        self._num_tokens = 0
        others = [each for each in waiting if not each.request.alone]
        places = cut_batches([(each.num_tokens, each.num_rows) for each in others], self._batch_tokens)
        alone = [[each] for each in waiting if each.request.alone]
        for batch in [*alone, *([others[at] for at in batch] for batch in places)]:
            self._send(BatchStarted(numbers=[each.request.number for each in batch]))
            self._compute(batch)

    def _compute(self, batch: Sequence[TokenizedRequest]) -> None:
        """Compute and answer one batch. If that raises, do each half alone, so that only the faulty request fails."""
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
            outcomes = [_failure_of(error)]
        for each, outcome in zip(batch, outcomes, strict=True):
            self._answer(each.request.number, outcome)

    def _answer(self, number: int, outcome: Outcome) -> None:
        self._send(ScoreAnswer(number=number, outcome=outcome))


def _failure_of(error: Exception) -> Failure:
    # the CPU allocator raises a plain RuntimeError
    no_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
    return Failure("out_of_memory" if no_memory else "exception", f"{type(error).__name__}: {error}"[:500])
