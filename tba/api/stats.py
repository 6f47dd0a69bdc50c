"""Replies for people who watch a run: counts, curves, a summary in sentences, weight versions."""

from __future__ import annotations

from pydantic import Field

from tba.fields import StrictModel, VersionText

NUM_DECILES = 11
"""Length of `reward_deciles`: smallest value, nine deciles, largest value."""


class Rates(StrictModel):
    """Rollouts and completion tokens per second, counted by the buffer process over the last `window_s` seconds."""

    window_s: float
    generated_per_s: float
    evicted_per_s: float
    drawn_per_s: float
    trained_per_s: float
    generated_tokens_per_s: float | None = None
    trained_tokens_per_s: float | None = None


class StoredStats(StrictModel):
    """Details of the stored rollouts at `log_position`; for large buffers they may be seconds old."""

    log_position: int
    by_version: dict[VersionText, int]
    """Policy version -> number of rollouts, for the newest 50 versions. A rollout counts for its oldest version."""
    num_of_older_versions: int
    """Number of rollouts of the versions that `by_version` leaves out."""
    reward_deciles: list[float] | None = Field(min_length=NUM_DECILES, max_length=NUM_DECILES)
    """Rewards of the scored rollouts: smallest, nine deciles (nearest rank), largest; None if nothing is scored."""


class TokenTotals(StrictModel):
    """Completion tokens since the run began."""

    generated: int
    """Tokens of all rollouts that the buffer has ever stored."""
    trained: int
    """Tokens of the rollouts that steps trained on; those of a rollout that was trained on twice count twice."""

    def line(self) -> str:
        """Return both numbers as one line of text for people."""
        return f"tokens: {self.generated:,} generated, {self.trained:,} trained"


class FailedReason(StrictModel):
    """A reason why rollouts have no score, and how many have that reason."""

    reason: str
    """For example `bad_data` (docs/rewards.md)."""
    num: int
    example: str
    """The most frequent full text of this reason, with its detail."""


class Stats(StrictModel):
    """GET /v1/stats: what is stored now, and counts since the run began (None or empty where a snapshot is shown)."""

    run: str
    num_rollouts: int
    """Rollouts stored now: scored, pending and failed ones together."""
    num_scored: int
    num_pending: int
    num_failed: int
    failed_reasons: list[FailedReason] = Field(default_factory=list)
    """Reasons of the newest 500 failed rollouts, the most frequent first; the counts may be seconds old."""
    num_used_up: int = 0
    """Scored rollouts that have been in `sampling.max_uses` batches, and are therefore not drawn again."""
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
    """Memory of the index in the buffer process."""
    epoch: int = 0
    """Epoch of the buffer process that owns the run."""
    num_publications: int
    pushed: dict[str, int]
    refused: dict[str, int]
    evicted: dict[str, int]
    """Reason -> number of rollouts."""
    rescored: dict[str, int] = Field(default_factory=dict)
    leases: dict[str, int]
    rollouts_generated: int
    rollouts_drawn: int
    rollouts_trained: int
    """Rollouts of batches that a step trained on."""
    rollouts_refused_by_trainer: dict[str, int] = Field(default_factory=dict)
    """Reason -> number of drawn rollouts that the trainer could not use."""
    batches_skipped: dict[str, int] = Field(default_factory=dict)
    """Reason -> number of batches that a step consumed without training on them."""
    trained_steps: dict[str, int] = Field(default_factory=dict)
    """`kept`, `dropped`: number of steps whose advantages and weights are still stored, or were dropped."""
    samples_per_insert: float | None
    """Rollouts trained / rollouts generated."""
    slots: dict[str, int]
    """Counts over all drawn batches: slots (total, recent, replay, fallback), rollouts and distinct_rollouts."""
    unique_ratio: float | None = None
    """distinct_rollouts / rollouts of `slots`. A rollout that two groups draw counts as distinct in both."""
    realised_most_on_policy: float | None
    """Share of slots that drew from recent data."""
    mean_reward_recent: float | None
    policy_age_histogram: dict[int, int]
    """Policy age, in steps, at the step that consumed a rollout -> number of rollouts."""
    tokens: TokenTotals | None = None
    component_seconds: dict[str, float] = Field(default_factory=dict)
    """Kind of component -> seconds of presence, summed over all components of the kind, by their heartbeats."""
    rates: Rates | None = None
    """None during the first second."""
    stored: StoredStats | None = None


class Curves(StrictModel):
    """Metrics of the acked steps of the active lineage and its ancestors, oldest first, without abandoned steps.

    Point i stands for the steps from `first_steps[i]` to `steps[i]`. Where there are more steps than points, each point
    is the mean of the known values of `num_steps_per_point` successive steps.
    """

    names: list[str]
    """Names of all metrics that any step has."""
    num_steps: int
    """Number of steps in the range that was asked for."""
    num_steps_per_point: int = Field(ge=1)
    first_steps: list[int]
    steps: list[int]
    at_s: list[float]
    """Time at which the last step of each point was acked, Unix seconds."""
    values: dict[str, list[float | None]]
    """Name -> one value per point; None: no step of the point knows it."""
    num_abandoned: int
    """Number of steps that resumes have abandoned."""


class RunSummary(StrictModel):
    """A run for people: its state by the numbers, in sentences. Backticks stand around what is code."""

    state: str
    """The first with evidence (docs/page.md) of: failed, failing-scores, waiting, collapsing, alarm, cut-off, flat,
    interrupted, starved, solved, ended, learning."""
    doing: str
    """What the run does, or how it ended."""
    learning: str | None
    """Reward and evaluations, then and now; None: no step has been made."""
    finding: str
    """The evidence of the state."""
    remedy: str | None
    """What to try; None: nothing has to change."""

    @property
    def line(self) -> str:
        """The state, its evidence and its remedy, as plain text."""
        return " ".join((f"{self.state}:", self.finding, self.remedy or "")).rstrip().replace("`", "")

    @property
    def text(self) -> str:
        """All sentences, as plain text."""
        return " ".join(part for part in (self.doing, self.learning, self.line) if part)


class WeightVersionInfo(StrictModel):
    """One published weight version, from its manifest."""

    version: VersionText
    parent: VersionText | None
    """The version that its lineage continued from, or None."""
    published_at_s: float
    """Time at which its manifest was made, Unix seconds."""
    num_bytes: int
    """Bytes of its tensors, without the (small) files of config and tokenizer."""
    dtype: str


class WeightVersionList(StrictModel):
    """GET /v1/versions: the newest versions first."""

    versions: list[WeightVersionInfo]
    num_older: int
    """Versions in the store that the list leaves out."""
