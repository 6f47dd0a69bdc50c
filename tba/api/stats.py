"""What people look at: counts, curves, where the run stands in sentences, weight versions."""

from __future__ import annotations

from pydantic import Field

from tba.fields import StrictModel, VersionText

NUM_DECILES = 11
"""Smallest, nine deciles, largest."""


class Rates(StrictModel):
    """Rollouts and completion tokens per second over the last `window_s` seconds, as this process has counted them."""

    window_s: float
    generated_per_s: float
    evicted_per_s: float
    drawn_per_s: float
    trained_per_s: float
    generated_tokens_per_s: float | None = None
    trained_tokens_per_s: float | None = None


class StoredStats(StrictModel):
    """The stored rollouts in detail, at `log_position`; for large buffers it may be seconds old.

    Deciles are eleven occurring values, from the smallest to the largest (nearest rank); none if nothing is stored.
    """

    log_position: int
    by_version: dict[VersionText, int]
    """Policy version (the oldest of a rollout's) -> rollouts; the newest 50 versions."""
    num_of_older_versions: int
    """Rollouts of all versions that `by_version` leaves out."""
    reward_deciles: list[float] | None = Field(min_length=NUM_DECILES, max_length=NUM_DECILES)
    """Of the scored rollouts."""


class TokenTotals(StrictModel):
    """Completion tokens since the run began."""

    generated: int
    """Of rollouts that the buffer has stored."""
    trained: int
    """Of what steps trained on; a rollout that was trained on twice counts twice."""

    def line(self) -> str:
        """Return them as text for people."""
        return f"tokens: {self.generated:,} generated, {self.trained:,} trained"


class FailedReason(StrictModel):
    """Why rollouts have no score."""

    reason: str
    """Such as `bad_data` (docs/rewards.md)."""
    num: int
    example: str
    """The whole text that most of them have, with the detail."""


class Stats(StrictModel):
    """GET /v1/stats: what is stored now, and the counts since the run began; of a snapshot these are None or empty."""

    run: str
    num_rollouts: int
    """Stored now; scored, pending and failed add up to it."""
    num_scored: int
    num_pending: int
    num_failed: int
    failed_reasons: list[FailedReason] = Field(default_factory=list)
    """Of the newest 500 of these, the commonest first; they may be seconds old."""
    num_used_up: int = 0
    """Of the scored ones: those that were in `sampling.max_uses` batches, and are not drawn again."""
    num_prompts_train: int
    num_prompts_heldout: int
    num_prompts_seen: int
    """Prompts with a scored rollout stored now."""
    num_prompts_drawable: int = 0
    """Prompts that can fill a slot of a batch now."""
    payload_bytes: int
    log_position: int
    checkpoint_position: int = 0
    """Log position of the last checkpoint of the log; a restart reads the later events one by one."""
    index_bytes: int = 0
    """Memory of the index in this process."""
    epoch: int = 0
    """Epoch of the buffer process that owns the run."""
    num_publications: int
    pushed: dict[str, int]
    refused: dict[str, int]
    evicted: dict[str, int]
    """Reason -> rollouts."""
    rescored: dict[str, int] = Field(default_factory=dict)
    leases: dict[str, int]
    rollouts_generated: int
    rollouts_drawn: int
    rollouts_trained: int
    """Rollouts of batches that a step trained on."""
    rollouts_refused_by_trainer: dict[str, int] = Field(default_factory=dict)
    """Reason -> rollouts of batches that the trainer could not use."""
    batches_skipped: dict[str, int] = Field(default_factory=dict)
    """Reason -> batches that a step consumed without training on them."""
    trained_steps: dict[str, int] = Field(default_factory=dict)
    """Steps of which is known what became of each rollout: kept now, and dropped."""
    samples_per_insert: float | None
    """Trained per generated rollout."""
    slots: dict[str, int]
    """Slots of drawn batches: total, recent, replay and fallback; and their rollouts, distinct_rollouts."""
    unique_ratio: float | None = None
    """Distinct rollouts of each group, per drawn rollout."""
    realised_most_on_policy: float | None
    """Share of slots that drew from recent data."""
    mean_reward_recent: float | None
    policy_age_histogram: dict[int, int]
    """Policy age in steps when a step consumed them -> rollouts."""
    tokens: TokenTotals | None = None
    component_seconds: dict[str, float] = Field(default_factory=dict)
    """Kind of component -> seconds that components of this kind were there, added up, as their heartbeats show."""
    rates: Rates | None = None
    """None during the first second."""
    stored: StoredStats | None = None


class Curves(StrictModel):
    """Metrics of the acked steps of the active history, oldest first; abandoned steps are left out.

    Point i stands for the steps from `first_steps[i]` to `steps[i]`: with more steps than points, `num_steps_per_point`
    neighbours are one point, with the mean of their known values.
    """

    names: list[str]
    """Every metric that any step has."""
    num_steps: int
    """Steps in the range that was asked for."""
    num_steps_per_point: int = Field(ge=1)
    first_steps: list[int]
    steps: list[int]
    at_s: list[float]
    """When the last step of each point was acked, Unix seconds."""
    values: dict[str, list[float | None]]
    """Name -> one value per point; None: no step of the point knows it."""
    num_abandoned: int
    """Steps that resumes have abandoned."""


class RunSummary(StrictModel):
    """What a run does, how it learns, what waits for what, and what to try: one sentence each."""

    doing: str
    learning: str | None
    """None: no step has been made."""
    waiting: str | None
    """None: nothing has waited for longer than a moment."""
    advice: str | None
    """None: nothing calls for it."""

    @property
    def text(self) -> str:
        """The sentences, one after the other."""
        return " ".join(part for part in (self.doing, self.learning, self.waiting, self.advice) if part)


class WeightVersionInfo(StrictModel):
    """One published weight version, as its manifest says."""

    version: VersionText
    parent: VersionText | None
    """The version that its lineage continued from, or None."""
    published_at_s: float
    """When its manifest was made, Unix seconds."""
    num_bytes: int
    """Of its tensors; config and tokenizer are shared by versions and small."""
    dtype: str


class WeightVersionList(StrictModel):
    """GET /v1/versions: the newest versions first."""

    versions: list[WeightVersionInfo]
    num_older: int
    """Versions in the store that the list leaves out."""
