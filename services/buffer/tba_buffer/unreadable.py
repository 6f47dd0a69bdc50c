"""What is stored and cannot be read: damaged, or written by a release that let larger numbers in.

Such an item fails alone. Whoever reads it leaves it out, or shows it as failed, and notes it here; GET /v1/run counts
and names it. What was found is kept in Redis, because a new base of the log no longer tells that a rollout was such.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Literal, TypeVar

from tba.api import UnreadableInfo, UnreadableItem
from tba.logs import get_logger
from tba.plain_text import one_line
from tba_buffer.keys import Keys
from tba_buffer.redis_link import BytesRedis, redis_errors

T = TypeVar("T")
Kind = Literal[
    "rollout",
    "prompt",
    "evaluation",
    "result",
    "component",
    "ledger",
    "change",
    "batch",
    "job",
    "counter",
    "run",
    "visit",
    "lease",
    "unit",
    "cursor",
]
DAMAGE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""All that reading bytes that are not what they should be raises."""
RESTORABLE = ("run", "counter")
"""Kinds that are read again and again, in the same place: once they can be read, nothing of them is unreadable."""
DECISIVE = ("state", "lineage", "step", "latest_version", "checkpoint")
"""Fields of the run that nothing is leased, drawn or evicted without; others are shown alone."""
MAX_KEPT = 1000
"""Most items that are counted: beyond it something else is wrong than some items."""
NUM_SHOWN = 20
MAX_DETAIL_CHARS = 300
log = get_logger("unreadable")


class Unreadable:
    """The items that were found."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._due: dict[str, str] = {}
        """What Redis has not got yet."""
        self._stored: set[str] = set()
        """What Redis has, as far as it was looked at."""
        self._restored: set[str] = set()
        """What Redis has, and can be read again."""

    @property
    def problem(self) -> str | None:
        """Why the service is not ready: what says how the run stands cannot be read. None: all of that can."""
        known = (field.removeprefix("run:") for field in self._known if field.startswith("run:"))
        names = sorted(name for name in known if name in DECISIVE or name.startswith("lineage "))
        if not names:
            return None
        return f"what Redis has of the run cannot be read ({', '.join(names)}); restore Redis from a copy"

    def note(self, kind: Kind, name: str, why: BaseException | str, *, at_s: float) -> None:
        """An item cannot be read; the same one again changes nothing."""
        field = f"{kind}:{name[:256]}"
        if field in self._known or (len(self._known) >= MAX_KEPT and kind not in RESTORABLE):
            return  # what the run stands on is noted however many items are damaged
        self._known.add(field)
        self._restored.discard(field)
        detail = why if isinstance(why, str) else f"{type(why).__name__}: {why}".partition(" [type=")[0]
        detail = one_line(detail)
        detail = detail[:MAX_DETAIL_CHARS].encode(errors="backslashreplace").decode()
        log.warning("unreadable", kind=kind, name=name, detail=detail)
        self._due[field] = json.dumps({"detail": detail, "found_at_s": at_s})

    def read(self, kind: Kind, name: str, how: Callable[[], T], *, at_s: float) -> T | None:
        """What `how` reads, or None, and the item is noted."""
        try:
            found = how()
        except DAMAGE as error:
            self.note(kind, name, error, at_s=at_s)
            return None
        if kind in RESTORABLE:
            self.forget(kind, name)
        return found

    def forget(self, kind: Kind, name: str) -> None:
        """An item can be read; if it could not before, it was restored."""
        field = f"{kind}:{name[:256]}"
        if field in self._known or field in self._stored:
            self._known.discard(field)
            self._due.pop(field, None)
            self._restored.add(field)

    async def keep(self, redis: BytesRedis, keys: Keys) -> None:
        """Write down what was found.

        Raises:
            UnavailableError: Redis did not take it; the next call tries again.
        """
        due, restored = dict(self._due), set(self._restored)
        if not due and not restored:
            return
        with redis_errors("note what cannot be read"):
            num_kept = await redis.hlen(keys.unreadable)
            for field, text in list(due.items())[: max(0, MAX_KEPT - num_kept)]:
                await redis.hsetnx(keys.unreadable, field, text)
            if restored:
                await redis.hdel(keys.unreadable, *restored)
        for field in due:
            self._due.pop(field, None)
        self._restored -= restored

    async def info(self, redis: BytesRedis, keys: Keys) -> UnreadableInfo | None:
        """What was found since the run began; None: all that was read could be.

        Raises:
            UnavailableError: Redis did not answer.
        """
        await self.keep(redis, keys)
        with redis_errors("read what cannot be read"):
            raw = await redis.hgetall(keys.unreadable)
        self._stored = {field.decode(errors="replace") for field in raw}
        if not raw:
            return None
        items = [_item(field.decode(errors="replace"), text) for field, text in raw.items()]
        items.sort(key=lambda item: (-item.found_at_s, item.kind, item.name))
        return UnreadableInfo(num=dict(sorted(Counter(item.kind for item in items).items())), items=items[:NUM_SHOWN])


def _item(field: str, text: bytes) -> UnreadableItem:
    kind, _, name = field.partition(":")
    try:
        return UnreadableItem(kind=kind, name=name, **json.loads(text))
    except DAMAGE:
        return UnreadableItem(kind=kind, name=name, detail="the note of why is damaged itself", found_at_s=0.0)
