"""Client of the reward service."""

from __future__ import annotations

from collections.abc import Sequence

from tba.api import RewardInfo, RewardsReply, ScoreItem, ScoreReply, ScoreRequest
from tba.clients.http import ServiceClient


class RewardClient(ServiceClient):
    """POST /v1/score and GET /v1/rewards."""

    def score(self, items: Sequence[ScoreItem]) -> ScoreReply:
        """Score completions; each item of the reply holds a reward or an error, never both.

        Raises:
            ServiceError: the request as a whole failed.
        """
        body = ScoreRequest(items=list(items)).model_dump_json().encode()
        return ScoreReply.model_validate_json(self._call("POST", "/v1/score", json=body).content)

    def rewards(self) -> list[RewardInfo]:
        """The tasks that the service scores."""
        return RewardsReply.model_validate_json(self._call("GET", "/v1/rewards").content).rewards
