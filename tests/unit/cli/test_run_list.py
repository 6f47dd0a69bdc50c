"""The list of runs, from files alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tba.errors import ConfigError, NotFoundError
from tba_cli.reports.run_list import LOG_BYTES, end_of_log, run_details, run_folders, run_row
from tba_cli.run_folder import RunFolder
from tba_cli.scripting.runs_page import serve_runs

RECIPE = {"model": {"path": "/models/small"}, "objective": {"preset": "grpo"}, "trainer": {"num_steps": 9}}


def line(kind: str, step: int, at_s: float, **metrics: Any) -> str:
    return json.dumps({"kind": kind, "run": "x", "lineage": 1, "step": step, "at_s": at_s, "metrics": metrics}) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Three steps, a resume from step 2, one more, and half a line."""
    folder = RunFolder(tmp_path / "runs" / "one")
    folder.logs_path.mkdir(parents=True)
    folder.marker_path.touch()
    folder.recipe_path.write_text(json.dumps(RECIPE))
    lines = [line("start", 0, 100.0)]
    lines += [line("step", n, 100.0 + n, reward_mean=n / 10, loss=None) for n in (1, 2, 3)]
    lines += [
        line("evaluation", 3, 104.0, accuracy=0.9),
        line("start", 2, 110.0),
        line("evaluation", 0, 105.0, accuracy=0.1),
    ]
    lines += [line("step", 3, 120.0, reward_mean=0.7), '{"kind": "step", "st']
    (folder.path / "metrics.jsonl").write_text("".join(lines))
    return folder


def test_a_row_and_the_curves_leave_out_what_a_resume_has_abandoned(folder: RunFolder) -> None:
    row = run_row(folder)
    expected = {
        "step": 3,
        "num_steps": 9,
        "reward": pytest.approx(1 / 3),
        "accuracy": 0.1,
        "started_at_s": 100.0,
        "model": "small",
    }
    assert row == {**expected, "name": "one", "state": "interrupted", "objective": "grpo", "reason": row["reason"]}
    found = run_details(folder)
    assert (found["steps"]["steps"], found["steps"]["at_s"][-1]) == ([1, 2, 3], 120.0)
    assert found["steps"]["values"] == {"reward_mean": [0.1, 0.2, 0.7], "loss": [None] * 3}
    assert found["evaluations"] == {"steps": [0], "at_s": [105.0], "values": {"accuracy": [0.1]}}
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write("\n" + line("step", 4, 121.0, reward_mean=0.8))
    assert run_row(folder)["step"] == 4


def test_a_long_run_is_thinned(folder: RunFolder) -> None:
    text = "".join(line("step", n, float(n), reward_mean=float(n)) for n in range(1, 1000))
    (folder.path / "metrics.jsonl").write_text(text)
    found = run_details(folder)["steps"]
    assert (len(found["steps"]), found["steps"][0], found["steps"][-1]) == (250, 4, 999)
    assert found["values"]["reward_mean"][0] == 2.5


def test_states_come_from_lock_and_files(folder: RunFolder) -> None:
    with folder.acquire(resume=True, fresh=False):
        assert run_row(folder)["state"] == "running"
    folder.write_json(folder.summary_path, {"state": "failed", "state_reason": "no reward"})
    assert (run_row(folder)["state"], run_row(folder)["reason"]) == ("failed", "no reward")
    said = {"state": "flat", "finding": "All rewards are 0.", "remedy": None}
    folder.write_json(folder.summary_path, {"state": "done", "summary": said})
    assert (run_row(folder)["state"], run_row(folder)["reason"]) == ("flat", "All rewards are 0.")
    folder.recipe_path.unlink()
    os.mkfifo(folder.recipe_path)
    assert (run_row(folder)["state"], run_details(folder)["recipe"]) == ("unreadable", {})


def test_a_line_that_is_no_point_is_left_out(folder: RunFolder) -> None:
    wrong = ('{"kind": "step", "at_s": 1}', '{"kind": "step", "step": 4, "at_s": 1, "metrics": {"loss": "x"}}', "[1]")
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write("\n" + "\n".join(wrong))
    assert (run_row(folder)["step"], run_details(folder)["steps"]["steps"]) == (3, [1, 2, 3])


def test_the_folder_of_one_run_is_no_folder_of_runs(folder: RunFolder) -> None:
    with pytest.raises(ConfigError):
        serve_runs(folder.path, port=0, show=lambda _: pytest.fail("an empty list is shown"))


def test_runs_are_listed_by_their_last_start(folder: RunFolder) -> None:
    other = RunFolder(folder.path.parent / "other")
    other.path.mkdir()
    other.marker_path.touch()
    os.utime(folder.marker_path, (1, 1))
    (folder.path.parent / "no run").mkdir()
    assert list(run_folders(folder.path.parent)) == ["other", "one"]
    assert run_row(other)["state"] == "not begun"


def test_the_end_of_a_log_and_no_other_file(folder: RunFolder) -> None:
    folder.log_path("trainer").write_text("first\n" + "y" * LOG_BYTES)
    folder.log_path("stolen").symlink_to("/etc/hostname")
    assert run_details(folder)["logs"] == ["trainer"]
    assert end_of_log(folder, "trainer") == "y" * LOG_BYTES
    for name in ("stolen", "../recipe"):
        with pytest.raises(NotFoundError):
            end_of_log(folder, name)
