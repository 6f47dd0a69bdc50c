"""Kind `length`: the response is neither too short nor too long; outside the bounds the score may fall gradually."""

from __future__ import annotations

from tba.config.reward import LengthSpec
from tba_reward.scorer import Example, InlineScorer, Item, Params, Scorer, params_of, version_of
from tba_reward.scorers import Tools

IMPLEMENTATION = 1


def build(spec: LengthSpec, tools: Tools) -> Scorer:
    """Return the scorer."""
    # the shortest response that scores 1, whatever the bounds are
    shortest = "a" * spec.min_length if spec.unit == "chars" else "a " * spec.min_length
    example = Example(Item(prompt="", response=shortest), 1.0)
    return InlineScorer(score, params_of(spec), version=version_of(spec, IMPLEMENTATION), example=example)


def score(item: Item, params: Params) -> float:
    """Return 1.0 within the bounds; outside, 1 less per `soft_length` beyond the bound, not below 0."""
    length = len(item.response) if params["unit"] == "chars" else len(item.response.split())
    longest = params["max_length"]
    excess = max(params["min_length"] - length, 0 if longest is None else length - longest, 0)
    if excess == 0:
        return 1.0
    soft = params["soft_length"]
    return max(0.0, 1.0 - excess / soft) if soft else 0.0
