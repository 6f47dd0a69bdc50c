"""What the trainer watches in every step, and what it does when something is wrong (docs/trainer.md, Guards)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tba.config.base import StrictModel

Action = Literal["none", "lower_rate", "raise_m", "skip", "pause", "rollback", "fail"]
"""What an alarm does, mildest first.

    none         it is logged, counted and shown
    lower_rate   the learning rate is multiplied by `lower_rate_factor`
    raise_m      `sampling.most_on_policy_prob` rises by `raise_m_by`
    skip         the batch is not applied; the step is in the ledger as skipped
    pause        the batch is skipped and the run paused, until `tba resume`
    rollback     the batch is skipped, and training goes on from the last checkpoint in a new lineage
    fail         the batch is skipped and the run failed; a start of the trainer goes on from the last checkpoint
"""


REMEDIES = {
    "non_finite": "look at the rewards of the last rollouts (`tba rollouts`); with bfloat16 try "
    'trainer.compute_dtype = "float32"; if it comes again, lower the learning rate (`tba set learning_rate=...`)',
    "grad_spike": "lower the learning rate (`tba set learning_rate=...`) or trainer.max_grad_norm, or let "
    'trainer.guards.grad_spike.action = "skip" leave such batches out',
    "ess_collapse": "the data is too old for the policy: raise most_on_policy_prob (`tba set`), lower "
    "buffer.max_policy_age_steps or trainer.sync_interval, or add searchers (`tba scale`)",
    "log_ratio_drift": "the policy moves faster than its data: lower the learning rate, raise beta or "
    "most_on_policy_prob (`tba set`), or lower trainer.sync_interval",
}
"""What a person can do about each alarm; shown with it, in logs and `tba status`."""


class AlarmSection(StrictModel):
    """One alarm."""

    patience_steps: int = Field(default=1, ge=1)
    """It goes off when its condition has held for so many steps in a row, and again after as many more."""
    action: Action = "none"
    """What it does: none, lower_rate, raise_m, skip, pause, rollback or fail."""


class NonFiniteSection(AlarmSection):
    """The loss or the gradient is NaN or infinite. Such a batch is never applied, whatever the action."""

    action: Action = "skip"
    """What it does: none, lower_rate, raise_m, skip, pause, rollback or fail."""


class GradSpikeSection(AlarmSection):
    """The gradient norm is far above what it was."""

    factor: float = Field(default=10.0, gt=1)
    """The condition: norm before clipping > this * median of the norms of the last batches (a spike counts as this *
    median there)."""
    window_steps: int = Field(default=32, ge=4, le=10_000)
    """Batches that the median is taken over, applied ones and spikes; with fewer than a quarter of them nothing is
    known."""


class EssCollapseSection(AlarmSection):
    """The importance weights between theta and the behaviour policies rest on few rollouts."""

    patience_steps: int = Field(default=5, ge=1)
    """It goes off when its condition has held for so many steps in a row, and again after as many more."""
    min_ess: float = Field(default=0.1, gt=0, lt=1)
    """The condition: effective sample size / number of rollouts < this. It is never below 1 / number of rollouts."""


class LogRatioDriftSection(AlarmSection):
    """Theta has moved far away from the policies that made its data."""

    patience_steps: int = Field(default=5, ge=1)
    """It goes off when its condition has held for so many steps in a row, and again after as many more."""
    max_log_ratio: float = Field(default=0.5, gt=0)
    """The condition: |mean of log pi_theta - log pi_behaviour per token| > this, in nats."""


class GuardsSection(StrictModel):
    """Alarms of the trainer, and the limits of what they may do."""

    non_finite: NonFiniteSection = NonFiniteSection()
    grad_spike: GradSpikeSection = GradSpikeSection()
    ess_collapse: EssCollapseSection = EssCollapseSection()
    log_ratio_drift: LogRatioDriftSection = LogRatioDriftSection()
    max_skipped_in_row: int = Field(default=10, ge=1)
    """More batches skipped in a row, for whatever reason, fail the run."""
    max_rollbacks: int = Field(default=3, ge=0)
    """Rollbacks of the whole run; the alarm that asks for one more fails it."""
    lower_rate_factor: float = Field(default=0.5, gt=0, lt=1)
    """`lower_rate` multiplies the learning rate by this."""
    raise_m_by: float = Field(default=0.1, gt=0, le=1)
    """`raise_m` adds this to the most-on-policy probability, up to 1."""

    def check_batch(self, num_rollouts: int) -> None:
        """Refuse an action that is never taken.

        Args:
            num_rollouts: of a batch.

        Raises:
            ValueError: one sentence.
        """
        alarm = self.ess_collapse
        if alarm.action != "none" and alarm.min_ess <= 1 / num_rollouts:
            raise ValueError(
                f'trainer.guards.ess_collapse.action is "{alarm.action}" and can never be taken: min_ess is '
                f"{alarm.min_ess:g}, and the share of a batch of {num_rollouts} rollouts is never below "
                f"{1 / num_rollouts:g}; raise min_ess above that"
            )
