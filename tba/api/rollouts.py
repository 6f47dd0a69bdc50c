"""Rollouts over REST: the reply to a push, and stored rollouts for people."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from tba.fields import RunState, StrictModel, VersionText

RolloutOrder = Literal["best", "worst", "newest", "oldest"]
RewardStatus = Literal["scored", "pending", "failed"]
EVICTED_KEY = "tba.num_evicted"
"""Metadata key of the Parquet export: how many matching rollouts were evicted before the export read them."""


class PushOutcome(StrictModel):
    """The result for one rollout of a push: stored (`new`), known already (`duplicate`), or `refused` for a reason."""

    rollout_id: str | None
    outcome: Literal["new", "duplicate", "refused"]
    reason: str | None = None


class PushReply(StrictModel):
    """Reply to a push: one outcome per rollout, in order. For `latest_version` and `run_state` see `LeaseReply`."""

    outcomes: list[PushOutcome]
    latest_version: VersionText | None
    run_state: RunState


class SpanInfo(StrictModel):
    """A version span: response tokens [start, end) were sampled with the weights of `version`."""

    version: VersionText
    start: int
    end: int


class SamplingInfo(StrictModel):
    """Settings of the behaviour policy. Temperature 0 means greedy; top_p 1 and top_k 0 mean off."""

    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: list[str]


class RewardPart(StrictModel):
    """The score of one scorer of the task, before its weight is applied."""

    name: str
    score: float
    weight: float | None
    """Weight of the scorer in the buffer's recipe; None: the recipe has no such scorer (any more)."""


class TrainedStep(StrictModel):
    """An optimizer step that consumed a rollout."""

    version: VersionText
    """The step as `lineage-step`, which is also the version of the weights that it made."""
    at_s: float
    """Time of its ack, Unix seconds."""
    advantage: float | None
    """The advantage A_j of the rollout in that step; None: the objective has no advantage."""
    weight: float | None
    """Mean weight of the rollout's tokens in that step; None: no share in the gradient, so no forward pass was made."""
    skipped: str | None
    """Why the step left the weights unchanged; None: it was applied."""
    abandoned: bool
    """A resume went back to an earlier step, so the active lineage does not have this one."""


class EpisodeInfo(StrictModel):
    """The play of an environment that a rollout is, as one seat saw it."""

    episode_id: str
    environment: str
    environment_version: str
    seed: int
    seat: int
    stop_condition: str
    is_truncated: bool
    """Whether a limit ended it."""
    turn_rewards: list[float | None]
    """What the environment paid for each turn; None: nothing yet."""
    num_turns: int
    """Number of replies of the policy."""
    num_tool_calls: int
    failure_boundary: str | None = None
    """The part that it failed in; None: it has not failed."""


class SegmentInfo(StrictModel):
    """A run of tokens of a sequence with one role and one origin (template, environment, policy)."""

    role: str
    origin: str
    num_tokens: int
    turn: int
    is_trained: bool
    finish_reason: str | None
    parse_status: str | None


class SequenceInfo(StrictModel):
    """The tokens of one path through a conversation; its segments cover them in order."""

    tokens: list[int]
    segments: list[SegmentInfo]


class MessageInfo(StrictModel):
    """A message of a conversation, for people."""

    role: str
    content: str
    turn: int


class RolloutInfo(StrictModel):
    """One stored rollout without its token arrays. Times are Unix seconds."""

    rollout_id: str
    task: str
    prompt_id: str
    visit_id: str
    version: VersionText
    """The oldest version that sampled a token of it; policy age is measured from this version."""
    version_spans: list[SpanInfo]
    policy_age_steps: int
    """Optimizer steps between `version` and the current step of the active lineage."""
    prompt_text: str | None
    """Cut to the same length as the response text; None: the run no longer has the prompt."""
    prompt_data: dict[str, Any] | None = None
    """Data for the scorer, such as the gold answer. None: the run no longer has the prompt, or the JSON of the data is
    longer than the `text_chars` of the request."""
    num_prompt_tokens: int
    num_response_tokens: int
    response_text: str
    response_text_cut: bool
    """Whether `response_text` is only the beginning of the response."""
    finish_reason: str
    reward: float | None
    reward_status: RewardStatus
    reward_reason: str | None
    reward_version: str | None
    reward_parts: list[RewardPart] | None = None
    """None: the task has one scorer, whose score is the reward, or there is no score."""
    episode: EpisodeInfo | None = None
    """None: the rollout is one response to a prompt."""
    num_batches: int = 0
    """Number of batches with this rollout, without void and abandoned batches."""
    sampling: SamplingInfo
    searcher_id: str
    started_at_s: float
    finished_at_s: float


class RolloutPage(StrictModel):
    """GET /v1/rollouts. Send `next` as `cursor` to get the next page; it is None at the end.

    The index cannot filter by `searcher_id`, `finish_reason`, `contains`, and by what only episodes have. With these, a
    request reads at most 20,000 rollouts. The page may then hold fewer than `limit`, or none, and `next` continues
    after the last one that was read.
    """

    rollouts: list[RolloutInfo]
    next: str | None
    num_read: int = 0
    """Number of stored rollouts that were read for this page."""


class RefLogprobInfo(StrictModel):
    """Sum of the ref log-probs of the response tokens, and the version of the reference that computed them."""

    value: float
    version: VersionText


class RolloutDetail(RolloutInfo):
    """GET /v1/rollouts/{rollout_id}: all stored fields of one rollout."""

    prompt_tokens: list[int]
    """Tokens before the first trained reply."""
    response_tokens: list[int]
    """Tokens that the policy sampled, reply after reply."""
    sampler_logprobs: list[float]
    sequences: list[SequenceInfo] | None = None
    """All tokens of a conversation; None: they are the prompt tokens and the response tokens."""
    messages: list[MessageInfo] | None = None
    ref_logprob: RefLogprobInfo | None
    token_texts: list[str] | None = None
    """The text that each response token adds; None: this service has no tokenizer of the model."""
    sequence_texts: list[list[str] | None] | None = None
    """The same of all tokens, sequence by sequence."""
    trained: list[TrainedStep] = Field(default_factory=list)
    """Steps that consumed the rollout, oldest first; without steps whose advantages are no longer kept."""
    trained_since: VersionText | None = None
    """The oldest step whose advantages are kept; older steps are only in the ledger. None: no step is kept."""
