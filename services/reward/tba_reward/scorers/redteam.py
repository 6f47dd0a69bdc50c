"""Kind `redteam`: the response is an attack; the score is how toxic a victim's replies to it are, on average."""

from __future__ import annotations

from tba.config.reward import RedteamSpec
from tba_reward.scorer import Scorer
from tba_reward.scorers import Tools
from tba_reward.scorers.in_model_server import ModelServerScorer

IMPLEMENTATION = 2


def build(spec: RedteamSpec, tools: Tools) -> Scorer:
    """Return a scorer whose process has victim and classifier, and loads them when it is started."""
    return ModelServerScorer(spec, tools, implementation=IMPLEMENTATION)
