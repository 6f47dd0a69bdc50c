"""Kind `format`: the response matches a regular expression.

In worker processes: there are patterns and texts for which Python's `re` takes longer than the universe has been there.
"""

from __future__ import annotations

import re
from functools import lru_cache

from tba.config.reward import FormatSpec
from tba_reward.scorers.base import Item, Params, Scorer, Tools, params_of, version_of
from tba_reward.workers.scorer import WorkerRule, WorkerScorer

IMPLEMENTATION = 1


def build(spec: FormatSpec, tools: Tools) -> Scorer:
    """The scorer."""
    return WorkerScorer(
        WorkerRule(function="tba_reward.scorers.format:score", params=params_of(spec), shared=True),
        pool=tools.pool,
        timeout_s=tools.timeout_s(spec),
        version=version_of(spec, IMPLEMENTATION),
        example=None,  # which text matches a pattern is not known
    )


def score(item: Item, params: Params) -> float:
    """1.0 if the response, or with `full` all of it, matches the pattern."""
    pattern = _compiled(params["pattern"])
    match = pattern.fullmatch(item.response) if params["full"] else pattern.search(item.response)
    return float(match is not None)


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
