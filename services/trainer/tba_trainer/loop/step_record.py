"""The record of one optimizer step, and who reads it.

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
"""Largest number of rollouts of a batch that are reported one by one."""
BYTES_PER_TRAINED = 128
"""Upper bound of the bytes of one rollout in the JSON of an ack."""
SHOWN = ("loss", "reward_mean", "policy_age_mean", "ess", "grad_norm", "step_s", "wait_s")
"""Metrics in the log's line of a step."""
log = get_logger("loop")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step, applied or skipped."""

    version: PolicyVersion
    """Version of the weights after the step."""
    batch: Batch
    """The batch after `filter_batch`."""
    policy_ages: list[int]
    results: Sequence[ForwardResult]
    """Results of the rollouts that were not refused; empty if all were."""
    action: StepAction
    settings_revision: int
    """Revision of the live settings that the step was made with."""
    metrics: Metrics
    """None: unknown, not a finite number, or out of bounds."""

    def ack_request(self, token: str, *, max_bytes: int) -> AckRequest:
        """Return the body of the ack, which is sent before the weights change.

        Args:
            token: fencing token of the lineage.
            max_bytes: most bytes of JSON about single rollouts; if they take more, they are left out.
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
            num_tokens=0 if self.action.skip else sum(r.num_sampled for r in self.batch.rollouts),
            trained=trained_rollouts(self.results, max_bytes=max_bytes),
        )

    def log(self, measured: Metrics) -> None:
        """Log a line with the numbers of the step, one about refused rollouts if there are any, and one per alarm."""
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
    """Return advantages and weights of rollouts; None: no rollouts, over `MAX_TRAINED`, or over `max_bytes` of JSON."""
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
