"""The progress that a run shows while it trains."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tba.api import LedgerReply, RunInfo, RunSummary
from tba.api.stats import FailedReason
from tba.clients import BufferClient
from tba_cli.console import Console
from tba_cli.local import progress as progress_module
from tba_cli.local.progress import (
    AdviceNews,
    LiveProgress,
    PlainProgress,
    Progress,
    ProgressTracker,
    RunWatcher,
    describe,
    duration,
    progress_view,
)
from tba_cli.reports.history import Poll
from tba_cli.run_folder import RunFolder
from tests.support.history_values import entry, evaluation, stats


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress(at_s: float, step: int, **facts: object) -> Progress:
    return Progress(at_s=at_s, step=step, num_steps=10, state="running", **facts)  # type: ignore[arg-type]


def info(step: int) -> RunInfo:
    document = {
        "run": "demo",
        "state": "running",
        "state_reason": None,
        "step": step,
        "lineage": 1,
        "parents": {},
        "latest_version": None,
        "checkpoint": None,
        "checkpoint_key": None,
        "components": [],
        "waits": [{"owner": "trainer", "name": "rollouts", "for_s": 1.0, "deadline_in_s": 5.0}],
        "evals": [evaluation("0-0", 0.3).model_dump()],
    }
    return RunInfo.model_validate(document)


def test_rates_and_eta_come_from_the_last_20_seconds():
    tracker = ProgressTracker(num_steps=100)
    made = None
    for t in range(61):
        # slow at first, then one step and 30 rollouts per second
        step = t - 30 if t > 30 else 0
        poll = Poll(at_s=float(t), step=step, generated=30 * step, trained=8 * step, stored=0)
        made = tracker.make(poll, info(step), stats(), entry(max(1, step), at_s=0.0))
    assert made is not None
    assert made.generated_per_s == pytest.approx(30.0)
    assert made.trained_per_s == pytest.approx(8.0)
    assert made.eta_s == pytest.approx(70.0)
    assert made.heldout_accuracy == 0.3
    assert made.accuracy == 0.5
    # back to step 20, in a new lineage: nothing is known of its pace yet
    left = evaluation("1-30", 0.9).model_copy(update={"abandoned": True, "finished_at_s": 1e9})
    for t, step, eta_s in ((61, 20, None), (62, 21, 79.0)):
        poll = Poll(at_s=float(t), step=step, generated=900, trained=240, stored=0)
        at = info(step)
        at = at.model_copy(update={"lineage": at.lineage + 1, "evals": [*at.evals, left]})
        made = tracker.make(poll, at, stats(), entry(step, at_s=0.0))
        assert made.eta_s == eta_s
        assert made.heldout_accuracy == 0.3


def test_a_line_says_what_is_known_and_leaves_out_the_rest():
    assert describe(progress(0.0, 3)) == "step 3/10"
    line = describe(
        progress(0.0, 3, reward=0.5, accuracy=0.25, policy_age=2.0, generated_per_s=9.0, trained_per_s=4.0, eta_s=65.0)
    )
    expected = "step 3/10  reward 0.500  accuracy train 0.250  age 2.0  rollouts/s 9 generated 4 trained  ETA 1:05"
    assert line == expected


def test_before_the_first_step_the_line_names_the_waits():
    assert describe(progress(0.0, 0, waits=("trainer: rollouts",))) == "step 0/10  waits: trainer: rollouts"


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (65, "1:05"), (3665, "1:01:05")])
def test_durations_are_read_like_a_clock(seconds, text):
    assert duration(seconds) == text


def test_advice_is_told_once_when_it_lasts_and_again_when_its_share_has_changed_much():
    news, failed = AdviceNews(), "{} % of the stored rollouts have no score ({} failed)"
    seen = [
        failed.format(50, 10),
        "Try: x.",
        failed.format(51, 20),
        failed.format(55, 30),
        None,
        failed.format(60, "1,000"),
    ]
    assert [news.of(text) for text in seen] == [None, None, None, seen[3], None, None]
    assert [news.of(failed.format(share, 40)) for share in (58, 95, 96, 97)] == [
        None,
        None,
        failed.format(96, 40),
        None,
    ]


FAILED = [FailedReason(reason="exception", num=6, example="exception: ValueError: x")]


@pytest.mark.parametrize(
    ("num_generated", "said"), [(0, []), (100, ["6 scores failed: ValueError: x", "advice: Try: x."])]
)
def test_a_run_says_what_it_calls_for_once_there_are_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_generated: int, said: list[str]
) -> None:
    monkeypatch.setattr(progress_module, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(progress_module, "ADVICE_INTERVAL_S", 0.0)
    states: Iterator[dict[str, Any]] = iter([{}, {}, {}, {"state": "done"}])
    client = SimpleNamespace(
        run=lambda: info(1).model_copy(update=next(states)),
        stats=lambda: stats().model_copy(
            update={
                "rollouts_generated": num_generated,
                "num_failed": 6 if num_generated else 0,
                "failed_reasons": FAILED,
            }
        ),
        ledger=lambda **_: LedgerReply(entries=[], next=None),
        summary=lambda: RunSummary(doing="it runs.", learning=None, waiting=None, advice="Try: x."),
    )
    found: list[str] = []
    watcher = RunWatcher(
        cast(BufferClient, client),
        RunFolder(tmp_path),
        PlainProgress(Console("quiet")),
        num_steps=9,
        silence_s=1.0,
        on_run=lambda _: asyncio.sleep(0),
        on_news=found.append,
    )
    asyncio.run(watcher.until_over())
    assert found == said


def test_without_a_terminal_a_line_comes_every_five_seconds_and_at_the_end():
    out = io.StringIO()
    view = PlainProgress(Console("normal", stream=out))
    for t in range(11):
        view.show(progress(float(t), min(t, 8)))
    view.show(progress(10.5, 10))
    view.show(progress(11.0, 10))
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["0/10", "5/10", "8/10", "10/10"]


def test_on_a_terminal_a_bar_is_drawn_and_lines_appear_above_it():
    out = Terminal()
    console = Console("normal", stream=out)
    view = progress_view(console, 10)
    assert isinstance(view, LiveProgress)
    with view:
        view.show(progress(0.0, 4, reward=0.5))
        console.child_line("trainer", "2026 [warning  ] [red]look[/red]")
    text = out.getvalue()
    assert "4/10" in text
    assert "reward 0.500" in text
    assert "[red]look[/red]" in text  # a child's output is text, never markup


@pytest.mark.parametrize(
    ("loudness", "shown"), [("quiet", []), ("normal", ["warning"]), ("verbose", ["info", "warning"])]
)
def test_loudness_decides_which_lines_of_children_are_shown(loudness, shown):
    out = io.StringIO()
    console = Console(loudness, stream=out)
    console.child_line("trainer", "2026 [info     ] step")
    console.child_line("trainer", "2026 [warning  ] careful")
    console.result("always")
    lines = out.getvalue().splitlines()
    assert [line.split("[")[1].split()[0] for line in lines[:-1]] == shown
    assert all(line.startswith("trainer     | ") for line in lines[:-1])
    assert lines[-1] == "always"
