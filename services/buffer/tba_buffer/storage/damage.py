"""Find out what Redis has damaged or lost of this run.

A damaged item cannot be read: its bytes are damaged, or of a release that accepted larger numbers. It fails alone. Its
reader leaves it out, or shows it as failed, and notes it here (DamagedItems); GET /v1/run counts and names it. The
notes are kept in Redis, because a new checkpoint of the log no longer shows that a rollout was damaged.

A loss is something that was acknowledged and is not there (Losses):

number        every script that acknowledges something adds one to the counter `acknowledged`, behind its writes. Redis
              writes its file in this order, so a Redis that counts to n has all that was acknowledged up to n
acknowledged  the highest number that this process was told
claim         the number that an earlier start of the buffer told the trainer. The trainer hears the number with each
              heartbeat and sends it with the next. So a buffer that starts over an older copy of Redis finds out
lost          Redis counts less than this process was told or a script was answered before; or, when this process
              started, less than the trainer claims; or it does not know of this start of the buffer. A loss that later
              writes could hide is noted there, so that no later check, and no later start of the buffer, can miss it
damaged       a compared number cannot be read, or the counters are older than the log: nobody knows how much is lost
accepted      by an operator, with a line of the audit; or, with `appendfsync everysec`, by the recipe

Writes are refused until a loss is accepted. docs/adr/0017-what-redis-has-lost.md lists the losses that go unnoticed.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from tba.api import DamagedInfo, DamagedItem
from tba.api.run import AuditRole
from tba.fields import one_line
from tba.logs import get_logger
from tba_buffer.storage.buffer_epoch import BufferEpoch
from tba_buffer.storage.keys import FORMAT_TEXT, Keys
from tba_buffer.storage.redis_client import BytesRedis, redis_errors

T = TypeVar("T")
Kind = Literal[
    "rollout",
    "prompt",
    "evaluation",
    "result",
    "component",
    "ledger",
    "trained",
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
DECISIVE = ("state", "lineage", "step", "latest_version", "sampling_version", "checkpoint")
"""Fields of the run without which nothing is leased, drawn or evicted. Damage to others is only shown."""
MAX_KEPT = 1000
"""Most items that are counted. With more, the items are not the problem."""
NUM_SHOWN = 20
MAX_DETAIL_CHARS = 300
MAX_CLAIM = 2**53
LOSS_COUNTERS = ("acknowledged", "log_position")
"""Counters that show losses."""
REMEDIES = (
    "restore Redis from its newest copy, load a saved buffer into a new run (`tba buffer load`), or continue with what "
    "is there (`tba buffer accept-loss`)"
)
ACCEPTED_BY_RECIPE = "buffer.appendfsync is everysec: what a crash of Redis loses is accepted"
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

    async def info(self, redis: BytesRedis, keys: Keys) -> DamagedInfo | None:
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
        return DamagedInfo(num=dict(sorted(Counter(item.kind for item in items).items())), items=items[:NUM_SHOWN])


def _item(field: str, text: bytes) -> DamagedItem:
    kind, _, name = field.partition(":")
    try:
        return DamagedItem(kind=kind, name=name, **json.loads(text))
    except DAMAGE_ERRORS:
        return DamagedItem(kind=kind, name=name, detail="the note of why is damaged itself", found_at_s=0.0)


@dataclass(frozen=True, slots=True)
class _Found:
    """The numbers of Redis; None: one that cannot be read."""

    epoch: int | None
    acknowledged: int | None
    noted: int | None
    """How many lost changes were noted."""
    log_position: int | None
    accepted_by: bytes
    log_end: int
    """Position of the last entry of the log."""


READ = """
return {
  redis.call('GET', KEYS[1]),
  redis.call('HMGET', KEYS[2], 'acknowledged', 'log_position'),
  redis.call('HMGET', KEYS[3], 'changes_missing', 'loss_accepted_by'),
  redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1),
}
"""
"""Reads all of `_Found` at one moment."""


class Losses:
    """Knows what was acknowledged, and compares it with Redis.

    Args:
        redis: the client.
        keys: of the run.
        epoch: of this process.
        damaged_items: where damaged numbers are noted.
        clock: Unix seconds.
    """

    def __init__(
        self,
        redis: BytesRedis,
        keys: Keys,
        epoch: BufferEpoch,
        damaged_items: DamagedItems,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._redis, self._keys, self._epoch, self._clock = redis, keys, epoch, clock
        self._damaged_items = damaged_items
        self._read_script = redis.register_script(READ)
        self._process = secrets.token_hex(8)
        """Names this start in the claims of trainers; never used again."""
        self._acknowledged = self._at_start = 0
        self.num_lost = 0
        """Acknowledged changes that Redis does not have now."""
        self.problem: str | None = None
        """The loss of Redis, while it is not accepted."""
        self.accepted_by = b""
        """The last acceptance. Log positions that were read before it may belong to other rollouts now."""

    @property
    def acknowledged(self) -> int:
        """The highest number that this process was told."""
        return self._acknowledged

    @property
    def claim(self) -> str | None:
        """The token that a trainer gets, and sends with its next heartbeat; None while a loss is not accepted."""
        # the trainer keeps its older claim then: a Redis that is restored once more forgets the loss noted in it
        return None if self.problem is not None else f"{self._process}:{self._acknowledged}"

    async def begin(self) -> None:
        """Begin to own the run; what Redis has now counts as acknowledged.

        Raises:
            UnavailableError: Redis did not answer.
        """
        redis = await self._read()
        self._acknowledged = self._at_start = redis.acknowledged or 0
        self.accepted_by = redis.accepted_by

    async def acknowledge(self, number: int, before: int, *, epoch: int) -> bool:
        """Take the number that a script was answered; return whether it shows a loss.

        Args:
            number: of the script.
            before: what was acknowledged before the script ran; Redis must count beyond it.
            epoch: in Redis after the script.

        Raises:
            UnavailableError: Redis did not answer.
        """
        # a newer process counts from what it found: a trainer that heard this number would claim a loss there
        if epoch > self._epoch.number:
            return False
        self._acknowledged = max(self._acknowledged, number)
        # Redis counted up to `before` already: it has lost what was counted since
        if number <= before:
            await self._note(before - number + 1)
        return number <= before

    async def _note(self, num_lost: int) -> None:
        # of several that find out at once, the one that misses most is right
        if num_lost > ((await self._read()).noted or 0):
            with redis_errors("note a loss"):
                await self._redis.hset(self._keys.run, "changes_missing", num_lost)

    async def check_claim(self, text: str) -> bool:
        """Take a trainer's claim; return whether Redis did not have all of it when this process started.

        Raises:
            UnavailableError: Redis did not answer.
        """
        match = re.fullmatch(r"([0-9a-f]{16}):([0-9]{1,16})", text)
        # a claim of this start is compared with each answer already (`acknowledge`)
        if match is None or match[1] == self._process or int(match[2]) > MAX_CLAIM:
            return False
        num_lost = int(match[2]) - self._at_start
        if num_lost > 0:
            await self._note(num_lost)
        return num_lost > 0

    async def check(self) -> str | None:
        """Compare with Redis and return `problem`.

        Raises:
            UnavailableError: Redis did not answer.
        """
        own = self._epoch.number
        # this process has not taken the run yet, so it was told nothing
        if not own:
            return None
        told = self._acknowledged  # before Redis is asked: its answer may miss what is acknowledged meanwhile
        redis = await self._read()
        found, number, self.accepted_by = redis.epoch or 0, redis.acknowledged, redis.accepted_by
        if found > own:  # a newer process owns the run, and compares for itself
            return None
        self.num_lost, self.problem = max(0, told - (told if number is None else number), redis.noted or 0), None
        if (damage := self._damage(redis)) is not None:
            self.problem = f"{damage}, so it is unknown whether acknowledged data is missing; {REMEDIES}"
        elif self.num_lost or found < own:
            starts = "" if found == own else f"; its buffer epoch is {found}, but this process has epoch {own}"
            self.problem = (
                f"Redis has lost data of this run: {self.num_lost} acknowledged changes are missing (it "
                f"was emptied, or restored from an older copy{starts}); {REMEDIES}"
            )
        return self.problem

    def accept_args(
        self, role: AuditRole, reason: str | None, request_id: str
    ) -> tuple[list[str], list[str | int | float]]:
        """Return keys and arguments of accept_loss.lua."""
        keys = [self._keys.epoch, self._keys.counters, self._keys.run, self._keys.run_changes, self._keys.format]
        keys += [self._keys.log, self._keys.log_checkpoint]
        audit = [json.dumps(role), json.dumps(reason), FORMAT_TEXT, request_id]
        return keys, [self._epoch.number, self._acknowledged, self.num_lost, self._clock(), *audit]

    def accept(self, number: int, request_id: str) -> None:
        """Continue from this number, without what is missing."""
        self._acknowledged = self._at_start = number
        self.num_lost, self.problem, self.accepted_by = 0, None, request_id.encode()

    def read_count(self, name: str, value: bytes | None) -> int | None:
        """Return a number of Redis; 0 where there is none, None for a damaged one, which is noted."""

        def read() -> int:
            number = int(value or 0)
            if not 0 <= number <= MAX_CLAIM:
                raise ValueError(f"it is {number}")
            return number

        return self._damaged_items.read("counter", name, read, at_s=self._clock())

    def _damage(self, redis: _Found) -> str | None:
        counters, run = self._keys.counters, self._keys.run
        places = {
            f"the buffer epoch ({self._keys.epoch})": redis.epoch,
            f"the field acknowledged of {counters}": redis.acknowledged,
            f"the field log_position of {counters}": redis.log_position,
            f"the field changes_missing of {run}": redis.noted,
        }
        damaged = [place for place, number in places.items() if number is None]
        if damaged:
            return f"Redis has no whole number in {' and '.join(damaged)}"
        if (redis.log_position or 0) < redis.log_end:
            return (
                f"{counters} is older than the rest that Redis has of this run, or a part of it is gone: its field "
                f"log_position is {redis.log_position}, and the log ends at {redis.log_end}"
            )
        return None

    async def _read(self) -> _Found:
        keys = self._keys
        with redis_errors("count what was acknowledged"):
            # a script and no transaction: a full Redis queues no command of a transaction, not even one that reads, and
            # every new connection asks this before an eviction can make room
            reply = await self._read_script(keys=[keys.epoch, keys.counters, keys.run, keys.log])
        epoch, (acknowledged, log_position), (noted, accepted_by), last = reply
        return _Found(
            epoch=self.read_count("buffer epoch", epoch),
            acknowledged=self.read_count("acknowledged", acknowledged),
            noted=self.read_count("changes_missing", noted),
            log_position=self.read_count("log_position", log_position),
            accepted_by=accepted_by or b"",
            log_end=int(last[0][0].split(b"-")[0]) if last else 0,
        )
