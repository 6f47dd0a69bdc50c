"""Prompts, their upload, and leases on visits and evaluation units."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from tba.fields import MAX_DIGITS, Integer, Name, Number, RunState, Split, StrictModel, VersionText
from tba.wire.codec import new_id

MAX_DATA_LEVELS = 32
"""Deepest nesting of a prompt's data. JSON readers have limits of their own, and every searcher must read the data."""
_MAX_WHOLE = 10**MAX_DIGITS


def _plain_json(data: dict[str, Any]) -> dict[str, Any]:
    level: list[Any] = [data]  # level by level: recursion would let deep data exhaust the stack
    for _ in range(MAX_DATA_LEVELS):
        children = [child for value in level for child in (value.values() if isinstance(value, dict) else value)]
        if any(isinstance(child, int) and not -_MAX_WHOLE < child < _MAX_WHOLE for child in children):
            raise ValueError(f"holds a whole number of more than {MAX_DIGITS} digits; store it as a text")
        level = [child for child in children if isinstance(child, (dict, list))]
    if level:
        raise ValueError(f"nested deeper than {MAX_DATA_LEVELS} levels; flatten it, or store it as one text")
    json.dumps(data, allow_nan=False, ensure_ascii=False).encode()  # NaN and lone surrogates raise ValueError
    return data


PromptData = Annotated[dict[str, Any], AfterValidator(_plain_json)]
"""What the reward of a prompt needs: JSON, nested at most 32 levels deep."""


class Prompt(StrictModel):
    """One question with its task name and the data its reward needs."""

    prompt_id: Name
    task: Name
    text: str = Field(min_length=1, max_length=1_000_000)
    data: PromptData = Field(default_factory=dict)
    split: Split = "train"


class PromptUpload(StrictModel):
    """POST /v1/prompts: idempotent by prompt id; the same id with other content is refused."""

    prompts: list[Prompt] = Field(min_length=1, max_length=10_000)


class PromptUploadReply(StrictModel):
    """The changes that an upload made."""

    num_new: int
    num_same: int
    num_train: int
    num_heldout: int


PromptOrder = Literal["upload", "best", "worst", "most"]
"""`best` and `worst` go by the mean reward of the stored rollouts, `most` by their number."""


class PromptInfo(StrictModel):
    """One prompt, and the rollouts of it that are stored now."""

    prompt_id: str
    task: str
    split: Split
    text: str
    text_cut: bool
    """Whether `text` is only the beginning."""
    data: dict[str, Any] | None
    """What the scorer gets beside the text, such as the gold answer; None: in a page it is longer than texts may be."""
    num_rollouts: int
    num_scored: int
    reward_mean: float | None
    """Over the scored ones; so are these:"""
    reward_min: float | None
    reward_max: float | None


class PromptPage(StrictModel):
    """GET /v1/prompts. Send `next` as `after` for the page behind this one; it is None at the end."""

    prompts: list[PromptInfo]
    next: int | None
    num_matching: int
    """Prompts on all pages."""


class PromptVersion(StrictModel):
    """The stored rollouts of a prompt by one policy version."""

    version: VersionText
    num_rollouts: int
    num_scored: int
    reward_mean: float | None


class PromptDetail(PromptInfo):
    """GET /v1/prompts/{prompt_id}: the whole text, and the stored rollouts by version, oldest first."""

    by_version: list[PromptVersion]


MAX_LEASE_IDS = 4096
"""Most leases in one return or renewal."""
MAX_REFUSED_VERSIONS = 64


class LeaseRequest(StrictModel):
    """POST /v1/leases: claim up to `max_leases` visits, and no evaluation of `refused_versions`.

    A retry (the same `searcher_id` and `request_id`) is answered with the leases that the first request was granted, as
    long as they are open: without that, a lost reply would leave leases that nobody works on until they expire.

    With `wait_s` the reply waits, at most so long, until there is room for `min_leases` visits, an evaluation, another
    version than `known_version`, or the end of the run; then there may be fewer leases, or none. The buffer holds a few
    requests at a time and answers the others at once.
    """

    searcher_id: Name
    max_leases: Integer = Field(ge=1, le=1024)
    min_leases: Integer = Field(default=1, ge=1, le=1024)
    wait_s: Number = Field(default=0.0, ge=0, le=60)
    known_version: VersionText | None = None
    request_id: Name = Field(default_factory=partial(new_id, "request"))
    version: VersionText | None = None
    refused_versions: list[VersionText] = Field(default_factory=list, max_length=MAX_REFUSED_VERSIONS)


class Lease(StrictModel):
    """A claim on one visit of one prompt.

    `train`: sample `num_rollouts` completions with the newest weights and push them under `visit_id`.
    `sample`, `greedy`: held-out evaluation `eval_id` with exactly `version`; report with POST /v1/evals/{id}/results.
    `temperature` is the current sampling temperature (train), the policy temperature (sample), or 0 (greedy: the most
    likely token).
    """

    lease_id: str
    kind: Literal["train", "sample", "greedy"]
    visit_id: str
    prompt: Prompt
    num_rollouts: int
    temperature: float
    expires_in_s: float
    eval_id: str | None = None
    version: VersionText | None = None


class LeaseReply(StrictModel):
    """`leases` may be empty; then `wait` names what is waited for and `retry_after_s` when to ask again."""

    leases: list[Lease]
    latest_version: VersionText | None
    """The latest version that searchers may sample with: the newest, or an older one (`sampling.lag_steps`)."""
    run_state: RunState
    wait: str | None = None
    retry_after_s: float = 0.0


class LeaseReturn(StrictModel):
    """POST /v1/leases/return: give unfinished leases back (drain). Refused: the visit cannot be sampled, and ends."""

    searcher_id: Name
    lease_ids: list[Name] = Field(max_length=MAX_LEASE_IDS)
    refused_lease_ids: list[Name] = Field(default_factory=list, max_length=MAX_LEASE_IDS)


class LeaseRenewal(StrictModel):
    """POST /v1/leases/renew: the searcher still works on these leases; their deadline moves to `lease_s` from now."""

    searcher_id: Name
    lease_ids: list[Name] = Field(max_length=MAX_LEASE_IDS)


class LeaseRenewalReply(StrictModel):
    """The leases that this searcher no longer holds: fulfilled, ended, or now held by another searcher."""

    lost_lease_ids: list[str]
