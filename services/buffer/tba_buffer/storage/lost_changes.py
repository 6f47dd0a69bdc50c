"""Find out what Redis has lost of this run.

A loss is an acknowledged change that Redis no longer has (Losses):

number        every script that acknowledges a change adds one to the counter `acknowledged`, after its writes. Redis
              writes its file in this order, so a Redis that counts to n has every change acknowledged up to n
acknowledged  the highest number that Redis has told this process
claim         the number that an earlier start of the buffer told the trainer. The reply to a heartbeat has the number,
              and the trainer sends it with its next heartbeat. So a buffer notices that its Redis is an older copy
lost          Redis counts less than it told this process before; or, when this process started, less than the trainer
              claims; or it has an older buffer epoch than this process took. A loss that later writes could hide is
              noted in Redis, so that no later check, and no later start of the buffer, can miss it
damaged       a compared number cannot be read, or the counters are older than the log: nobody knows how much is lost
accepted      by an operator, with a line of the audit

Writes are refused until a loss is accepted. docs/adr/0017-what-redis-has-lost.md lists the losses that go unnoticed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tba.api.run import AuditRole
from tba_buffer.storage.buffer_epoch import BufferEpoch
from tba_buffer.storage.keys import FORMAT_TEXT, Keys
from tba_buffer.storage.redis_client import MAX_COUNT, BytesRedis, read_count, redis_errors

LOSS_COUNTERS = ("acknowledged", "log_position")
"""Counters that show losses."""
REMEDIES = (
    "restore Redis from its newest copy, load a saved buffer into a new run (`tba buffer load`), or continue with what "
    "is there (`tba buffer accept-loss`)"
)


@dataclass(frozen=True, slots=True)
class _Found:
    """The values that Redis has; None: the value is damaged."""

    epoch: int | None
    acknowledged: int | None
    noted: int | None
    """The number of lost changes that were noted and not accepted."""
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
"""Lua script that reads all values of `_Found` atomically."""


class Losses:
    """Tracks the number of acknowledged changes, and compares it with the counter in Redis.

    Args:
        redis: the client.
        keys: the key names of the run.
        epoch: the epoch of this process.
        clock: returns Unix seconds.
    """

    def __init__(self, redis: BytesRedis, keys: Keys, epoch: BufferEpoch, *, clock: Callable[[], float]) -> None:
        self._redis, self._keys, self._epoch, self._clock = redis, keys, epoch, clock
        self._read_script = redis.register_script(READ)
        self._process = secrets.token_hex(8)
        """Random name of this start of the buffer, a part of `claim`."""
        self.acknowledged = self._at_start = 0
        """The highest number that Redis has told this process so far; `_at_start`: that number when it took the run."""
        self.num_lost = 0
        """Acknowledged changes that Redis does not have now."""
        self.problem: str | None = None
        """A sentence about a loss that no operator has accepted, or None."""
        self.accepted_by = b""
        """Request id of the last accepted loss. Log positions read before it may belong to other rollouts now."""

    @property
    def claim(self) -> str | None:
        """The text that a trainer gets with one heartbeat and sends with the next; None while a loss is unaccepted."""
        # the trainer keeps its older claim then: a Redis that is restored once more forgets the loss noted in it
        return None if self.problem is not None else f"{self._process}:{self.acknowledged}"

    async def begin(self) -> None:
        """Read the counter of Redis as the number that this process starts from, once its epoch is taken.

        Raises:
            UnavailableError: Redis did not answer, or answered with an error.
        """
        redis = await self._read()
        self.acknowledged = self._at_start = redis.acknowledged or 0
        self.accepted_by = redis.accepted_by

    async def acknowledge(self, number: int, before: int, *, epoch: int) -> bool:
        """Record the counter after a script of ACKNOWLEDGING; if it shows a loss, note that in Redis and return True.

        Args:
            number: the counter `acknowledged`, after the script added one.
            before: the value of `self.acknowledged` before the script ran; without a loss, `number` is larger.
            epoch: the buffer epoch in Redis after the script.

        Raises:
            UnavailableError: Redis did not answer, or answered with an error.
        """
        # a newer process counts from what it found: a trainer that heard this number would claim a loss there
        if epoch > self._epoch.number:
            return False
        self.acknowledged = max(self.acknowledged, number)
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
        """Compare a trainer's claim with the counter at this process's start. On a loss, note it in Redis, return True.

        Raises:
            UnavailableError: Redis did not answer, or answered with an error.
        """
        match = re.fullmatch(r"([0-9a-f]{16}):([0-9]{1,16})", text)
        # a claim of this start is compared with each answer already (`acknowledge`)
        if match is None or match[1] == self._process or int(match[2]) > MAX_COUNT:
            return False
        num_lost = int(match[2]) - self._at_start
        if num_lost > 0:
            await self._note(num_lost)
        return num_lost > 0

    async def check(self) -> str | None:
        """Compare epoch and counters with those in Redis; update `num_lost` and `problem`, and return `problem`.

        Raises:
            UnavailableError: Redis did not answer, or answered with an error.
        """
        own = self._epoch.number
        # this process has not taken the run yet, so it was told nothing
        if not own:
            return None
        told = self.acknowledged  # before Redis is asked: its answer may miss what is acknowledged meanwhile
        redis = await self._read()
        found, number, self.accepted_by = redis.epoch or 0, redis.acknowledged, redis.accepted_by
        if found > own:  # a newer process owns the run, and compares for itself
            return None
        self.num_lost, self.problem = max(0, told - (told if number is None else number), redis.noted or 0), None
        counters, run = self._keys.counters, self._keys.run
        places = {
            f"the buffer epoch ({self._keys.epoch})": redis.epoch,
            f"the field acknowledged of {counters}": redis.acknowledged,
            f"the field log_position of {counters}": redis.log_position,
            f"the field changes_missing of {run}": redis.noted,
        }
        damage = None
        if damaged := [place for place, number in places.items() if number is None]:
            damage = f"Redis has no whole number in {' and '.join(damaged)}"
        elif (redis.log_position or 0) < redis.log_end:
            damage = (
                f"{counters} is older than the rest that Redis has of this run, or a part of it is gone: its field "
                f"log_position is {redis.log_position}, and the log ends at {redis.log_end}"
            )
        if damage is not None:
            self.problem = f"{damage}, so it is unknown whether acknowledged data is missing; {REMEDIES}"
        elif self.num_lost or found < own:
            starts = "" if found == own else f"; its buffer epoch is {found}, but this process has epoch {own}"
            self.problem = (
                f"Redis has lost data of this run: {self.num_lost} acknowledged changes are missing (it "
                f"was emptied, or restored from an older copy{starts}); {REMEDIES}"
            )
        return self.problem

    def accept_args(self, role: AuditRole, reason: str | None, request_id: str) -> dict[str, Any]:
        """Return the arguments of accept_loss.lua."""
        return {
            "acknowledged": self.acknowledged,
            "num_lost": self.num_lost,
            "now_s": self._clock(),
            "role": role,
            "reason": reason,
            "format": FORMAT_TEXT,
            "request_id": request_id,
        }

    def accept(self, number: int, request_id: str) -> None:
        """Clear the loss after an operator accepted it, and continue to count from `number`."""
        self.acknowledged = self._at_start = number
        self.num_lost, self.problem, self.accepted_by = 0, None, request_id.encode()

    async def _read(self) -> _Found:
        keys = self._keys
        with redis_errors("count what was acknowledged"):
            # a script and no transaction: a full Redis queues no command of a transaction, not even one that reads, and
            # every new connection asks this before an eviction can make room
            reply = await self._read_script(keys=[keys.epoch, keys.counters, keys.run, keys.log])
        epoch, (acknowledged, log_position), (noted, accepted_by), last = reply
        return _Found(
            epoch=read_count(epoch),
            acknowledged=read_count(acknowledged),
            noted=read_count(noted),
            log_position=read_count(log_position),
            accepted_by=accepted_by or b"",
            log_end=int(last[0][0].split(b"-")[0]) if last else 0,
        )
