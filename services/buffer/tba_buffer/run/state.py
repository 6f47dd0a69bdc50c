"""Read the state of the run, and decide by it whether sampling or generation waits.

    read         returns a RunSnapshot for leases and draws: state, counts of flow control, live settings, index
    read_fields  returns the RunHash, for people

A field that cannot be read is an error with its name, since no work may be handed out by a guess.
Every request asks the RunStateReader, once. Fields that must be atomic with other keys are read together with them.
So scripts compare the token themselves, and the ledger reads its lines and the run in one transaction. RunHash
(storage/context.py) parses the fields for all.

Flow control is pure functions of the counts:

    streaming    sampling waits   until `min_size_to_sample` scored rollouts are stored and a prompt fills a slot
                                  ("rollouts"; "used-up" if some were in `max_uses` batches;
                                  "recent" if m is 1 and recent data does not fill a batch); with
                                  `samples_per_insert`, while
                                  drawn + batch > samples_per_insert * inserted + error   ("samples-per-insert")
                 generation waits while samples_per_insert * (inserted + pending + leased) > drawn + error
                                  ("trainer-ahead")
    alternate    after each publication: generation runs until k batches' worth arrived, sampling waits
                 ("alternate-generate");
                 then sampling runs for k batches, generation waits ("alternate-train")
    either       generation waits ("unscored") when it would not wait without the rollouts with an unknown reward, which
                 count as if they were scored; or when these fill half of the buffer

`inserted` counts scored rollouts: only those can be trained on. Leased and pending ones count for generation. So many
searchers do not overshoot together, and generation stops by itself while the reward service is away.

The two sides never wait for each other. Generation never waits while no batch could be drawn and no rollout is on its
way. The error margin is at least one batch, and one rollout's worth of samples. When both sides wait, rollouts are on
lease (they arrive, or their lease expires) or pending (they are scored, or end as failed). A push is never refused for
flow control, since its rollouts are paid for (docs/adr/0006-leases-wait-not-pushes.md).
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from functools import partial

from tba.api import RollbackInfo, RunState
from tba.concurrency import SingleFlight
from tba.config import Recipe
from tba.fields import MAX_NUMBER
from tba_buffer.index.log_follower import IndexView
from tba_buffer.index.rollout_index import Index
from tba_buffer.run.settings import Settings, SettingsRevision
from tba_buffer.storage.context import Context, RunHash, needed, parse_number

FIELDS: tuple[bytes, ...] = (
    *(b"state", b"token", b"lineage", b"latest_version", b"sampling_version", b"step", b"rollback"),
)
COUNTERS = ("log_position", "scored_total", "inflight", "drawn", "void", "scored_at_mark", "marks")
"""The fields of the run and the counters that read_run.lua returns, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSettings:
    """The settings of flow control; counts are in rollouts, except `sync_interval`, which is in batches."""

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
    """The counts that flow control decides by, in rollouts unless the name says otherwise."""

    stored: int
    """Scored rollouts stored now that batches may hold."""
    pending: int
    """Rollouts stored now whose reward is unknown and may become known."""
    can_fill_slot: bool
    """Whether some prompt has enough scored rollouts for a group."""
    inserted: int
    """Scored rollouts ever stored."""
    leased: int
    """Rollouts that open train leases still owe."""
    drawn: int
    """Rollouts drawn, without those of batches that became void."""
    inserted_since_publication: int
    batches_since_publication: int
    publications: int
    used_up: int = 0
    """Scored rollouts stored now that were in `sampling.max_uses` batches."""
    recent_missing: int = 0
    """Recent rollouts that a batch lacks; 0 where it may draw from all data."""

    def can_sample(self, settings: FlowSettings) -> bool:
        """Return whether a batch could be drawn, flow control aside."""
        return self.can_fill_slot and self.stored >= settings.min_size_to_sample and not self.recent_missing


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawLimits:
    """Limits that must still hold when a batch is recorded, since the run may have changed. None: no limit.

    `max_drawn` counts rollouts and `max_batches` counts batches since publication number `publications`, the newest
    one; both include the new batch.
    """

    max_drawn: int | None = None
    max_batches: int | None = None
    publications: int | None = None


