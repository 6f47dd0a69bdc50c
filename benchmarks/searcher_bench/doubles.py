"""A buffer and a reward service inside the process, that answer at once: what is left is the searcher itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tba.api import (
    Lease,
    LeaseRenewal,
    LeaseRenewalReply,
    LeaseReply,
    LeaseRequest,
    Prompt,
    PushReply,
    ScoreItem,
    ScoreReply,
    ScoreResult,
)
from tba.api.rollouts import PushOutcome
from tba.versions import PolicyVersion


class Buffer:
    """Leases prompts in a circle, accepts every push and names `latest` as the newest version.

    Args:
        texts: the prompts.
        rollouts_per_visit: of every lease.
    """

    def __init__(self, texts: Sequence[str], *, rollouts_per_visit: int, latest: PolicyVersion) -> None:
        self.latest = latest
        self.num_pushed = 0
        self._num_rollouts = rollouts_per_visit
        self._prompts = itertools.cycle(
            Prompt(prompt_id=str(i), task="bench", text=text) for i, text in enumerate(texts)
        )
        self._numbers = itertools.count()

    def lease(self, request: LeaseRequest) -> LeaseReply:
        """Grant all leases that are asked for."""
        return LeaseReply(
            leases=[self._lease() for _ in range(request.max_leases)],
            latest_version=str(self.latest),
            run_state="running",
        )

    def push(self, payloads: Sequence[bytes]) -> PushReply:
        """All new."""
        self.num_pushed += len(payloads)
        outcomes = [PushOutcome(rollout_id=None, outcome="new") for _ in payloads]
        return PushReply(outcomes=outcomes, latest_version=str(self.latest), run_state="running")

    def return_leases(self, request: object) -> None:
        """Nothing to do."""

    def renew_leases(self, request: LeaseRenewal) -> LeaseRenewalReply:
        """None is lost."""
        return LeaseRenewalReply(lost_lease_ids=[])

    def heartbeat(self, beat: object) -> None:
        """Nothing to do."""

    def _lease(self) -> Lease:
        number = next(self._numbers)
        return Lease(
            lease_id=f"lease-{number}", kind="train", visit_id=f"visit-{number}", prompt=next(self._prompts),
            num_rollouts=self._num_rollouts, temperature=1.0, expires_in_s=3600.0,
        )  # fmt: skip


class Reward:
    """Scores every response 1."""

    def score(self, items: Sequence[ScoreItem]) -> ScoreReply:
        """One result per item."""
        return ScoreReply(
            results=[ScoreResult(item_id=item.item_id, reward=1.0, reward_version="bench") for item in items]
        )
