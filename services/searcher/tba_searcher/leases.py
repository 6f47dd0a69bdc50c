"""The leases this searcher holds, towards the buffer: renewed while their visits are here, given back, refused.

renewing waits for a third of the shortest lease to pass, without a deadline; what is not renewed in time expires by
itself, and another searcher gets the visit. A drain waits for returns under way, and tries its own failed ones again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from tba.api import MAX_LEASE_IDS, LeaseRenewal, LeaseReturn
from tba.clients import BufferClient
from tba.errors import ServiceError
from tba.logs import get_logger
from tba.threads import in_thread
from tba_searcher.delivery import Delivery
from tba_searcher.status import Status
from tba_searcher.visits import Backlog

IDLE_S = 0.05
CALL_TIMEOUT_S = 5.0
log = get_logger("leases")


class Leases:
    """Renews and gives back.

    Args:
        buffer: for returns.
        renewals: a client that does not retry.
        backlog: visits that are not complete.
        delivery: visits on their way to the buffer.
    """

    def __init__(
        self, *, buffer: BufferClient, renewals: BufferClient, backlog: Backlog, delivery: Delivery, status: Status
    ) -> None:
        self._buffer, self._renewals = buffer, renewals
        self._backlog, self._delivery, self._status = backlog, delivery, status
        self.num_returning = 0
        """Calls of `give_back` that have not ended."""

    async def renew_forever(self) -> None:
        """Renew every lease before a third of it has passed, or soon after."""
        lease_s = 3 * IDLE_S
        while True:
            lease_s = min([visit.lease.expires_in_s for visit in self._backlog.open_visits()], default=lease_s)
            await asyncio.sleep(lease_s / 3)
            await self.renew()

    async def renew(self) -> None:
        """Renew the leases of all visits that are here. Those lost to others and not begun are dropped; begun ones
        go on, since their rollouts count whoever holds the lease.
        """
        held = {visit.lease.lease_id for visit in self._backlog.open_visits()} | self._delivery.lease_ids
        lost: set[str] = set()
        for lease_ids in _parts(sorted(held)):
            body = LeaseRenewal(searcher_id=self._status.searcher_id, lease_ids=lease_ids)
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    reply = await in_thread(lambda body=body: self._renewals.renew_leases(body))
            except (ServiceError, TimeoutError) as error:
                log.debug("leases not renewed", num_leases=len(lease_ids), detail=str(error))
            else:
                lost.update(reply.lost_lease_ids)
        dropped = [v for v in self._backlog.open_visits() if v.lease.lease_id in lost and not v.num_submitted]
        if dropped:
            log.warning("leases lost; their visits are not begun", num_leases=len(dropped))
            self._backlog.drop(dropped)

    async def give_back(self, lease_ids: Sequence[str], *, refused: Sequence[str] = ()) -> list[str]:
        """Return leases, so that others get them at once, and refuse those that cannot be sampled; when that fails
        they expire by themselves.

        Returns:
            Those of `lease_ids` whose return the buffer has not acknowledged.
        """
        self.num_returning += 1
        try:
            return await self._give_back(lease_ids, refused)
        finally:
            self.num_returning -= 1

    async def _give_back(self, lease_ids: Sequence[str], refused: Sequence[str]) -> list[str]:
        name, unreturned = self._status.searcher_id, list[str]()
        bodies = [LeaseReturn(searcher_id=name, lease_ids=part) for part in _parts(lease_ids)]
        bodies += [LeaseReturn(searcher_id=name, lease_ids=[], refused_lease_ids=part) for part in _parts(refused)]
        for body in bodies:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await in_thread(lambda body=body: self._buffer.return_leases(body))
            except (ServiceError, TimeoutError) as error:
                num = len(body.lease_ids) + len(body.refused_lease_ids)
                log.warning("leases not returned; they expire", num_leases=num, detail=str(error))
                unreturned += body.lease_ids
            else:
                self._status.counts["leases_returned"] += len(body.lease_ids)
        return unreturned


def _parts(lease_ids: Sequence[str]) -> Iterator[list[str]]:
    """Portions that fit into one request."""
    for start in range(0, len(lease_ids), MAX_LEASE_IDS):
        yield list(lease_ids[start : start + MAX_LEASE_IDS])
