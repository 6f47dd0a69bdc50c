"""What an evaluation lease is reported with, beside the rewards: length, KL, diversity.

The samples of an evaluation are drawn at the policy temperature from exactly the pinned version, so their sampler
log-probs are log pi, and the mean of log pi - log pi_start over samples estimates the KL divergence from the starting
model. Greedy completions are no samples of pi: they are reported with rewards and lengths alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tba.api import EvalResult
from tba.numbers import known
from tba_searcher.diversity import Embedder, distinct_share, mean_cosine_distance
from tba_searcher.engines.base import Completion
from tba_searcher.visits import Visit

ReferenceSums = Callable[[NDArray[np.int32], Sequence[NDArray[np.int32]]], list[float]]
"""(prompt tokens, responses) -> sums of log pi_start over each response, at the policy temperature."""


class Measures:
    """Makes the result of an evaluation lease.

    Args:
        reference_sums: None when `eval.kl_to_reference` is off.
        embedder: None when no `eval.embedding_model` is named.
    """

    def __init__(self, *, reference_sums: ReferenceSums | None, embedder: Embedder | None) -> None:
        self._reference_sums, self._embedder = reference_sums, embedder

    def result(self, visit: Visit, texts: Sequence[str], rewards: Sequence[float | None]) -> EvalResult:
        """The result of a complete evaluation visit (blocking: the reference and the embedding model run here).

        Args:
            texts, rewards: of its completions, in order.
        """
        completions = visit.completions
        lengths = [len(completion.response_tokens) for completion in completions]
        plain = EvalResult(lease_id=visit.lease.lease_id, rewards=list(rewards), num_response_tokens=lengths)
        if visit.lease.kind != "sample":
            return plain
        responses = [_without_end(completion) for completion in completions]
        return plain.model_copy(
            update={
                "log_ratios": self._log_ratios(visit),
                **{f"distinct_{n}": distinct_share(responses, n) for n in (1, 2, 3)},
                "embedding_distance": self._embedding_distance(texts),
            }
        )

    def _log_ratios(self, visit: Visit) -> list[float | None] | None:
        if self._reference_sums is None:
            return None
        responses = [completion.response_tokens for completion in visit.completions]
        sums = self._reference_sums(np.array(visit.prompt_tokens, np.int32), responses)
        own = [float(completion.sampler_logprobs.sum(dtype=np.float64)) for completion in visit.completions]
        return [known(mine - theirs) for mine, theirs in zip(own, sums, strict=True)]

    def _embedding_distance(self, texts: Sequence[str]) -> float | None:
        if self._embedder is None or len(texts) < 2:
            return None
        return known(mean_cosine_distance(self._embedder.embed(texts)))


def unknown_result(visit: Visit) -> EvalResult:
    """The result of a lease whose prompt cannot be sampled."""
    num = visit.lease.num_rollouts
    return EvalResult(lease_id=visit.lease.lease_id, rewards=[None] * num, num_response_tokens=[0] * num)


def _without_end(completion: Completion) -> NDArray[np.int32]:
    """The response without the end-of-sequence token, which every complete response has."""
    return completion.response_tokens[: -1 if completion.finish_reason == "stop" else None]
