"""Kind `exact`: compare the whole response with the gold answer, as texts."""

from __future__ import annotations

from tba.config.reward import ExactSpec
from tba_reward.scorer import (
    BadDataError,
    InlineScorer,
    Item,
    Params,
    Scorer,
    gold_answers,
    params_of,
    score_any,
    version_of,
)
from tba_reward.scorers import Tools

IMPLEMENTATION = 1


def build(spec: ExactSpec, tools: Tools) -> Scorer:
    """Return the scorer."""
    return InlineScorer(score, params_of(spec), version=version_of(spec, IMPLEMENTATION))


def score(item: Item, params: Params) -> float:
    """Return 1.0 if response and gold answer are the same text, without the white space around it; else 0.0."""
    field = params["field"]

    def is_equal(gold: object) -> bool:
        # JSON's true is an int in Python, and no answer
        if not isinstance(gold, str | int) or isinstance(gold, bool):
            raise BadDataError(f"data needs a text `{field}`, got {gold!r:.200}")
        return item.response.strip() == str(gold).strip()

    return score_any(gold_answers(item, field), is_equal)
