"""What `tba status` prints."""

from __future__ import annotations

from tba.api import RunInfo, WaitInfo
from tba.cli.control import status_lines
from tests.support.history_values import stats

INFO = {
    "run": "demo",
    "state": "running",
    "state_reason": None,
    "step": 3,
    "lineage": 1,
    "parents": {},
    "latest_version": "1-2",
    "checkpoint": None,
    "checkpoint_key": None,
    "components": [],
    "waits": [WaitInfo(owner="trainer-1", name="rollouts", for_s=4.0, deadline_in_s=26.0)],
    "evals": [],
}


def test_evictions_are_shown_by_reason_and_waits_by_name() -> None:
    info = RunInfo.model_validate(INFO)
    lines = status_lines(info, stats().model_copy(update={"evicted": {"policy_age": 2, "max_rollouts": 7}}))
    assert "  evicted: max_rollouts 7, policy_age 2" in lines
    assert "  trainer-1 waits for 'rollouts': 4 s so far, at most 26 s more" in lines


def test_nothing_is_said_about_evictions_while_there_are_none() -> None:
    assert not any("evicted" in line for line in status_lines(RunInfo.model_validate(INFO), stats()))
