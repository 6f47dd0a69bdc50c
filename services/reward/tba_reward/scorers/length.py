"""Kind `length`: the response is not too long."""

from __future__ import annotations

from tba.config.reward import LengthSpec
from tba_reward.scorer import Example, InlineScorer, Item, Params, Scorer, params_of, version_of
from tba_reward.scorers import Tools

IMPLEMENTATION = 2


def build(spec: LengthSpec, tools: Tools) -> Scorer:
    """Return the scorer."""
    example = Example(Item(prompt="", response=""), 1.0)
    return InlineScorer(score, params_of(spec), version=version_of(spec, IMPLEMENTATION), example=example)


def score(item: Item, params: Params) -> float:
    """Return 1.0 if the response has at most `max_length` characters."""
    return float(len(item.response) <= params["max_length"])
