"""A Redis that was started again writes its append-only file anew before anything more is acknowledged.

With `aof-load-truncated yes`, its default, Redis goes on when its file ends in a transaction that was written by half.
What it has in memory is right: that transaction was not carried out. But it leaves the first commands of it in the
file, and at the start after that joins them with the next transaction, which loses what was acknowledged meanwhile
(docs/chaos.md). A file that is written anew, from memory, has them no more.

With `aof-load-truncated no`, Redis does not start over such a file, and there is nothing to do; start_redis.sh, which
starts the Redis of a local run, of Compose and of the chart, mends the file itself and sets that.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from redis.exceptions import ResponseError

from tba_buffer.redis_link import BytesRedis

KEY = "tba:file-written-by"
"""`run_id` of the Redis process that has written its file anew; of Redis, not of a run."""
WRITING = (
    "Redis was started again and is writing its append-only file anew (BGREWRITEAOF), so that no half is left in it"
)
REMEDY = (
    "or have Redis refuse a half-written file by itself: look in its log that it has cut nothing (`Truncating the "
    "AOF`), and set `aof-load-truncated no`"
)


class FreshFile:
    """Has every process of this Redis write its file anew, once.

    Args:
        redis: the client.
    """

    def __init__(self, redis: BytesRedis) -> None:
        self._redis = redis
        self._whole: str | None = None
        self._asked: str | None = None

    async def problem(self, config: Mapping[str, str], info: Mapping[str, Any]) -> str | None:
        """Why nothing may be acknowledged yet; None once the file is known to hold no half transaction.

        Args:
            config: what CONFIG GET says.
            info: what INFO says, asked after any earlier call of this.
        """
        process = str(info["run_id"])
        if process == self._whole or config.get("aof-load-truncated", "no") != "yes":
            return None
        if self._asked == process:
            if info["aof_rewrite_in_progress"] or info["aof_rewrite_scheduled"]:
                return WRITING
            if info["aof_last_bgrewrite_status"] == "ok":
                with suppress(ResponseError):  # full: then the next start of the buffer has it written once more
                    await self._redis.set(KEY, process)
                self._whole = process
                return None
        elif await self._redis.get(KEY) == process.encode():
            self._whole = process
            return None
        return await self._ask(process)

    async def _ask(self, process: str) -> str:
        failed = self._asked == process
        try:
            await self._redis.bgrewriteaof()
        except ResponseError as error:
            if "in progress" not in str(error):
                return (
                    f"Redis was started again and does not write its file anew ({error}); allow BGREWRITEAOF, {REMEDY}"
                )
        self._asked = process
        if failed:
            return (
                "Redis was started again and could not write its file anew (aof_last_bgrewrite_status); give its disk "
                f"and memory room for a second copy, {REMEDY}"
            )
        return WRITING
