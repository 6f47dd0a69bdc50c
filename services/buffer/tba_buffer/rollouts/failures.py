"""Count why stored rollouts failed to score. Only payloads hold the reasons, so the newest failed ones are read."""

from __future__ import annotations

import time
from collections import Counter, defaultdict

import msgspec
import numpy as np

from tba.api import FailedReason
from tba_buffer.index.log_follower import IndexView
from tba_buffer.rollouts.lost_payloads import UNREADABLE
from tba_buffer.rollouts.selection import Selection, select_rows
from tba_buffer.storage.context import Context
from tba_buffer.storage.redis_client import redis_errors

MAX_READ = 500
MAX_BYTES = 8 * 1024 * 1024
"""Most payload bytes in memory at once."""
EVERY_S = 2.0
"""How long reasons are cached, because many clients ask for /v1/stats."""
MAX_CHARS = 300


class _Glance(msgspec.Struct, gc=False):
    """The only field of a stored rollout that is decoded."""

    reward_reason: str | None = None


_GLANCES = msgspec.msgpack.Decoder(_Glance)


class FailureReader:
    """Reads the reasons of failed rollouts, and caches them for EVERY_S."""

    def __init__(self, context: Context, view: IndexView) -> None:
        self._context = context
        self._view = view
        self._due_s = 0.0
        self._position = -1
        self._kept: list[FailedReason] = []

    async def reasons(self) -> list[FailedReason]:
        """Return the reasons of the newest failed rollouts (at most MAX_READ and MAX_BYTES), the commonest first.

        Each reason has its number of rollouts, and its commonest `REASON: DETAIL` text as an example.
        """
        index = await self._view.catch_up()
        if not index.num_failed:
            return []
        if self._position == index.position or (self._kept and time.monotonic() < self._due_s):
            return self._kept
        position = index.position
        rows = select_rows(index, Selection(status="failed"), MAX_READ)
        sizes = np.cumsum(index.column("num_bytes", rows).astype(np.int64))
        ids = index.rollout_ids(rows[: max(1, int(np.searchsorted(sizes, MAX_BYTES, side="right")))])
        with redis_errors("read why rollouts have no score"):
            payloads = await self._context.redis.hmget(self._context.keys.payloads, ids)
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for payload in payloads:
            if payload is None:  # evicted since the index was read
                continue
            try:
                text = _GLANCES.decode(payload).reward_reason or UNREADABLE
            except (msgspec.DecodeError, ValueError):  # who reads the rollout itself notes the damage
                text = UNREADABLE
            found[text.partition(":")[0]][text] += 1
        self._kept = [
            FailedReason(reason=reason[:MAX_CHARS], num=texts.total(), example=texts.most_common(1)[0][0][:MAX_CHARS])
            for reason, texts in sorted(found.items(), key=lambda pair: (-pair[1].total(), pair[0]))
        ]
        self._position, self._due_s = position, time.monotonic() + EVERY_S
        return self._kept
