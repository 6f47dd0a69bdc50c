"""Who looks at a run without a trainer is told so."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tba_buffer.run.components import ABSENT_AFTER_S, absent_trainer
from tba_buffer.run.events import ObservedRun, changes

from tba.api import ComponentInfo, RunInfo, RunState
from tests.support.history_values import RUN_INFO


def trainer(component_id: str, age_s: float, kind: str = "trainer") -> ComponentInfo:
    return ComponentInfo(
        component_id=component_id,
        kind=kind,
        state="training",
        version=None,
        alive=age_s < 15,
        heartbeat_age_s=age_s,
        gauges={},
    )


def note(
    *components: ComponentInfo, state: RunState = "running", had_trainer: bool = True, watched_s: float = 1e4
) -> str | None:
    return absent_trainer(state, 41, components, had_trainer=had_trainer, watched_s=watched_s)


def test_the_newest_trainer_that_is_silent_is_named_with_age_and_step() -> None:
    assert note(trainer("t-1", 900.0), trainer("t-2", 312.4), trainer("s-1", 1.0, "searcher")) == (
        "no trainer: t-2 was last heard of 312 s ago, step 41; "
        "look at the trainer's log, on Kubernetes at its Job and pods"
    )
    assert note(trainer("t-1", 900.0), trainer("t-2", ABSENT_AFTER_S)) is None
    assert note(trainer("t-1", 900.0), watched_s=ABSENT_AFTER_S) is None, "it may be this buffer that was away"


def test_none_that_ever_came_and_one_that_is_forgotten_are_told_apart() -> None:
    assert (note() or "").startswith("no trainer: none was heard of for 1 h, step 41; ")
    assert (note(had_trainer=False, watched_s=70.0) or "").startswith(
        "no trainer: none has come since the buffer started 70 s ago; "
    )
    assert note(had_trainer=False, watched_s=ABSENT_AFTER_S) is None


@pytest.mark.parametrize("state", ["done", "failed"])
def test_a_run_that_is_over_needs_none(state: RunState) -> None:
    assert note(trainer("t-1", 900.0), state=state) is None


def test_followers_are_told_when_it_comes_and_goes_and_not_that_it_grows_old() -> None:
    looks = [
        ObservedRun(RunInfo.model_validate({**RUN_INFO, "note": text}), []) for text in (None, "60 s", "61 s", None)
    ]
    told = [[name for name, _ in changes(before, after)] for before, after in pairwise(looks)]
    assert told == [["change"], [], ["change"]]
