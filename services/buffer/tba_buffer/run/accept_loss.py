"""Refuse writes while Redis lacks acknowledged changes of this run, and recover.

The durability check finds a loss, and nothing is written until an operator accepts it (`tba buffer accept-loss`) or
Redis is restored.
"""

from __future__ import annotations

import asyncio

from tba.api.run import AuditRole
from tba.logs import get_logger
from tba.wire.codec import new_id
from tba_buffer.index.log_follower import IndexView
from tba_buffer.storage.context import Context

log = get_logger("buffer")


class LossRecovery:
    """Refuses writes after a loss, and accepts losses; sets the hooks of the context's durability check.

    Args:
        context: Redis and settings.
        view: its index is rebuilt once a loss is accepted or repaired.
    """

    def __init__(self, context: Context, view: IndexView) -> None:
        self._context = context
        self._view = view
        self._is_stale = False
        """Whether the index was read from a Redis that had lost data, and was not rebuilt since."""
        self._accepting = asyncio.Lock()
        context.durability.on_checked = self._compare
        context.durability.on_restarted = view.verify

    @property
    def loss(self) -> str | None:
        """A sentence about the acknowledged changes that Redis has lost, until somebody accepts the loss; else None."""
        return self._context.losses.problem or self._context.durability.damaged

    async def accept(self, role: AuditRole, reason: str | None) -> None:
        """Accept the current loss: continue with the data that Redis still has. Without a loss, change nothing.

        Raises:
            SupersededError: a newer buffer process owns the run.
            UnavailableError: Redis did not answer, or a part of its log is missing.
        """
        context = self._context
        async with self._accepting:  # of two at once, the second finds nothing to accept
            await context.durability.check()
            loss, num_lost = self.loss, context.losses.num_lost
            if loss is None:
                return
            # first: a log that is not whole must not be accepted, and raises here
            await self._view.reread()
            request_id = new_id("request")
            number = await context.scripts.accept_loss(**context.losses.accept_args(role, reason, request_id))
            context.losses.accept(number, request_id)
            context.durability.accept_damage()
            log.warning("loss_accepted", num_lost=num_lost, loss=loss, role=role, reason=reason)
            await context.durability.check()
            context.notify_all()

    async def _compare(self) -> str | None:
        """Return a sentence about what Redis has lost, or None; rebuild the index once a loss is repaired."""
        losses = self._context.losses
        before, problem = losses.problem, await losses.check()
        if problem is not None:
            if before is None:
                log.error("redis_has_lost_data", num_lost=losses.num_lost, problem=problem)
            return problem
        self._is_stale |= before is not None
        # Redis was restored and has everything again: forget what was read of the copy without it
        if self._is_stale:
            await self._view.reread()
            self._is_stale = False
        return None
