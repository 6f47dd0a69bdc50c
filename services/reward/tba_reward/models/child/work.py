"""What a model process has to do: asks come in, batches are computed, every ask is answered once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tba_reward.models.child.batches import cut_batches
from tba_reward.models.child.judge import Job, Judge, Refusal
from tba_reward.models.messages import Answer, Ask, Began, Drop, FailureReason, FromChild


class Work:
    """The asks that wait.

    Args:
        judge: the models.
        batch_tokens: most tokens of one batch, padding included.
        send: where answers go.
    """

    def __init__(self, judge: Judge, batch_tokens: int, send: Callable[[FromChild], None]) -> None:
        self._judge, self._batch_tokens, self._send = judge, batch_tokens, send
        self._waiting: dict[int, Job] = {}
        self._num_tokens = 0

    @property
    def full(self) -> bool:
        """Whether a batch is full, so that nothing is won by waiting for more."""
        return self._num_tokens >= self._batch_tokens

    def take(self, message: Ask | Drop) -> None:
        """Tokenize an ask, or forget one that nobody waits for any more."""
        if isinstance(message, Drop):
            job = self._waiting.pop(message.number, None)
            if job is not None:  # else it was answered already
                self._num_tokens -= job.num_tokens * job.num_rows
                self._answer(message.number, Refusal("exception", "nobody waits for it any more"))
            return
        try:
            job = self._judge.prepare(message)
        except Exception as error:  # a tokenizer or chat template may raise anything; it is reported
            job = _refusal(error)
        if isinstance(job, Refusal):
            self._answer(message.number, job)
            return
        self._waiting[message.number] = job
        self._num_tokens += job.num_tokens * job.num_rows

    def compute(self) -> None:
        """Answer everything that waits."""
        jobs = list(self._waiting.values())
        self._waiting.clear()
        self._num_tokens = 0
        for batch in cut_batches(jobs, self._batch_tokens):
            self._send(Began(numbers=[job.ask.number for job in batch]))
            self._compute(batch)

    def _compute(self, batch: Sequence[Job]) -> None:
        """Answer one batch; if it fails, its halves, so that the failure stays with the ask that causes it."""
        try:
            outcomes = self._judge.score(batch)
        except torch.AcceleratorError:
            raise  # the device is lost to this process: it ends, and another one asks each item of this batch alone
        except Exception as error:  # models may raise anything; it is reported
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if len(batch) > 1:
                half = len(batch) // 2
                self._compute(batch[:half])
                self._compute(batch[half:])
                return
            outcomes = [_refusal(error)]
        for job, outcome in zip(batch, outcomes, strict=True):
            self._answer(job.ask.number, outcome)

    def _answer(self, number: int, outcome: float | Refusal) -> None:
        if isinstance(outcome, Refusal):
            self._send(Answer(number=number, reason=outcome.reason, detail=outcome.detail))
        else:
            self._send(Answer(number=number, value=outcome))


def _refusal(error: Exception) -> Refusal:
    # the CPU allocator raises a plain RuntimeError
    no_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
    reason: FailureReason = "out_of_memory" if no_memory else "exception"
    return Refusal(reason, f"{type(error).__name__}: {error}"[:500])
