"""GET /v1/rollouts: stored rollouts as people read them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query

from tba.api import RolloutDetail, RolloutOrder, RolloutPage
from tba.api.base import VersionText
from tba.api.rollouts import RewardStatus
from tba.service import Authenticator, problems
from tba_buffer.buffer import Buffer
from tba_buffer.cursors import MAX_CURSOR_CHARS
from tba_buffer.rollout_views import PageRequest

MAX_PER_PAGE = 100
MAX_TEXT_CHARS_PER_ROLLOUT = 10_000


def router(buffer: Buffer, auth: Authenticator) -> APIRouter:
    """Read rollouts."""
    api = APIRouter(prefix="/v1/rollouts", dependencies=[Depends(auth.require("viewer"))])

    @api.get("", operation_id="list_rollouts", responses=problems(400, 404))
    async def list_rollouts(
        order: RolloutOrder = "newest",
        prompt_id: Annotated[str | None, Query(min_length=1, max_length=256)] = None,
        version: VersionText | None = None,
        status: RewardStatus | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PER_PAGE)] = 20,
        cursor: Annotated[str | None, Query(max_length=MAX_CURSOR_CHARS)] = None,
        text_chars: Annotated[int, Query(ge=0, le=MAX_TEXT_CHARS_PER_ROLLOUT)] = 1000,
    ) -> RolloutPage:
        """Stored rollouts: the best, worst, newest or oldest, of a prompt, a version, a reward status."""
        request = PageRequest(
            order=order,
            prompt_id=prompt_id,
            version=version,
            status=status,
            limit=limit,
            cursor=cursor,
            text_chars=text_chars,
        )
        return await buffer.rollout_views.page(request)

    @api.get("/{rollout_id}", operation_id="get_rollout")
    async def get_rollout(rollout_id: Annotated[str, Path(pattern="^[0-9a-f]{32}$")]) -> RolloutDetail:
        """Everything that is stored of one rollout."""
        return await buffer.rollout_views.one(rollout_id)

    return api
