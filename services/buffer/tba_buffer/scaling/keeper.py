"""Keeps the replicas of the Deployment at what is wanted, and gives the Deployment its own number back.

The Deployment has a number of its own: what its chart, or whoever edits it, has said. While an operator wants another
one, or the run is over (0), that one is set; its own is remembered in Redis (`own`), with what was set last
(`asserted`; `asserting` while a call may or may not have been carried out). Replicas that are neither are somebody
else's doing, for example of `helm upgrade`: they are the Deployment's own number from then on, and what is wanted is
set again. When nobody wants anything any more, the own number is set again, unless somebody has changed it meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from tba.logs import get_logger
from tba.threads import in_thread
from tba_buffer.context import Context
from tba_buffer.redis_link import redis_errors
from tba_buffer.scaling.deployment import Deployment

MANY_REASSERTIONS = 3
"""From so many rounds in a row on, a note says that something works against the operator."""
log = get_logger("scaling")


@dataclass(frozen=True, slots=True)
class Held:
    """What Redis remembers of a Deployment that is held at another number than its own."""

    own: int | None
    asserted: int | None
    asserting: int | None


class Keeper:
    """One round at a time compares and sets.

    Args:
        context: Redis and settings.
        deployment: the Deployment.
    """

    def __init__(self, context: Context, deployment: Deployment) -> None:
        self._context = context
        self.deployment = deployment
        self.own: int | None = None
        """The Deployment's own number, as far as it is known."""
        self.note: str | None = None
        """What was done without being asked."""
        self._num_reassertions = 0

    async def keep(self, target: int | None, *, why: str) -> None:
        """One round.

        Args:
            target: the number to hold; None: the Deployment's own.
            why: for the log.

        Raises:
            ScalingFailure: the API did not do its part; the next round goes on where this one was.
            UnavailableError: Redis did not answer.
        """
        found = await in_thread(self.deployment.replicas)
        held = await self._read()
        is_ours = found in (held.asserted, held.asserting)
        if target is None:
            await self._let_go(found, held, is_ours=is_ours)
            return
        if is_ours:
            self._num_reassertions = 0
        else:
            was_held = held.asserted is not None
            await self._write(own=found)
            held = Held(found, held.asserted, held.asserting)
            self._num_reassertions = self._num_reassertions + 1 if was_held else 0
            if was_held:
                log.warning("replicas_changed_by_others", found=found, wanted=target)
        self.own = held.own
        if found != target:
            await self._write(asserting=target)
            await in_thread(lambda: self.deployment.set_replicas(target))
            log.info("replicas_set", deployment=self.deployment.name, old=found, new=target, why=why)
        if held.asserted != target or held.asserting is not None:
            await self._write(asserted=target, asserting=None)
        self.note = None
        if self._num_reassertions >= MANY_REASSERTIONS:
            self.note = (
                f"something else sets {self.deployment.where} to {found} again and again (an autoscaler?); it was set "
                f"to {target} {self._num_reassertions} times in a row: remove one of the two"
            )

    async def _let_go(self, found: int, held: Held, *, is_ours: bool) -> None:
        """Nobody wants a number: the Deployment's own comes back, unless somebody has changed it."""
        self._num_reassertions, self.note = 0, None
        self.own = found
        if held.own is None:
            return
        if is_ours and found != held.own:
            own = held.own
            await in_thread(lambda: self.deployment.set_replicas(own))
            log.info("replicas_set", deployment=self.deployment.name, old=found, new=own, why="its own number again")
            self.own = own
        await self._write(own=None, asserted=None, asserting=None)

    async def _read(self) -> Held:
        with redis_errors("read what is held"):
            fields = await self._context.redis.hmget(self._context.keys.scaling, "own", "asserted", "asserting")
        return Held(*(None if field is None else int(field) for field in fields))

    async def _write(self, **fields: int | None) -> None:
        key = self._context.keys.scaling
        gone = [name for name, value in fields.items() if value is None]
        kept = {name: str(value) for name, value in fields.items() if value is not None}
        with redis_errors("remember what is held"):
            async with self._context.redis.pipeline(transaction=True) as pipe:
                if gone:
                    pipe.hdel(key, *gone)
                if kept:
                    pipe.hset(key, mapping=kept)
                await pipe.execute()
