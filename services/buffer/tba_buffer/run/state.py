"""Read the state of the run. Every request asks the RunStateReader, once.

    read         a RunSnapshot, which leases and draws decide by: state, counts of flow control, live settings, index.
                 A damaged field is an error, since nobody may be given work by a guess.
    read_fields  the RunFields, which people are shown. A damaged field is noted, and shown as absent.

What must be atomic with other keys is read beside them: the scripts compare the token themselves, and the pages of the
audits and of the ledger read lineage and step in one transaction with their lines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from tba.api import RunChange, RunState
from tba.concurrency import SingleFlight
from tba.errors import UnavailableError
from tba.fields import MAX_NUMBER
from tba.versions import PolicyVersion
from tba_buffer.index.replay import IndexView
from tba_buffer.index.rollout_index import Index
from tba_buffer.run.flow_control import FlowCounts
from tba_buffer.run.settings import Settings, SettingsRevision
from tba_buffer.storage.client import redis_errors
from tba_buffer.storage.context import Context

COUNTERS = ("log_position", "scored_total", "inflight", "drawn", "void", "scored_at_mark", "marks")
"""The counters that read_run.lua returns, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """The run at one moment. `index` follows the log, and is at least as new as the counts."""

    state: RunState
    token: str | None
    lineage: int
    latest_version: str | None
    step: int
    """The last acked step."""
    num_retries: int
    """How often an operator has asked searchers to try refused versions again."""
    settings: SettingsRevision
    counts: FlowCounts
    index: Index


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFields:
    """The `run` hash. Versions are `lineage-step` texts; `step` is the last acked step of the active lineage."""

    state: RunState
    reason: str | None
    lineage: int
    token: str | None
    step: int
    latest_version: str | None
    checkpoint: str | None
    checkpoint_key: str | None
    num_rollbacks: int
    num_lost_changes: int
    num_losses_accepted: int
    change: RunChange | None
    """The last change of the state."""


class RunStateReader:
    """Reads the run; also voids batches past their deadline.

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
            keys.batches_since_publication,
            keys.open_steps,
            keys.settings,
            keys.damaged_items,
        ]
        self._reading = SingleFlight(self._read, asyncio.Lock())
        self._last: RunSnapshot | None = None

    async def read(self) -> RunSnapshot:
        """Return a snapshot that was begun after the call, so every push that was acknowledged by then is in its index.

        Callers that wait at the same time share one.

        Raises:
            SupersededError: a newer buffer process owns the run.
            UnavailableError: Redis did not answer, or a number that is needed cannot be read.
        """
        await self._reading.run()
        assert self._last is not None
        return self._last

    async def read_fields(self) -> RunFields:
        """Return the run as Redis has it.

        Raises:
            UnavailableError: Redis did not answer.
        """
        context = self._context
        with redis_errors("read the run"):
            raw = await context.redis.hgetall(context.keys.run)
        fields = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in raw.items()}
        return RunFields(
            state=read_state(context, raw.get(b"state")),
            reason=fields.get("reason") or None,
            lineage=context.read_number("lineage", fields.get("lineage")),
            token=fields.get("token"),
            step=context.read_number("step", fields.get("step")),
            latest_version=read_version(context, "latest_version", raw.get(b"latest_version")),
            checkpoint=read_version(context, "checkpoint", raw.get(b"checkpoint")),
            checkpoint_key=fields.get("checkpoint_key"),
            num_rollbacks=context.read_number("rollbacks", fields.get("rollbacks")),
            num_lost_changes=context.read_number("changes_lost", fields.get("changes_lost")),
            num_losses_accepted=context.read_number("losses_accepted", fields.get("losses_accepted")),
            change=read_change(context, "last", fields["change"]) if "change" in fields else None,
        )

    async def void(self, member: str | bytes) -> None:
        """Void an open batch (member of `open_batches`) that cannot be answered, before its deadline.

        Raises:
            SupersededError: a newer buffer process owns the run.
            UnavailableError: Redis did not answer.
        """
        await self._context.scripts.run("read_run", self._keys, [self._context.clock(), member])
        # its rollouts may be gone because Redis lost them: the index is compared with the log again
        await self._view.catch_up()

    async def _read(self) -> None:
        reply = await self._context.scripts.run("read_run", self._keys, [self._context.clock()])
        self._last = await self._parse(*reply)

    async def _parse(
        self,
        fields: Sequence[bytes | None],
        counters: Sequence[bytes | None],
        batches_since_publication: int,
        revision: Any,
    ) -> RunSnapshot:
        keys, (state, token, *_) = self._context.keys, fields
        lineage, step, retries = (
            _number(keys.run, name, fields[at], lowest=0) for at, name in ((2, "lineage"), (4, "step"), (5, "retries"))
        )
        position, inserted, leased, drawn, void, inserted_at_publication, publications = (
            _number(keys.counters, name, number) for name, number in zip(COUNTERS, counters, strict=True)
        )
        index = self._view.index
        # a superseded process must hear that from catch_up, even where the index is up to date
        if index.position != position or self._context.ownership.refused is not None:
            index = await self._view.catch_up()
        return RunSnapshot(
            state=read_state(self._context, state),
            token=None if token is None else token.decode(errors="replace"),
            lineage=lineage,
            latest_version=_version(keys.run, fields[3]),
            step=step,
            num_retries=retries,
            settings=await self._settings.at(_number(keys.settings, "revision", revision, lowest=0)),
            counts=FlowCounts(
                stored=index.num_scored,
                pending=index.num_pending,
                can_fill_slot=index.num_drawable > 0,
                inserted=inserted,
                leased=max(0, leased),
                drawn=drawn - void,
                inserted_since_publication=inserted - inserted_at_publication,
                batches_since_publication=batches_since_publication,
                publications=publications,
            ),
            index=index,
        )


def read_state(context: Context, text: bytes | None) -> RunState:
    """Return the state of the run; a text that is no state counts as failed, where nothing is drawn or leased."""
    state = "running" if text is None else text.decode(errors="replace")
    if state in get_args(RunState):
        context.damaged_items.forget("run", "state")
        return cast(RunState, state)
    context.damaged_items.note("run", "state", f"it is {state[:100]!r}", at_s=context.clock())
    return "failed"


def read_version(context: Context, name: str, text: bytes | None) -> str | None:
    """Return a version of the `run` hash; None where there is none. A damaged one is noted and counts as none."""
    if text is None:
        context.damaged_items.forget("run", name)  # a damaged one was taken away
        return None
    return context.read_or_note("run", name, lambda: str(PolicyVersion.parse(text.decode())))


def read_change(context: Context, name: str, text: str | bytes) -> RunChange | None:
    """Return a line of the audit; None where it is damaged: then it is noted."""
    return context.read_or_note("change", f"run {name}", lambda: RunChange.model_validate_json(text))


def _number(key: str, name: str, text: bytes | None, *, lowest: int = -MAX_NUMBER) -> int:
    """Return a number that a decision needs; 0 where there is none.

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
