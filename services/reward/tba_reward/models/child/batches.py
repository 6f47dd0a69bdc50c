"""Cuts what waits into batches by tokens."""

from __future__ import annotations

from collections.abc import Sequence

from tba_reward.models.child.judge import Job


def cut_batches(jobs: Sequence[Job], batch_tokens: int) -> list[list[Job]]:
    """Batches of similar lengths, each of at most `batch_tokens` tokens with its padding.

    A job that is longer than that is a batch of its own, and so is one that wants to be alone.
    """
    batches = [[job] for job in jobs if job.ask.alone]
    batch: list[Job] = []
    num_rows = 0
    for job in sorted((job for job in jobs if not job.ask.alone), key=lambda job: job.num_tokens):
        # sorted: this job is the longest so far, every row is padded to it
        if batch and (num_rows + job.num_rows) * job.num_tokens > batch_tokens:
            batches.append(batch)
            batch, num_rows = [], 0
        batch.append(job)
        num_rows += job.num_rows
    return [*batches, batch] if batch else batches
