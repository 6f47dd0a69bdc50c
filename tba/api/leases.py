"""Leases: who works on which visit or evaluation unit."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tba.api.base import Integer, Name, RunState, VersionText
from tba.api.prompts import Prompt
from tba.config.base import StrictModel
from tba.wire.ids import new_id

MAX_LEASE_IDS = 4096
"""Most leases in one return or renewal."""
MAX_REFUSED_VERSIONS = 64


class LeaseRequest(StrictModel):
    """POST /v1/leases: claim up to `max_leases` visits; no evaluations of `refused_versions`, which it cannot use.

    The same request again (same `searcher_id` and `request_id`: a retry because the reply was lost) is answered with
    the leases that it was granted, as long as they are open; so no lease is held by nobody until it expires.
    """

    searcher_id: Name
    max_leases: Integer = Field(ge=1, le=1024)
    request_id: Name = Field(default_factory=lambda: new_id("request"))
    version: VersionText | None = None
    refused_versions: list[VersionText] = Field(default_factory=list, max_length=MAX_REFUSED_VERSIONS)


class Lease(StrictModel):
    """A claim on one visit of one prompt.

    `train`: sample `num_rollouts` completions with the newest weights and push them under `visit_id`.
    `sample`, `greedy`: held-out evaluation `eval_id` with exactly `version`; report with POST /v1/evals/{id}/results.
    `temperature` is what to sample with: the sampling temperature as it is now (train), the policy temperature
    (sample), 0 (greedy: the most likely token).
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
    run_state: RunState
    wait: str | None = None
    retry_after_s: float = 0.0
    num_version_retries: int = 0
    """How often an operator has said that refused versions are to be tried again: more than before means now."""


class LeaseReturn(StrictModel):
    """POST /v1/leases/return: give unfinished leases back (drain). Refused: the visit cannot be sampled, and ends."""

    searcher_id: Name
    lease_ids: list[Name] = Field(max_length=MAX_LEASE_IDS)
    refused_lease_ids: list[Name] = Field(default_factory=list, max_length=MAX_LEASE_IDS)


class LeaseRenewal(StrictModel):
    """POST /v1/leases/renew: these leases are still worked on; their deadline moves to `lease_s` from now."""

    searcher_id: Name
    lease_ids: list[Name] = Field(max_length=MAX_LEASE_IDS)


class LeaseRenewalReply(StrictModel):
    """The leases that this searcher holds no more: fulfilled, ended, or another searcher's by now."""

    lost_lease_ids: list[str]
