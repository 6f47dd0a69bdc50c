"""What is known of one optimizer step, put together once, and who reads it.

    gradients, guards, clocks --> StepRecord --> ack_request      the buffer: the ledger, what became of each rollout
                                             --> version, metrics heartbeats, and so the status and the page
                                             --> version, metrics metrics.jsonl and the other trackers
                                             --> log              the log, for people

A metric of a batch is added in `learner/batch_metrics.py`, and every reader has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tba.api import AckRequest, TrainedRollouts
from tba.config.trainer import REMEDIES
from tba.fields import bounded_or_none
from tba.logs import get_logger
from tba.versions import PolicyVersion
from tba.wire import Batch
from tba_trainer.learner.forward_backward import ForwardResult
from tba_trainer.learner.guards import Metrics, StepAction
from tba_trainer.loop.batches import count_reasons

MAX_TRAINED = 65_536
"""The rollouts of larger batches are not reported one by one."""
BYTES_PER_TRAINED = 128
"""More than a rollout takes in the JSON of an ack."""
SHOWN = ("loss", "reward_mean", "policy_age_mean", "ess", "grad_norm", "step_s", "wait_s")
"""Metrics in the log's line of a step."""
log = get_logger("loop")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step, used or skipped."""

    version: PolicyVersion
    """Names the weights after the step."""
    batch: Batch
    """Without the rollouts that were refused."""
    policy_ages: list[int]
    results: Sequence[ForwardResult]
    """Of the rollouts that were not refused; empty where none was left."""
    action: StepAction
    settings_revision: int
    """Revision of the live settings that the step was made with."""
    metrics: Metrics
    """None: unknown, not a finite number, or out of bounds."""

    def ack_request(self, token: str, *, max_bytes: int) -> AckRequest:
        """Return what the buffer is told before the weights change.

        Args:
            token: fencing token of the lineage.
            max_bytes: of JSON about single rollouts; beyond it they are left out.
        """
        return AckRequest(
            lineage=self.version.lineage,
            step=self.version.step,
            token=token,
            metrics=dict(self.metrics),
            policy_ages=self.policy_ages,
            settings_revision=self.settings_revision,
            skipped=self.action.skip,
            refused=count_reasons(self.batch.refused),
            unreadable=list(self.batch.unreadable),
            num_tokens=0 if self.action.skip else sum(len(r.response_tokens) for r in self.batch.rollouts),
            trained=trained_rollouts(self.results, max_bytes=max_bytes),
        )

    def log(self, measured: Metrics) -> None:
        """Write the line of the step with its numbers as measured, and one for what was refused and for each alarm."""
        version, skip = str(self.version), self.action.skip
        shown = {name: round(value, 4) for name in SHOWN if (value := measured.get(name)) is not None}
        log.info("step", version=version, **shown, **({} if skip is None else {"skipped": skip}))
        if self.batch.refused:
            reasons, first = count_reasons(self.batch.refused), self.batch.refused[0].detail
            log.warning("rollouts_refused", version=version, **reasons, first=first)
        for alarm in self.action.alarms:
            remedy = REMEDIES[alarm.name]
            log.warning("alarm", version=version, name=alarm.name, action=alarm.action, what=alarm.text, do=remedy)


def trained_rollouts(results: Sequence[ForwardResult], *, max_bytes: int) -> TrainedRollouts | None:
    """Return what a step made of its rollouts; None without any, or where they take more than `max_bytes` of JSON."""
    # the step must not fail because of what is only for people
    if not results or len(results) > min(MAX_TRAINED, max_bytes // BYTES_PER_TRAINED):
        return None
    return TrainedRollouts(
        rollout_ids=[result.rollout.rollout_id.hex() for result in results],
        advantages=[_rounded(result.advantage) for result in results],
        weights=[_rounded(result.weight) for result in results],
    )


def _rounded(value: float | None) -> float | None:
    """Return a number with 6 significant digits; None where it is not known, or not finite."""
    known = bounded_or_none(value)
    return None if known is None else float(f"{known:.6g}")
