"""The number of searchers that an operator asked for, in Redis, with a line of the audit for every change."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tba.api import MAX_CHANGES_PER_PAGE, ScaleAudit, ScaleRequest
from tba_buffer.storage import buffer_epoch
from tba_buffer.storage.context import Context, needed, parse_number
from tba_buffer.storage.redis_client import redis_errors


@dataclass(frozen=True, slots=True)
class DesiredSearchers:
    """The last request; revision 0: there was none. `num` None: as the recipe or the chart says."""

    revision: int
    num: int | None


class ScaleRequests:
    """Reads and changes the desired number."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def read(self) -> DesiredSearchers:
        """Return the last request."""
        with redis_errors("read how many searchers are desired"):
            revision, num = await self._context.redis.hmget(self._context.keys.scaling, "revision", "wanted")
        key = self._context.keys.scaling
        return DesiredSearchers(
            needed(key, "revision", lambda: parse_number(revision)),
            None if num is None else needed(key, "wanted", lambda: parse_number(num)),
        )

    async def change(self, request: ScaleRequest) -> int:
        """Ask for another number. A request id that made a change before changes nothing.

        Returns:
            The revision that the request made.

        Raises:
            SupersededError: this buffer process does not own the run.
        """
        keys = self._context.keys
        reply = await self._context.scripts.run(
            "scale",
            [keys.run, keys.scaling, keys.scaling_changes, keys.scaling_requests, keys.epoch],
            [
                request.request_id,
                self._context.epoch.number,
                self._context.clock(),
                json.dumps(request.num_searchers),
                json.dumps(request.reason),
            ],
        )
        if reply == buffer_epoch.SUPERSEDED:
            raise await buffer_epoch.refusal(self._context, "a change of the number of searchers")
        return int(reply[1])

    async def changes(self, *, after: int, limit: int = MAX_CHANGES_PER_PAGE) -> tuple[list[ScaleAudit], int | None]:
        """Return at most `limit` changes after a revision, oldest first, and the revision to continue after, if any."""
        keys, last = self._context.keys, after + limit
        with redis_errors("read the audit of the searchers"):
            async with self._context.redis.pipeline(transaction=True) as pipe:
                pipe.lrange(keys.scaling_changes, after, last - 1)
                pipe.llen(keys.scaling_changes)
                lines, num_lines = await pipe.execute()
        found = [
            needed(keys.scaling_changes, f"line {revision}", lambda line=line: ScaleAudit.model_validate_json(line))
            for revision, line in enumerate(lines, after + 1)
        ]
        return found, last if lines and last < num_lines else None
