"""Kind `format`: the response matches a regular expression.

It runs in worker processes: some patterns take exponential time in Python's `re`.
"""

from __future__ import annotations

import re

from tba.config.reward import FormatSpec
from tba_reward.process_pool.job import WorkerRule
from tba_reward.scorer import Item, Params, Scorer, params_of, version_of
from tba_reward.scorers import Tools
from tba_reward.scorers.in_process_pool import ProcessPoolScorer

IMPLEMENTATION = 1


def build(spec: FormatSpec, tools: Tools) -> Scorer:
    """Return the scorer."""
    return ProcessPoolScorer(
        WorkerRule(function="tba_reward.scorers.format:score", params=params_of(spec)),
        pool=tools.pool,
        timeout_s=spec.timeout_s,
        version=version_of(spec, IMPLEMENTATION),
    )


def score(item: Item, params: Params) -> float:
    """Return 1.0 if the pattern is found anywhere in the response, else 0.0."""
    # `re` itself keeps the patterns that it has compiled
    return float(re.search(params["pattern"], item.response) is not None)
