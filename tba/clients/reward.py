"""Client of the reward service."""

from __future__ import annotations

from collections.abc import Sequence

from tba.api import RewardInfo, RewardsReply, ScoreItem, ScoreReply, ScoreRequest
from tba.clients.http import ServiceClient, parse_reply
from tba.errors import BadReplyError


class RewardClient(ServiceClient):
    """POST /v1/score and GET /v1/rewards."""

    def score(self, items: Sequence[ScoreItem]) -> ScoreReply:
        """Score completions; each item of the reply holds a reward or an error, never both.

        Raises:
            BadReplyError: the results are not those of the items.
            ServiceError: the request as a whole failed.
        """
        body = ScoreRequest(items=list(items)).model_dump_json(exclude_none=True).encode()  # keeps null within data
        reply = parse_reply(self._call("POST", "/v1/score", json=body), ScoreReply)
        if [result.item_id for result in reply.results] != [item.item_id for item in items]:
            raise BadReplyError(
                f"{self.base_url}/v1/score answered {len(reply.results)} results for {len(items)} items, or in another "
                "order; the scores are not used"
            )
        return reply

    def rewards(self) -> list[RewardInfo]:
        """Return the tasks that the service scores."""
        return parse_reply(self._call("GET", "/v1/rewards"), RewardsReply).rewards
