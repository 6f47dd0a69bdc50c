"""Flow control: whether sampling or generation waits. Pure functions of a few counts.

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

import math
from dataclasses import dataclass

from tba.config import Recipe


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