def sampling_wait(counts: FlowCounts, settings: FlowSettings) -> str | None:
    """Return the name of the wait that keeps a batch from being drawn, or None."""
    if not counts.can_sample(settings):
        if counts.recent_missing and counts.can_fill_slot and counts.stored >= settings.min_size_to_sample:
            return "recent"
        # named apart: more rollouts of the same prompts help, and raising the bound does
        return "used-up" if counts.used_up else "rollouts"
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
    """Return the limits for recording a batch that was drawn at these counts. More rollouts only raise them."""
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
    has_trained = settings.alternate and counts.batches_since_publication >= settings.sync_interval
    if not has_trained and not counts.can_sample(settings):
        lacking = max(settings.min_size_to_sample - counts.stored, counts.recent_missing)
        room = max(room, lacking, int(on_the_way == 0))
    room -= on_the_way
    if room > 0:
        return room, None
    # without the pending ones there would be room: the wait is for their rewards
    return 0, "unscored" if room + counts.pending > 0 else wait


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """The run at one moment. `index` is caught up with the log at least as far as the counts."""

    state: RunState
    token: str | None
    lineage: int
    sampling_version: str | None
    """The version that searchers sample with; None: nothing was published yet."""
    step: int
    """The last acked step."""
    rollback: RollbackInfo | None
    """The pending rollback."""
    settings: SettingsRevision
    counts: FlowCounts
    index: Index


class RunStateReader:
    """Reads the state of the run; `read` also voids batches past their deadline."""

    def __init__(self, context: Context, view: IndexView, settings: Settings) -> None:
        self._context = context
        self._view = view
        self._settings = settings
        self._reading = SingleFlight(self._read, asyncio.Lock())
        self._last: RunSnapshot | None = None

    async def read(self) -> RunSnapshot:
        """Return a snapshot read after the call began, so every push acknowledged before the call is in its index.

        Concurrent callers share one snapshot.

        Raises:
            SupersededError: a newer buffer process owns the run.
            UnavailableError: Redis did not answer, or a number that is needed cannot be read.
        """
        await self._reading.run()
        assert self._last is not None
        return self._last

    async def read_fields(self) -> RunHash:
        """Read the run hash from Redis, with every field parsed."""
        return (await RunHash.read(self._context)).parse_all()

    async def void(self, member: str | bytes) -> None:
        """Void an open batch (member of `open_batches`) before its deadline: it cannot be sent to the trainer any more.

        Raises:
            SupersededError: a newer buffer process owns the run.
        """
        await self._context.scripts.run("read_run", now_s=self._context.clock(), member=member)
        # its rollouts may be gone because Redis lost them: the index is compared with the log again
        await self._view.catch_up()

    async def _read(self) -> None:
        # the script also voids batches past their deadline, so that they do not count as drawn
        reply = await self._context.scripts.run("read_run", now_s=self._context.clock())
        fields, counters, batches_since_publication, revision = reply
        keys, run = self._context.keys, RunHash(self._context, dict(zip(FIELDS, fields, strict=True)))
        lineage, step = run.lineage, run.step
        position, inserted, leased, drawn, void, inserted_at_publication, publications = (
            needed(keys.counters, name, partial(parse_number, number, lowest=-MAX_NUMBER))
            for name, number in zip(COUNTERS, counters, strict=True)
        )
        index = self._view.index
        # a superseded process must hear that from catch_up, even where the index is up to date
        if index.position != position or self._context.epoch.refused is not None:
            index = await self._view.catch_up()
        settings = await self._settings.at(needed(keys.settings, "revision", partial(parse_number, revision)))
        # an offline run gets no new data
        is_recent_alone = settings.recipe.sampling.waits_for_recent and not self._context.recipe.is_offline
        self._last = RunSnapshot(
            state=run.state,
            token=run.token,
            lineage=lineage,
            sampling_version=run.sampling_version,
            step=step,
            rollback=run.rollback,
            settings=settings,
            counts=FlowCounts(
                stored=index.num_scored - index.num_used_up,
                used_up=index.num_used_up,
                pending=index.num_pending,
                can_fill_slot=index.num_drawable > 0,
                inserted=inserted,
                leased=max(0, leased),
                drawn=drawn - void,
                inserted_since_publication=inserted - inserted_at_publication,
                batches_since_publication=batches_since_publication,
                publications=publications,
                recent_missing=index.recent_missing(settings.recipe.sampling) if is_recent_alone else 0,
            ),
            index=index,
        )
