"""Keep the replicas of the Deployment at the desired number, and give the Deployment its own number back.

The Deployment has a number of its own, from its chart or from a person. While an operator asks for another one, or the
run is over (0), that one is set. Redis remembers the own number (`own`) and the one that was set last (`asserted`, or
`asserting` while it is unknown whether the call was carried out). Replicas that are neither were set by somebody else,
for example by `helm upgrade`: they are the own number from then on, and the desired one is set again. When nobody asks
for a number any more, the own one is set again, unless somebody has changed it meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from tba.concurrency import in_thread
from tba.logs import get_logger
from tba_buffer.run.scaling.kubernetes import Deployment
from tba_buffer.storage.context import Context
from tba_buffer.storage.redis_client import redis_errors

MANY_REASSERTIONS = 3
"""After so many corrections in a row, a note says that something works against the operator."""
log = get_logger("scaling")


@dataclass(frozen=True, slots=True)
class HeldReplicas:
    """The record in Redis of a Deployment that is held at another number than its own."""

    own: int | None
    asserted: int | None
    asserting: int | None


class Reconciler:
    """Compares and sets, one round at a time.

    Args:
        context: Redis and settings.
        deployment: the Deployment.
    """

    def __init__(self, context: Context, deployment: Deployment) -> None:
        self._context = context
        self.deployment = deployment
        self.own: int | None = None
        """The own number of the Deployment; None: not known yet."""
        self.note: str | None = None
        """The reason why the desired number is not reached, or None."""
        self._num_reassertions = 0

    async def reconcile(self, target: int | None, *, why: str) -> None:
        """Run one round.

        Args:
            target: the desired number; None: the Deployment's own.
            why: for the log.

        Raises:
            ScalingFailure: the API did not do its part; the next round continues there.
            UnavailableError: Redis did not answer.
        """
        found = await in_thread(self.deployment.replicas)
        held = await self._read()
        # `asserting`: the call before may have been carried out although its answer was lost
        is_ours = found in (held.asserted, held.asserting)
        if target is None:
            await self._release(found, held, is_ours=is_ours)
            return
        if is_ours:
            self._num_reassertions = 0
        else:
            was_held = held.asserted is not None
            await self._write(own=found)
            held = HeldReplicas(found, held.asserted, held.asserting)
            self._num_reassertions = self._num_reassertions + 1 if was_held else 0
            if was_held:
                log.warning("replicas_changed_by_others", found=found, desired=target)
        self.own = held.own
        if found != target:
            # written first: after a crash behind the call, the new replicas are known to be ours
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

    async def _release(self, found: int, held: HeldReplicas, *, is_ours: bool) -> None:
        """Give the Deployment its own number back, unless somebody has changed it."""
        self._num_reassertions, self.note = 0, None
        self.own = found
        # nothing was held, so nothing is given back
        if held.own is None:
            return
        # somebody else's number stays: it is the own one from now on
        if is_ours and found != held.own:
            own = held.own
            await in_thread(lambda: self.deployment.set_replicas(own))
            log.info("replicas_set", deployment=self.deployment.name, old=found, new=own, why="its own number")
            self.own = own
        await self._write(own=None, asserted=None, asserting=None)

    async def _read(self) -> HeldReplicas:
        with redis_errors("read what is held"):
            fields = await self._context.redis.hmget(self._context.keys.scaling, "own", "asserted", "asserting")
        return HeldReplicas(*(None if field is None else int(field) for field in fields))

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
