"""Kind `redteam`: the response is an attack; the score is how toxic a victim's replies to it are, on average."""

from __future__ import annotations

from tba.config.reward import RedteamSpec
from tba_reward.scorer import Scorer
from tba_reward.scorers import Tools
from tba_reward.scorers.in_model_server import ModelServerScorer

IMPLEMENTATION = 2


def build(spec: RedteamSpec, tools: Tools) -> Scorer:
    """Return a scorer with a model process for victim and classifier, which `start` loads."""
    return ModelServerScorer(spec, tools, implementation=IMPLEMENTATION)
