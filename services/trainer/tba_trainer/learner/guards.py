"""Guards: conditions that are checked in every step, and what is done when one holds (docs/trainer.md, Guards).

    gradients --metrics--> check_step(section, state, metrics) --> StepAction: the alarms, whether the batch is applied
                                                                   or skipped, what else is done, and the next state

`check_step` is a pure function: the same states and metrics give the same actions, so a run that is resumed from a
checkpoint decides as the run that was never stopped. The loop takes the next state once the batch is acked.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from tba.config.trainer import Action, AlarmSection, GuardsSection
from tba.versions import PolicyVersion

Name = Literal["non_finite", "grad_spike", "ess_collapse", "log_ratio_drift", "on_policy_gap"]
NAMES: tuple[Name, ...] = get_args(Name)
SEVERITY: tuple[Action, ...] = get_args(Action)
"""Actions, the mildest first."""
REFUSED = "refused"
"""Reason of a skipped step without an alarm: all rollouts of its batch were refused."""
Metrics = Mapping[str, float | None]


class GuardState(BaseModel):
    """Memory of the guards; a checkpoint keeps it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    grad_norms: tuple[float, ...] = ()
    """Gradient norms before clipping of the last batches, oldest first, each capped at `factor` times the median.
    Relative clipping uses their median."""
    signal_grad_norms: tuple[float, ...] = ()
    """Norms, capped alike, of the last batches whose rewards differ within a group. `grad_spike` uses their median."""
    streaks: dict[Name, int] = Field(default_factory=dict)
    """Consecutive steps in which an alarm's condition held; steps in which it is unknown change nothing."""
    num_since_good: int = 0
    """Steps since the last good one: a step whose batch was applied, and with no condition that rolls back or fails."""
    num_alarms: dict[Name, int] = Field(default_factory=dict)
    """How often each alarm went off."""
    num_skipped_in_row: int = 0
    num_rollbacks: int = 0

    def gauges(self) -> dict[str, float]:
        """Return the gauges for heartbeats: counts of alarms and rollbacks, and which conditions hold now (0 or 1)."""
        fired = {f"alarms_{name}": float(self.num_alarms.get(name, 0)) for name in NAMES}
        held = {f"alarm_on_{name}": float(self.streaks.get(name, 0) > 0) for name in NAMES}
        return {**fired, **held, "rollbacks": float(self.num_rollbacks)}

    def after_resume(self, *, num_rollbacks: int, rolled_back: GuardState | None) -> GuardState:
        """Return the initial state of a lineage that starts from the checkpoint with this state.

        Args:
            num_rollbacks: rollbacks by alarms in the run, as the buffer counts them: a crash must not lose any.
            rolled_back: the last state before a rollback; None: the lineage does not start with a rollback.
        """
        # a rollback returns to an older state, but counts never go down
        alarms = self.num_alarms if rolled_back is None else rolled_back.num_alarms
        return self.model_copy(update={"num_alarms": alarms, "num_rollbacks": num_rollbacks})


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """An alarm that goes off in this step."""

    name: Name
    action: Action
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """The end of a lineage that an alarm or an operator rolled back.

    Only rollbacks by alarms make a checkpoint suspect, and count towards `MAX_ROLLBACKS`. That limit stops a run that
    rolls back to the same place again and again. After an operator's rollback the newer checkpoints stay until
    retention deletes them: a fork can start from them, but no resume, since the new lineage does not descend from them.
    """

    is_asked_for: bool
    """An operator asked for it. The fields below decide where the rollback of an alarm returns to."""

    guards: GuardState
    """State of the guards at the end of the lineage."""
    suspect: PolicyVersion | None
    """The last checkpoint if no good step followed it; training then continues from an older one."""
    previous: PolicyVersion | None
    """The checkpoint before the last one; None: there was none, only the start of the run."""
    last_good_step: int
    token: str
    """Fencing token of the lineage that ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAction:
    """The decision on a batch, and the actions after it."""

    alarms: tuple[Alarm, ...]
    skip: str | None
    """Name of the alarm (or `REFUSED`) because of which the batch is skipped; None: it is applied."""
    actions: frozenset[Action]
    reason: str
    """The alarms and exceeded limits behind `actions`, as text; empty if there are none."""
    state: GuardState
    """State of the guards once the step is acked."""


def check_step(section: GuardsSection, state: GuardState, metrics: Metrics | None) -> StepAction:
    """Decide what to do after one step.

    Args:
        section: thresholds and actions of the alarms.
        state: state of the guards after the previous step.
        metrics: metrics of the step; None: all rollouts of its batch were refused.
    """
    streaks, alarms, holds = dict(state.streaks), list[Alarm](), set[Name]()
    num_alarms = dict(state.num_alarms)
    # A metric that is unknown in this step yields nothing: the streak of its alarm neither grows nor ends.
    for name, alarm, text in _conditions(section, state, metrics or {}):
        streaks[name] = 0 if text is None else streaks.get(name, 0) + 1
        if text is None:
            continue
        holds.add(name)
        # it goes off again after as many more steps
        if streaks[name] % alarm.PATIENCE_STEPS == 0:
            alarms.append(Alarm(name=name, action=alarm.action, text=text))
            num_alarms[name] = num_alarms.get(name, 0) + 1
    actions: set[Action] = {alarm.action for alarm in alarms if alarm.action != "none"}
    reasons = [f"{alarm.name}: {alarm.text}" for alarm in alarms if alarm.action != "none"]
    skip = next((alarm.name for alarm in alarms if alarm.action != "none"), None)
    if metrics is None:
        skip = REFUSED
    elif "non_finite" in holds:  # such a batch cannot be applied, even before the alarm's patience ends
        skip = "non_finite"
    num_skipped = state.num_skipped_in_row + 1 if skip else 0
    # A step is good only if nothing serious holds, whether the alarm's patience is over or not: a rollback that comes
    # later must not return to weights from which the divergence had already begun.
    good = skip is None and not any(_is_on(section, streaks, name, from_action="rollback") for name in NAMES)
    # A skipped step counts as a step: without this limit a run with broken weights would skip to its end and be "done".
    if num_skipped > section.MAX_SKIPPED_IN_ROW:
        actions.add("fail")
        reasons.append(
            f"{num_skipped} batches in a row were skipped, the last one because of {skip!r}, and "
            f"at most {section.MAX_SKIPPED_IN_ROW} may be"
        )
    # a rollback that leads to the same place each time would never end
    elif "rollback" in actions and state.num_rollbacks >= section.MAX_ROLLBACKS:
        actions.discard("rollback")
        actions.add("fail")
        reasons.append(f"rollbacks so far: {state.num_rollbacks}, and a run may have no more")
    return StepAction(
        alarms=tuple(alarms),
        skip=skip,
        actions=frozenset(actions),
        reason="; ".join(reasons),
        state=GuardState(
            **_norms(section, state, metrics or {}, applied=skip is None),
            streaks=streaks,
            num_since_good=0 if good else state.num_since_good + 1,
            num_alarms=num_alarms,
            num_skipped_in_row=num_skipped,
            num_rollbacks=state.num_rollbacks,
        ),
    )


def holds_checkpoints(section: GuardsSection, state: GuardState) -> bool:
    """Return whether checkpoints are held back: `non_finite` holds, or a condition whose action is rollback."""
    # a rollback must not lead to the state that caused it, and from weights that give NaN no resume can recover
    return any(
        state.streaks.get(name, 0) > 0 and (name == "non_finite" or getattr(section, name).action == "rollback")
        for name in NAMES
    )


def suspects_weights(section: GuardsSection, state: GuardState) -> bool:
    """Return whether a condition holds that wrong weights may have caused, and whose action is at least skip."""
    # an engine that computes another model says nothing about the trainer's weights
    return any(name != "on_policy_gap" and _is_on(section, state.streaks, name, from_action="skip") for name in NAMES)


def _conditions(
    section: GuardsSection, state: GuardState, metrics: Metrics
) -> Iterator[tuple[Name, AlarmSection, str | None]]:
    """Yield name, section and text of each alarm whose condition is known in this step; text None: it does not hold."""
    loss, norm = metrics.get("loss"), metrics.get("grad_norm")
    if loss is not None and norm is not None:
        wrong = not (math.isfinite(loss) and math.isfinite(norm))
        text = f"the loss is {loss:.4g} and the gradient norm {norm:.4g}"
        yield "non_finite", section.non_finite, text if wrong else None
    # Where rewards are sparse, most batches have the KL alone to learn from. Beside those, a batch with a success would
    # look like a spike.
    spike, usual = section.grad_spike, _median(section, state.signal_grad_norms)
    if usual is None and not _has_signal(metrics):  # an objective may never see a group whose rewards differ
        usual = usual_grad_norm(section, state)
    if (norm := _finite(norm)) is not None and usual is not None:
        text = f"the gradient norm is {norm:.4g}, more than {spike.factor:g} times the usual {usual:.4g}"
        yield "grad_spike", spike, text if norm > spike.factor * usual else None
    collapse = section.ess_collapse
    if (ess := _finite(metrics.get("ess"))) is not None:
        text = f"the effective sample size is {ess:.3f} of the batch, below {collapse.MIN_ESS:g}"
        yield "ess_collapse", collapse, text if ess < collapse.MIN_ESS else None
    drift = section.log_ratio_drift
    if (log_ratio := _finite(metrics.get("log_ratio_token_mean"))) is not None:
        limit = f"the limit is +-{drift.MAX_LOG_RATIO:g}"
        text = f"theta is {log_ratio:.3f} nats per token from the policies of its data, {limit}"
        yield "log_ratio_drift", drift, text if abs(log_ratio) > drift.MAX_LOG_RATIO else None
    gap, most = metrics.get("logprob_gap_on_policy"), metrics.get("logprob_gap_limit")
    if gap is not None and most is not None:
        text = f"at policy age 0 trainer and sampler differ by {gap:.3g} nats per token, rounding by {most:.3g} at most"
        yield "on_policy_gap", section.on_policy_gap, text if gap > most else None


def usual_grad_norm(section: GuardsSection, state: GuardState) -> float | None:
    """Return the median norm of the last steps; None: too few are known."""
    return _median(section, state.grad_norms)


def _has_signal(metrics: Metrics) -> bool:
    """Return whether rewards differ within some group of the batch; True if that is unknown."""
    return metrics.get("frac_reward_zero_std") != 1.0


def _median(section: GuardsSection, norms: Sequence[float]) -> float | None:
    if 4 * len(norms) < section.grad_spike.WINDOW_STEPS:  # too few norms to know what is usual
        return None
    return statistics.median(norms)


def _norms(
    section: GuardsSection, state: GuardState, metrics: Metrics, *, applied: bool
) -> dict[str, tuple[float, ...]]:
    """Return `grad_norms` and `signal_grad_norms` of the state after a step, by name."""
    windows = {"grad_norms": state.grad_norms, "signal_grad_norms": state.signal_grad_norms}
    norm = _finite(metrics.get("grad_norm"))
    for name, norms in windows.items():
        # A batch without a gradient (all its groups tied, and no pass made) says nothing about the usual norm. Where
        # such batches are many, their zeros would pull the median down, and beyond one half switch the clip off.
        if not norm or (name == "signal_grad_norms" and not _has_signal(metrics)):
            continue
        usual = _median(section, norms)
        most = math.inf if usual is None else section.grad_spike.factor * usual
        # A norm far above the others enters the window too, even of a skipped step, but capped. One alone hardly moves
        # the median; where the norms have risen for good the median follows, and skipping ends.
        if applied or norm > most:
            windows[name] = (*norms, min(norm, most))[-section.grad_spike.WINDOW_STEPS :]
    return windows


def _is_on(section: GuardsSection, streaks: Mapping[Name, int], name: Name, *, from_action: Action) -> bool:
    """Return whether an alarm's condition holds. Except for non_finite, its action must be at least `from_action`."""
    serious = SEVERITY.index(getattr(section, name).action) >= SEVERITY.index(from_action)
    return streaks.get(name, 0) > 0 and (serious or name == "non_finite")


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
