"""One look at the run: its state, the counts that flow control decides by, and a level index.

Draws and leases that ask at the same time share a look. Nobody is answered with one that began before he asked, so
every push that was acknowledged by then is in the index.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import cast

from tba.api import RunState
from tba_buffer.coalesce import Coalesced
from tba_buffer.context import Context
from tba_buffer.flow import FlowCounts
from tba_buffer.index import Index
from tba_buffer.settings import Live, Settings
from tba_buffer.view import IndexView


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """What one look found. `index` goes on with the log; it is at least as new as the counts."""

    state: RunState
    token: str | None
    lineage: int
    latest_version: str | None
    step: int
    """The last acked step."""
    live: Live
    counts: FlowCounts
    index: Index


class Glances:
    """Looks at the run; also voids batches past their deadline.

    Args:
        context: Redis and settings.
        view: the index.
        settings: the live ones.
    """

    def __init__(self, context: Context, view: IndexView, settings: Settings) -> None:
        self._context = context
        self._view = view
        self._settings = settings
        keys = context.keys
        self._keys = [
            keys.run,
            keys.counters,
            keys.open_batches,
            keys.batches_since_mark,
            keys.open_steps,
            keys.settings,
        ]
        self._looking = Coalesced(self._look, asyncio.Lock())
        self._last: Glance | None = None

    async def read(self) -> Glance:
        """A look that begins now or later; callers that wait at the same time share one.

        Raises:
            SupersededError: a newer buffer process owns the run.
            UnavailableError: Redis did not answer.
        """
        await self._looking.run()
        assert self._last is not None
        return self._last

    async def void(self, member: str) -> None:
        """Void an open batch (member of `open_batches`) that cannot be answered, before its deadline. What it held may
        be gone because Redis lost it, so the index is compared with the log again.

        Raises:
            SupersededError: a newer buffer process owns the run.
            UnavailableError: Redis did not answer.
        """
        await self._context.scripts.run("glance", self._keys, [self._context.clock(), member])
        await self._view.level()

    async def _look(self) -> None:
        reply = await self._context.scripts.run("glance", self._keys, [self._context.clock()])
        (state, token, lineage, latest_version, step), numbers, batches_since_mark, revision = reply
        position, inserted, leased, drawn, void, inserted_at_mark, marks = (int(number or 0) for number in numbers)
        index = self._view.index
        if index.position != position or self._context.replica.refused is not None:
            index = await self._view.level()
        self._last = Glance(
            state=cast(RunState, _text(state) or "running"),
            token=_text(token),
            lineage=int(lineage or 0),
            latest_version=_text(latest_version),
            step=int(step or 0),
            live=await self._settings.at(int(revision or 0)),
            counts=FlowCounts(
                stored=index.num_scored,
                pending=index.num_pending,
                can_fill_slot=index.num_drawable > 0,
                inserted=inserted,
                leased=max(0, leased),
                drawn=drawn - void,
                inserted_since_mark=inserted - inserted_at_mark,
                batches_since_mark=batches_since_mark,
                marks=marks,
            ),
            index=index,
        )


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()
