"""One look at the run: its state, the counts that flow control decides by, and a level index.

Draws and leases that ask at the same time share a look. Nobody is answered with one that began before he asked, so
every push that was acknowledged by then is in the index.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tba.api import RunState
from tba.errors import UnavailableError
from tba.numbers import MAX_NUMBER
from tba.versions import PolicyVersion
from tba_buffer.coalesce import Coalesced
from tba_buffer.context import Context
from tba_buffer.flow import FlowCounts
from tba_buffer.index import Index
from tba_buffer.run_state import read_state
from tba_buffer.settings import Live, Settings
from tba_buffer.view import IndexView

COUNTERS = ("log_position", "scored_total", "inflight", "drawn", "void", "scored_at_mark", "marks")
"""As glance.lua answers them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """What one look found. `index` goes on with the log; it is at least as new as the counts."""

    state: RunState
    token: str | None
    lineage: int
    latest_version: str | None
    step: int
    """The last acked step."""
    num_retries: int
    """How often an operator has asked searchers to try refused versions again."""
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
            keys.unreadable,
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

    async def void(self, member: str | bytes) -> None:
        """Void an open batch (member of `open_batches`) that cannot be answered, before its deadline. What it held may
        be gone because Redis lost it, so the index is compared with the log again.

        Raises:
            SupersededError: a newer buffer process owns the run.
            UnavailableError: Redis did not answer.
        """
        await self._context.scripts.run("glance", self._keys, [self._context.clock(), member])
        await self._view.level()

    async def _look(self) -> None:
        self._last = await self._read(*await self._context.scripts.run("glance", self._keys, [self._context.clock()]))

    async def _read(
        self, fields: Sequence[bytes | None], counters: Sequence[bytes | None], batches_since_mark: int, revision: Any
    ) -> Glance:
        """What the script answered, with an index that is level with it.

        Raises:
            SupersededError: a newer buffer process owns the run.
            UnavailableError: Redis did not answer, or a number that is needed cannot be read.
        """
        keys, (state, token, *_) = self._context.keys, fields
        lineage, step, retries = (
            _number(keys.run, name, fields[at], lowest=0) for at, name in ((2, "lineage"), (4, "step"), (5, "retries"))
        )
        position, inserted, leased, drawn, void, inserted_at_mark, marks = (
            _number(keys.counters, name, number) for name, number in zip(COUNTERS, counters, strict=True)
        )
        index = self._view.index
        if index.position != position or self._context.replica.refused is not None:
            index = await self._view.level()
        return Glance(
            state=read_state(self._context, state),
            token=None if token is None else token.decode(errors="replace"),
            lineage=lineage,
            latest_version=_version(keys.run, fields[3]),
            step=step,
            num_retries=retries,
            live=await self._settings.at(_number(keys.settings, "revision", revision, lowest=0)),
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


def _number(key: str, name: str, text: bytes | None, *, lowest: int = -MAX_NUMBER) -> int:
    """A number that nobody can go on without; 0 where there is none.

    Raises:
        UnavailableError: it cannot be read.
    """
    try:
        number = int(text or 0)
    except ValueError:
        raise _damaged(key, name, text) from None
    if not lowest <= number <= MAX_NUMBER:
        raise _damaged(key, name, text)
    return number


def _version(key: str, text: bytes | None) -> str | None:
    try:
        return None if text is None else str(PolicyVersion.parse(text.decode()))
    except ValueError:
        raise _damaged(key, "latest_version", text) from None


def _damaged(key: str, name: str, text: bytes | None) -> UnavailableError:
    return UnavailableError(
        f"the field {name} of {key} in Redis cannot be read: it is {(text or b'')[:100]!r}; restore Redis from a copy"
    )
