"""What Redis has lost of what this run acknowledged: noticed, refused until an operator accepts it, and counted.

number     every script that acknowledges something adds one to `acknowledged` of the counters, behind what it wrote; so
           a Redis that counts to n has all that was acknowledged up to n, since its file is written in this order
told       the highest number that this process was told
claim      what the trainer was told by an earlier start of the buffer: it hears the number with each heartbeat and says
           it with the next. So a buffer that was started again over an older copy finds out
lost       Redis counts less than was told, or than a script was answered before; or, when this process started, less
           than the trainer claims; or it does not know of this start of the buffer. What Redis may outgrow is noted
           there, where no later check, and no later start of the buffer, can miss it
damaged    what is compared here cannot be read, or the counters are older than the log: a loss whose size nobody knows
accepted   by an operator, with a line of the audit; or, with `appendfsync everysec`, by the recipe

docs/adr/0017-what-redis-has-lost.md says what is not noticed.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from tba.api.run import AuditRole
from tba_buffer.keys import FORMAT_TEXT, Keys
from tba_buffer.redis_link import BytesRedis, redis_errors
from tba_buffer.unreadable import Unreadable

MOST_CLAIMED = 2**53
FOUND_OUT_BY = ("acknowledged", "log_position")
"""Counters by which losses are found out."""
WAYS_OUT = (
    "restore Redis from its newest copy, load a saved buffer into a new run (`tba buffer load`), or go on with what is "
    "there (`tba buffer accept-loss`)"
)
BY_THE_RECIPE = "buffer.appendfsync is everysec: what a crash of Redis loses is accepted"


@dataclass(slots=True)
class Replica:
    """Which buffer process owns the run. Scripts that change or remove stored rollouts compare `number` with Redis."""

    number: int = 0
    refused: str | None = None
    """Why this process serves nothing any more, once it has found the number of a newer one."""


@dataclass(frozen=True, slots=True)
class _Found:
    """As Redis has it; None: it cannot be read."""

    starts: int | None
    """Of the buffer."""
    acknowledged: int | None
    noted: int | None
    """Lost changes, as they were found out."""
    log_position: int | None
    accepted_by: bytes
    log_end: int
    """Position of the last entry of the log."""


class Losses:
    """Knows what was acknowledged, and compares it with Redis.

    Args:
        redis: the client.
        keys: of the run.
        owner: which start of the buffer this process is.
        unreadable: where damaged numbers are noted.
        clock: Unix seconds.
    """

    def __init__(
        self, redis: BytesRedis, keys: Keys, owner: Replica, unreadable: Unreadable, *, clock: Callable[[], float]
    ) -> None:
        self._redis, self._keys, self._owner, self._clock = redis, keys, owner, clock
        self._unreadable = unreadable
        self._process = secrets.token_hex(8)
        """Names this start in what trainers hear; never used again."""
        self._told = self._at_start = 0
        self.num_lost = 0
        """Acknowledged changes that Redis does not have now."""
        self.problem: str | None = None
        """What Redis has lost, while that is not accepted."""
        self.accepted_by = b""
        """Names the last acceptance: positions of the log that were read before it may be of other rollouts now."""

    @property
    def told(self) -> int:
        """The highest number that this process was told."""
        return self._told

    @property
    def heard(self) -> str | None:
        """What a trainer hears, and says again with its next heartbeat; None while a loss is not accepted: it goes on
        to say what it heard before, since a Redis that is restored once more forgets the loss that was noted in it."""
        return None if self.problem is not None else f"{self._process}:{self._told}"

    async def begin(self) -> None:
        """This process owns the run from now on; Redis has everything up to here.

        Raises:
            UnavailableError: Redis did not answer.
        """
        redis = await self._read()
        self._told = self._at_start = redis.acknowledged or 0
        self.accepted_by = redis.accepted_by

    async def tell(self, number: int, told: int, *, owner: int) -> bool:
        """A script was answered with this number; whether Redis has lost data: it was `told` before, and counts on.

        Args:
            owner: which start of the buffer owned the run behind that. What is counted after a newer one has begun is
                not in what that one found, and a trainer that heard it here would claim a loss there.

        Raises:
            UnavailableError: Redis did not answer.
        """
        if owner > self._owner.number:
            return False
        self._told = max(self._told, number)
        if number <= told:
            await self._note(told - number + 1)
        return number <= told

    async def _note(self, num_lost: int) -> None:
        if num_lost > (
            (await self._read()).noted or 0
        ):  # of several that find out at once, the one that misses most is right
            with redis_errors("note a loss"):
                await self._redis.hset(self._keys.run, "changes_missing", num_lost)

    async def claim(self, text: str) -> bool:
        """A trainer says what it heard last; whether Redis did not have all of it when this process started.

        Raises:
            UnavailableError: Redis did not answer.
        """
        match = re.fullmatch(r"([0-9a-f]{16}):([0-9]{1,16})", text)
        if match is None or match[1] == self._process or int(match[2]) > MOST_CLAIMED:
            return False
        num_lost = int(match[2]) - self._at_start
        if num_lost > 0:
            await self._note(num_lost)
        return num_lost > 0

    async def check(self) -> str | None:
        """Compare; the answer is `problem`.

        Raises:
            UnavailableError: Redis did not answer.
        """
        own = self._owner.number
        if not own:
            return None
        told = self._told  # before Redis is asked: what is acknowledged meanwhile may be behind its answer
        redis = await self._read()
        found, number, self.accepted_by = redis.starts or 0, redis.acknowledged, redis.accepted_by
        if found > own:  # a newer buffer process owns the run, and knows better
            return None
        self.num_lost, self.problem = max(0, told - (told if number is None else number), redis.noted or 0), None
        if (damage := self._damage(redis)) is not None:
            self.problem = f"{damage}, so nobody knows whether all is there that was acknowledged; {WAYS_OUT}"
        elif self.num_lost or found < own:
            starts = "" if found == own else f"; it counts {found} starts of the buffer, and this is start number {own}"
            self.problem = (
                f"Redis has lost data of this run: {self.num_lost} changes that were acknowledged are not there (it "
                f"was emptied, or restored from an older copy{starts}); {WAYS_OUT}"
            )
        return self.problem

    def accept_args(
        self, role: AuditRole, reason: str | None, request_id: str
    ) -> tuple[list[str], list[str | int | float]]:
        """Keys and arguments of accept_loss.lua."""
        keys = [self._keys.replica, self._keys.counters, self._keys.run, self._keys.run_changes, self._keys.format]
        keys += [self._keys.log, self._keys.base]
        said = [json.dumps(role), json.dumps(reason), FORMAT_TEXT, request_id]
        return keys, [self._owner.number, self._told, self.num_lost, self._clock(), *said]

    def accepted(self, number: int, request_id: str) -> None:
        """Redis goes on from this number, without what is missing."""
        self._told = self._at_start = number
        self.num_lost, self.problem, self.accepted_by = 0, None, request_id.encode()

    def whole(self, name: str, value: bytes | None) -> int | None:
        """A number of Redis; 0 where there is none, None where what is there cannot be read: then it is noted."""

        def read() -> int:
            number = int(value or 0)
            if not 0 <= number <= MOST_CLAIMED:
                raise ValueError(f"it is {number}")
            return number

        return self._unreadable.read("counter", name, read, at_s=self._clock())

    def _damage(self, redis: _Found) -> str | None:
        counters, run = self._keys.counters, self._keys.run
        places = {
            self._keys.replica: redis.starts,
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
        with redis_errors("count what was acknowledged"):
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.get(self._keys.replica)
                pipe.hget(self._keys.counters, "acknowledged")
                pipe.hmget(self._keys.run, "changes_missing", "loss_accepted_by")
                pipe.hget(self._keys.counters, "log_position")
                pipe.xrevrange(self._keys.log, count=1)
                starts, acknowledged, (noted, accepted_by), log_position, last = await pipe.execute()
        return _Found(
            starts=self.whole("replica", starts),
            acknowledged=self.whole("acknowledged", acknowledged),
            noted=self.whole("changes_missing", noted),
            log_position=self.whole("log_position", log_position),
            accepted_by=accepted_by or b"",
            log_end=int(last[0][0].split(b"-")[0]) if last else 0,
        )
