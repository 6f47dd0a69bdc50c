"""The lines that a run shows while it trains."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tba.api import RunInfo
from tba.api.stats import FailedReason, Rates
from tba.clients import BufferClient
from tba_cli.console import Console, Loudness
from tba_cli.local import progress as progress_module
from tba_cli.local.progress import duration, progress_line, until_over
from tests.support.history_values import RUN_INFO, evaluation, stats

WAIT = {"owner": "trainer", "name": "rollouts", "for_s": 1.0, "deadline_in_s": 5.0}
ENDED = evaluation("1-30", 0.9).model_copy(update={"abandoned": True, "finished_at_s": 1e9})


def info(step: int, **fields: Any) -> RunInfo:
    evals = [evaluation("0-0", 0.3).model_dump(), ENDED.model_dump()]
    return RunInfo.model_validate({**RUN_INFO, "step": step, "evals": evals, **fields})


def test_a_line_says_what_is_known_and_leaves_out_the_rest() -> None:
    assert progress_line(info(3, evals=[]), stats(), num_steps=10, step_s=None) == "step 3/10"
    rates = {"window_s": 20.0, "generated_per_s": 9.0, "evicted_per_s": 0.0, "drawn_per_s": 0.0, "trained_per_s": 4.0}
    known = stats().model_copy(update={"mean_reward_recent": 0.5, "rates": Rates(**rates)})
    line = "step 3/10  paused  reward 0.500  held-out accuracy 0.300  rollouts/s 9 generated 4 trained  ETA 1:03"
    assert progress_line(info(3, state="paused"), known, num_steps=10, step_s=9.0) == line
    begun = progress_line(info(0, waits=[WAIT], evals=[]), stats(), num_steps=10, step_s=None)
    assert begun == "step 0/10  waits: trainer: rollouts"


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (65, "1:05"), (3665, "1:01:05")])
def test_durations_are_read_like_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


FAILED = [FailedReason(reason="exception", num=6, example="exception: ValueError: \x1bx")]


def test_a_run_says_how_far_it_is_and_which_scores_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(progress_module, "LINE_INTERVAL_S", 0.0)
    # a second lineage went back to step 2: nothing is known of its pace yet
    polls = [{}, {"step": 5}, {"step": 2, "lineage": 2}, {"step": 3, "lineage": 2, "state": "done"}]
    answers: Iterator[dict[str, Any]] = iter(polls)
    counts = {"failed_reasons": FAILED, "num_failed": 6}
    client = SimpleNamespace(
        run=lambda: info(**{"step": 1, **next(answers)}),
        stats=lambda: stats().model_copy(update=counts),
    )
    out = io.StringIO()
    console = Console("normal", stream=out)
    over = until_over(
        cast(BufferClient, client), console, num_steps=9, silence_s=1.0, on_run=lambda _: asyncio.sleep(0)
    )
    asyncio.run(over)
    lines = out.getvalue().splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [(line.split()[1], "ETA" in line) for line in steps] == [
        ("1/9", False),
        ("5/9", True),
        ("2/9", False),
        ("3/9", True),
    ]
    assert [line for line in lines if line not in steps] == [r"6 scores failed: ValueError: \x1bx"]


@pytest.mark.parametrize(
    ("loudness", "shown"), [("quiet", []), ("normal", ["warning"]), ("verbose", ["info", "warning"])]
)
def test_loudness_decides_which_lines_of_children_are_shown(loudness: Loudness, shown: list[str]) -> None:
    out = io.StringIO()
    console = Console(loudness, stream=out)
    console.child_line("trainer", "2026 [info     ] step")
    console.child_line("trainer", "2026 [warning  ] careful\x1b[2J")
    console.result("always")
    lines = out.getvalue().splitlines()
    assert [line.split("[")[1].split()[0] for line in lines[:-1]] == shown
    assert all(line.startswith("trainer     | ") and "\x1b" not in line for line in lines[:-1])
    assert lines[-1] == "always"
