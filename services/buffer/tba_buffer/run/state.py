"""Read the state of the run, and decide by it whether sampling or generation waits.

    read         a RunSnapshot, which leases and draws decide by: state, counts of flow control, live settings, index.
                 A damaged field is an error, since nobody may be given work by a guess.
    read_fields  the RunFields, which people are shown. A damaged field is noted, and shown as absent.

Every request asks the RunStateReader, once. Fields that must be atomic with other keys are read beside them: scripts
compare the token themselves, and the pages of the audits and of the ledger read lineage and step in one transaction
with their lines.

Flow control is pure functions of the counts:

    streaming    sampling waits   until `min_size_to_sample` scored rollouts are stored and one can fill a slot
                                  ("rollouts"); with `samples_per_insert`, while
                                  drawn + batch > samples_per_insert * inserted + error   ("samples-per-insert")
                 generation waits while samples_per_insert * (inserted + pending + leased) > drawn + error
                                  ("trainer-ahead")
    alternate    after each publication: generation runs until k batches' worth arrived, sampling waits
                 ("alternate-generate");
                 then sampling runs for k batches, generation waits ("alternate-train"), until the next one
    either       generation waits ("unscored") when only rollouts with an unknown reward hold it up: they count as if
                 they were scored, and they fill at most half of the buffer

`inserted` counts scored rollouts: only those can be trained on. Leased and pending ones count for generation, so that
many searchers do not overshoot together, and generation stops by itself while the reward service is away.

The two sides never wait for each other: generation never waits while no batch could be drawn at all and nothing is on
its way, and the error margin is at least one batch and one rollout's worth of samples. When both wait, rollouts are on
lease (they arrive, or their lease expires) or pending (they are scored, or end as failed). A push is never refused for
flow control, since its rollouts are paid for (docs/adr/0006-leases-wait-not-pushes.md).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from tba.api import RunChange, RunState
from tba.concurrency import SingleFlight
from tba.config import Recipe
from tba.errors import UnavailableError
from tba.fields import MAX_NUMBER
from tba.versions import PolicyVersion
from tba_buffer.index.replay import IndexView
from tba_buffer.index.rollout_index import Index
from tba_buffer.run.settings import Settings, SettingsRevision
from tba_buffer.storage.client import redis_errors
from tba_buffer.storage.context import Context

COUNTERS = ("log_position", "scored_total", "inflight", "drawn", "void", "scored_at_mark", "marks")
"""The counters that read_run.lua returns, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSettings:
    """The settings that decide; counts are rollouts, except `sync_interval`: batches."""

    batch_rollouts: int
    sync_interval: int
    min_size_to_sample: int
    max_pending: int
    samples_per_insert: float | None
    error: float
    alternate: bool

    @classmethod
    def of(cls, recipe: Recipe) -> FlowSettings:
        """Return the settings of a recipe."""
        sampling = recipe.sampling
        batch_rollouts = sampling.prompts_per_batch * sampling.group_size
        return cls(
            batch_rollouts=batch_rollouts,
            sync_interval=recipe.trainer.sync_interval,
            min_size_to_sample=sampling.min_size_to_sample,
            max_pending=max(1, recipe.buffer.max_rollouts // 2),
            # an offline run inserts nothing, so a ratio to what was inserted would soon end it
            samples_per_insert=None if recipe.is_offline else sampling.samples_per_insert,
            # a smaller margin could let both sides wait for each other
            error=max(sampling.samples_per_insert_error, batch_rollouts, sampling.samples_per_insert or 0.0),
            alternate=sampling.alternate,
        )

    @property
    def rollouts_per_interval(self) -> int:
        """Scored rollouts of one generation phase of `alternate`."""
        return math.ceil(self.sync_interval * self.batch_rollouts / (self.samples_per_insert or 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowCounts:
    """Where the run stands, in rollouts unless the name says otherwise."""

    stored: int
    """Scored rollouts stored now."""
    pending: int
    """Rollouts stored now whose reward is unknown and may become known."""
    can_fill_slot: bool
    """Whether some prompt has enough of the scored ones for a group."""
    inserted: int
    """Scored rollouts ever stored."""
    leased: int
    """Rollouts that open train leases still owe."""
    drawn: int
    """Rollouts drawn, batches that became void not counted."""
    inserted_since_publication: int
    batches_since_publication: int
    publications: int

    def can_sample(self, settings: FlowSettings) -> bool:
        """Return whether a batch could be drawn, flow control aside."""
        return self.can_fill_slot and self.stored >= settings.min_size_to_sample


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawLimits:
    """Limits that must still hold when a batch is recorded, since draws run at the same time. None: no limit.

    `max_drawn` counts rollouts and `max_batches` counts batches since publication number `publications`, the newest
    one; both include the new batch.
    """

    max_drawn: int | None = None
    max_batches: int | None = None
    publications: int | None = None


def sampling_wait(counts: FlowCounts, settings: FlowSettings) -> str | None:
    """Return the name of the wait of drawing a batch, or None."""
    if not counts.can_sample(settings):
        return "rollouts"
    if settings.alternate:
        # after the last batch of a phase too: the next generation phase begins with a publication
        is_generating = counts.inserted_since_publication < settings.rollouts_per_interval
        return (
            "alternate-generate"
            if is_generating or counts.batches_since_publication >= settings.sync_interval
            else None
        )
    limit = draw_limits(counts, settings).max_drawn
    if limit is not None and counts.drawn + settings.batch_rollouts > limit:
        return "samples-per-insert"
    return None


def draw_limits(counts: FlowCounts, settings: FlowSettings) -> DrawLimits:
    """Return the limits of a batch that these counts allow. More rollouts only ever raise them."""
    if settings.alternate:
        return DrawLimits(max_batches=settings.sync_interval, publications=counts.publications)
    if settings.samples_per_insert is None:
        return DrawLimits()
    return DrawLimits(max_drawn=math.floor(settings.samples_per_insert * counts.inserted + settings.error))


def generation_room(counts: FlowCounts, settings: FlowSettings) -> tuple[int | None, str | None]:
    """Return how many more rollouts may be leased (None: any number), and the name of the wait when that is 0."""
    # without this limit, rollouts without a reward could fill the whole buffer while the reward service is away
    if counts.pending >= settings.max_pending:
        return 0, "unscored"
    if settings.alternate:
        room = settings.rollouts_per_interval - counts.inserted_since_publication
        wait = "alternate-train"
    elif settings.samples_per_insert is not None:
        room = math.floor((counts.drawn + settings.error) / settings.samples_per_insert) - counts.inserted
        wait = "trainer-ahead"
    else:
        return None, None
    on_the_way = counts.leased + counts.pending
    # without enough rollouts for a batch the trainer cannot make room: so generation continues up to that many
    if not counts.can_sample(settings):
        room = max(room, settings.min_size_to_sample - counts.stored, int(on_the_way == 0))
    room -= on_the_way
    if room > 0:
        return room, None
    # without the pending ones there would be room: the wait is for their rewards
    return 0, "unscored" if room + counts.pending > 0 else wait


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
        # the script also voids batches past their deadline, so that they do not count as drawn
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
    # a run has no state before its first change: it is running from the beginning
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
