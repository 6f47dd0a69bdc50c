"""Who waits for whom. Pure functions of a few counts.

    streaming    sampling waits   until `min_size_to_sample` scored rollouts are stored and one can fill a slot
                                  ("rollouts"); with `samples_per_insert`, while
                                  drawn + batch > samples_per_insert * inserted + error   ("samples-per-insert")
                 generation waits while samples_per_insert * (inserted + leased) > drawn + error ("trainer-ahead")
    alternate    after each mark: generation runs until k batches' worth arrived, sampling waits ("alternate-generate");
                 then sampling runs for k batches, generation waits ("alternate-train"), until the next mark

Generation never waits while no batch could be drawn at all, and the error margin is at least one batch; so the two
sides cannot wait for each other. `inserted` counts scored rollouts: only those can be trained on. Leased rollouts
count for generation, so that many searchers do not overshoot together. What finished rollouts are pushed is always
taken: a paid-for rollout is never refused.
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
    samples_per_insert: float | None
    error: float
    alternate: bool

    @classmethod
    def of(cls, recipe: Recipe) -> FlowSettings:
        """From a recipe; the error margin is at least one batch."""
        sampling = recipe.sampling
        batch_rollouts = sampling.prompts_per_batch * sampling.group_size
        return cls(
            batch_rollouts=batch_rollouts,
            sync_interval=recipe.trainer.sync_interval,
            min_size_to_sample=sampling.min_size_to_sample,
            samples_per_insert=sampling.samples_per_insert,
            error=max(sampling.samples_per_insert_error, batch_rollouts),
            alternate=sampling.alternate,
        )

    @property
    def rollouts_per_interval(self) -> int:
        """Scored rollouts that one generating phase of `alternate` makes."""
        return math.ceil(self.sync_interval * self.batch_rollouts / (self.samples_per_insert or 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowCounts:
    """Where the run stands, in rollouts unless the name says otherwise."""

    stored: int
    """Scored rollouts stored now."""
    can_fill_slot: bool
    """Whether some prompt has enough of them for a group."""
    inserted: int
    """Scored rollouts ever stored."""
    leased: int
    """Rollouts that open train leases still owe."""
    drawn: int
    """Rollouts drawn, batches that became void not counted."""
    inserted_since_mark: int
    batches_since_mark: int

    def can_sample(self, settings: FlowSettings) -> bool:
        """Whether a batch could be drawn, flow control aside."""
        return self.can_fill_slot and self.stored >= settings.min_size_to_sample


def sampling_wait(counts: FlowCounts, settings: FlowSettings) -> str | None:
    """The name of what drawing a batch waits for, or None."""
    if not counts.can_sample(settings):
        return "rollouts"
    if settings.alternate:
        is_generating = counts.inserted_since_mark < settings.rollouts_per_interval
        return "alternate-generate" if is_generating or counts.batches_since_mark >= settings.sync_interval else None
    if settings.samples_per_insert is not None:
        allowed = settings.samples_per_insert * counts.inserted + settings.error
        if counts.drawn + settings.batch_rollouts > allowed:
            return "samples-per-insert"
    return None


def generation_room(counts: FlowCounts, settings: FlowSettings) -> tuple[int | None, str | None]:
    """How many more rollouts may be leased (None: any number), and what generation waits for when that is 0."""
    if settings.alternate:
        room = settings.rollouts_per_interval - counts.inserted_since_mark - counts.leased
        wait = "alternate-train"
    elif settings.samples_per_insert is not None:
        room = math.floor((counts.drawn + settings.error) / settings.samples_per_insert)
        room -= counts.inserted + counts.leased
        wait = "trainer-ahead"
    else:
        return None, None
    if not counts.can_sample(settings):
        room = max(room, settings.min_size_to_sample - counts.stored - counts.leased, int(counts.leased == 0))
    return (room, None) if room > 0 else (0, wait)
