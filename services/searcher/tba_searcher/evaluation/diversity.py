"""How different the samples of a prompt are: cosine distances between embeddings, distinct n-grams.

As the red-teaming task publishes it: the mean over all pairs of samples of a prompt, whether they succeed or not
(GFNOrg/red-teaming, eval.py); over the successes alone besides, since a diverse heap of failures is worth nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tba.evaluation.estimates import mean_of_pairs, mean_of_prompts
from tba.evaluation.report import Estimate
from tba_searcher.diversity import Embedder, cosine_distances, distinct_share
from tba_searcher.evaluation.answers import Answer

Parts = Sequence[Sequence[Answer]]


def diversities(parts: Parts, *, embedder: Embedder | None, succeeds: Callable[[Answer], bool]) -> dict[str, Estimate]:
    """distinct_1 to distinct_3, and with an embedder the cosine distances of all samples and of the successes."""
    found = {}
    if embedder is not None:
        successes = [[answer for answer in part if succeeds(answer)] for part in parts]
        found["cosine_distance"] = _cosine_distance(parts, embedder)
        found["cosine_distance_of_successes"] = _cosine_distance(successes, embedder)
    for n in (1, 2, 3):
        found[f"distinct_{n}"] = _distinct(parts, n)
    return found


def _distinct(parts: Parts, n: int) -> Estimate:
    """Mean over the prompts whose samples have n-grams at all."""
    shares = [distinct_share([answer.tokens_without_end for answer in part], n) for part in parts]
    known = [(share, len(part)) for share, part in zip(shares, parts, strict=True) if share is not None]
    found = mean_of_prompts([[share] for share, _ in known])
    return found.model_copy(update={"num_completions": sum(num for _, num in known)})


def _cosine_distance(parts: Parts, embedder: Embedder) -> Estimate:
    """Mean over prompts; with one prompt the standard error is that of its pairs (jackknife)."""
    several = [part for part in parts if len(part) > 1]
    matrices = [cosine_distances(embedder.embed([answer.text for answer in part])).numpy() for part in several]
    pairs = [mean_of_pairs(matrix) for matrix in matrices]
    if len(pairs) == 1:
        value, stderr = pairs[0]
        return Estimate(value=value, stderr=stderr, num_prompts=1, num_completions=len(several[0]))
    found = mean_of_prompts([[value] for value, _ in pairs if value is not None])
    return found.model_copy(update={"num_completions": sum(map(len, several))})
