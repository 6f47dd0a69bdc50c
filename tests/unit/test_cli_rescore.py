"""What `tba rescore` shows."""

from __future__ import annotations

from tba.api import RescoreInfo
from tba_cli.commands.rollouts import progress_line, rescore_lines

JOB = RescoreInfo(
    state="running",
    task=None,
    only="all",
    started_at_s=100.0,
    start_position=60,
    num_total=50,
    num_done=20,
    num_changed=7,
    num_failed=1,
    num_gone=3,
)


def test_a_running_job_is_one_line_and_says_what_to_do() -> None:
    first, second = rescore_lines(JOB)
    assert first == "23 of 50 rollouts, 7 changed, 1 failed"
    assert "tba rescore --show" in second


def test_the_line_says_what_is_waited_for() -> None:
    line = progress_line(JOB.model_copy(update={"problem": "http://127.0.0.1:1 does not answer"}))
    assert line.endswith("; waits for the reward service: http://127.0.0.1:1 does not answer")


def test_a_finished_job_compares_before_and_after() -> None:
    done = {
        "state": "done",
        "finished_at_s": 102.5,
        "num_done": 47,
        "num_known_before": 40,
        "num_known_after": 46,
        "mean_reward_before": 0.25,
        "mean_reward_after": 0.5,
        "reward_versions": {"addition-2": 46},
    }
    assert rescore_lines(JOB.model_copy(update=done)) == [
        "done after 2.5 s: 47 of 50 rollouts scored again",
        "                    before       after",
        "  known reward          40          46",
        "  mean reward       0.2500      0.5000",
        "  7 changed, 1 failed, 3 evicted before they were reached",
        "  reward versions: addition-2 (46)",
    ]


def test_nothing_scored_has_no_mean() -> None:
    lines = rescore_lines(JOB.model_copy(update={"state": "cancelled", "finished_at_s": 100.0}))
    assert "unknown" in lines[3]
    assert lines[-1] == "  reward versions: none"
