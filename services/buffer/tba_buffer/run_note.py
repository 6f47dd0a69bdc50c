"""What people should know of a run beside its state: that no trainer is there.

A trainer that fails until nobody starts it again (a Job at its backoffLimit) leaves the run as it is, since the next
one goes on with it; searchers generate until flow control stops them. The state does not change for that, but whoever
looks at the run is told.
"""

from __future__ import annotations

from collections.abc import Sequence

from tba.api import ComponentInfo, RunState
from tba_buffer.components import FORGET_AFTER_S

ABSENT_AFTER_S = 60.0
"""So long without a trainer is worth a word. One that starts is heard of once it has its model."""
OVER: tuple[RunState, ...] = ("done", "failed")
_LOOK = "look at the trainer's log, on Kubernetes at its Job and pods"


def absent_trainer(
    state: RunState, step: int, components: Sequence[ComponentInfo], *, had_trainer: bool, watched_s: float
) -> str | None:
    """A sentence while the run could go on and no trainer has been heard of for ABSENT_AFTER_S; else None.

    Args:
        step: the last acked one.
        had_trainer: whether the run ever had one.
        watched_s: how long this buffer has been there to hear of one.
    """
    if state in OVER or watched_s <= ABSENT_AFTER_S:  # one that waited for this buffer is heard of in a moment
        return None
    trainers = [item for item in components if item.kind == "trainer"]
    if trainers:
        last = min(trainers, key=lambda item: item.heartbeat_age_s)
        if last.heartbeat_age_s <= ABSENT_AFTER_S:
            return None
        return (
            f"no trainer: {last.component_id} was last heard of {last.heartbeat_age_s:.0f} s ago, step {step}; {_LOOK}"
        )
    if had_trainer:
        return f"no trainer: none was heard of for {FORGET_AFTER_S / 3600:g} h, step {step}; {_LOOK}"
    return f"no trainer: none has come since the buffer started {watched_s:.0f} s ago; {_LOOK}"
