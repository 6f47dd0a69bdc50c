"""Stored items that cannot be read: damaged ones, or those of a release that accepted larger numbers.

Such an item fails alone. Its reader leaves it out, or shows it as failed, and notes it here; GET /v1/run counts and
names it. The notes are kept in Redis, because a new checkpoint of the log no longer shows that a rollout was damaged.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Literal, TypeVar

from tba.api import UnreadableInfo, UnreadableItem
from tba.fields import one_line
from tba.logs import get_logger
from tba_buffer.storage.client import BytesRedis, redis_errors
from tba_buffer.storage.keys import Keys

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
DAMAGE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""The errors that parsing damaged bytes can raise."""
RESTORABLE = ("run", "counter")
"""Kinds that are read again and again in the same place, so that a repair shows."""
DECISIVE = ("state", "lineage", "step", "latest_version", "checkpoint")
"""Fields of the run without which nothing is leased, drawn or evicted. Damage to others is only shown."""
MAX_KEPT = 1000
"""Most items that are counted. With more, the items are not the problem."""
NUM_SHOWN = 20
MAX_DETAIL_CHARS = 300
log = get_logger("damage")


class DamagedItems:
    """The damaged items that were found."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._due: dict[str, str] = {}
        """Not yet in Redis."""
        self._stored: set[str] = set()
        """In Redis, as of the last read."""
        self._restored: set[str] = set()
        """In Redis, but readable again."""

    @property
    def problem(self) -> str | None:
        """Why the service is not ready: decisive fields of the run are damaged. None: they can be read."""
        known = (field.removeprefix("run:") for field in self._known if field.startswith("run:"))
        names = sorted(name for name in known if name in DECISIVE or name.startswith("lineage "))
        if not names:
            return None
        return f"what Redis has of the run cannot be read ({', '.join(names)}); restore Redis from a copy"

    def note(self, kind: Kind, name: str, why: BaseException | str, *, at_s: float) -> None:
        """Note that an item cannot be read. Noting it again changes nothing."""
        field = f"{kind}:{name[:256]}"
        if field in self._known or (len(self._known) >= MAX_KEPT and kind not in RESTORABLE):
            return  # readiness depends on the restorable kinds: they are noted however many items are damaged
        self._known.add(field)
        self._restored.discard(field)
        detail = why if isinstance(why, str) else f"{type(why).__name__}: {why}".partition(" [type=")[0]
        detail = one_line(detail)
        detail = detail[:MAX_DETAIL_CHARS].encode(errors="backslashreplace").decode()
        log.warning("damaged_item", kind=kind, name=name, detail=detail)
        self._due[field] = json.dumps({"detail": detail, "found_at_s": at_s})

    def read(self, kind: Kind, name: str, how: Callable[[], T], *, at_s: float) -> T | None:
        """Return what `how` reads; None where it cannot, and then the item is noted."""
        try:
            found = how()
        except DAMAGE_ERRORS as error:
            self.note(kind, name, error, at_s=at_s)
            return None
        if kind in RESTORABLE:
            self.forget(kind, name)
        return found

    def forget(self, kind: Kind, name: str) -> None:
        """Note that an item can be read. If it could not before, it was restored."""
        field = f"{kind}:{name[:256]}"
        if field in self._known or field in self._stored:
            self._known.discard(field)
            self._due.pop(field, None)
            self._restored.add(field)

    async def keep(self, redis: BytesRedis, keys: Keys) -> None:
        """Store the notes in Redis.

        Raises:
            UnavailableError: Redis did not take it; the next call tries again.
        """
        due, restored = dict(self._due), set(self._restored)
        if not due and not restored:
            return
        with redis_errors("note what cannot be read"):
            num_kept = await redis.hlen(keys.damaged_items)
            # Redis holds notes of earlier processes too
            for field, text in list(due.items())[: max(0, MAX_KEPT - num_kept)]:
                await redis.hsetnx(keys.damaged_items, field, text)
            if restored:
                await redis.hdel(keys.damaged_items, *restored)
        # only now: after an error the next call tries again
        for field in due:
            self._due.pop(field, None)
        self._restored -= restored

    async def info(self, redis: BytesRedis, keys: Keys) -> UnreadableInfo | None:
        """Return what was found since the run began; None when nothing was.

        Raises:
            UnavailableError: Redis did not answer.
        """
        await self.keep(redis, keys)
        with redis_errors("read what cannot be read"):
            raw = await redis.hgetall(keys.damaged_items)
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
    except DAMAGE_ERRORS:
        return UnreadableItem(kind=kind, name=name, detail="the note of why is damaged itself", found_at_s=0.0)
