"""metrics.jsonl and the other trackers: what they keep, and that none of them can stop or slow the trainer."""

from __future__ import annotations

import json
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import structlog
from tba_trainer.tracking import TrackerGroup, open_trackers, tracker_group
from tba_trainer.tracking.jsonl import JsonlTracker, known_evaluations
from tba_trainer.tracking.tensorboard import TensorboardTracker
from tba_trainer.tracking.tracker import Record, evaluation_record
from tba_trainer.tracking.tracker_group import TrackerThread
from tba_trainer.tracking.wandb import WandbTracker

from tba.api import EvalInfo, EvalRequest
from tba.config.trainer import WandbSection
from tba.errors import ConfigError
from tba.versions import START, PolicyVersion
from tests.support.trainer_values import RecordedBuffer, make_recipe
from tests.support.waits import until


def evaluation(version: str, **numbers: Any) -> EvalInfo:
    numbers = {"num_prompts": 8, "num_done": 8, "created_at_s": 1.0, **numbers}
    return EvalInfo(eval_id=f"eval-{version}", version=version, state="done", **numbers)


def step(number: int, lineage: int = 1, **metrics: float | None) -> Record:
    return Record(kind="step", run="demo", lineage=lineage, step=number, metrics=metrics)


def begun(lineage: int, parent: PolicyVersion) -> Record:
    return Record(kind="start", run="demo", lineage=lineage, step=parent.step, parent=str(parent))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Slow:
    """A tracker that keeps nothing before it is let go."""

    name = "slow"

    def __init__(self) -> None:
        self.go = threading.Event()
        self.kept: list[int] = []

    def start(self, record: Record) -> None:
        self.log(record)

    def log(self, record: Record) -> None:
        assert self.go.wait(60)
        self.kept.append(record.step)

    def close(self) -> None:
        self.kept.append(-1)


class Broken(Slow):
    """A tracker that can do nothing at all."""

    name = "broken"

    def log(self, record: Record) -> None:
        raise RuntimeError("no connection")

    def close(self) -> None:
        raise ValueError("nothing to close")


def test_a_line_says_what_happened_and_leaves_out_what_does_not_apply(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "new" / "metrics.jsonl")
    tracker.start(begun(2, PolicyVersion(1, 40)))
    metrics = {"loss": 0.5, "ess": None}
    tracker.log(Record(kind="step", run="demo", lineage=2, step=41, skipped="non_finite", metrics=metrics))
    tracker.log(evaluation_record("demo", evaluation("2-40", accuracy=0.25, pass_at={4: 0.75}, num_unknown=1)))
    tracker.close()
    start, made, evaluated = lines_of(tmp_path / "new" / "metrics.jsonl")
    at_s = start.pop("at_s")
    assert made.pop("at_s") >= at_s > 1.7e9
    of_run = {"run": "demo", "lineage": 2}
    assert start == {**of_run, "kind": "start", "step": 40, "parent": "1-40", "metrics": {}}
    assert made == {**of_run, "kind": "step", "step": 41, "skipped": "non_finite", "metrics": metrics}
    assert (evaluated["kind"], evaluated["lineage"], evaluated["step"]) == ("evaluation", 2, 40)
    known = {name: value for name, value in evaluated["metrics"].items() if value is not None}
    assert known == {"accuracy": 0.25, "pass_at_4": 0.75, "num_unknown": 1, "num_prompts": 8}


def test_a_file_whose_last_line_was_cut_by_a_kill_continues_in_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(step(1).line() + "\n" + step(2).line()[:20])
    for number in (2, 3):
        tracker = JsonlTracker(path)
        tracker.log(step(number, lineage=2))
        tracker.close()
    lines = path.read_text().splitlines()
    assert ([json.loads(lines[i])["step"] for i in (0, 2, 3)], len(lines)) == ([1, 2, 3], 4)


def test_evaluations_that_the_file_has_are_known_whatever_else_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert known_evaluations(path, "demo") == set()
    records = [evaluation_record(run, evaluation(v)) for run, v in (("demo", "0-0"), ("other", "1-1"))]
    cut = evaluation_record("demo", evaluation("1-2")).line()[:-9]
    path.write_text("\n".join(["", *(r.line() for r in records), step(1).line(), cut, '["evaluation"]']))
    assert known_evaluations(path, "demo") == {"eval-0-0"}


def test_a_path_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "metrics.jsonl", tmp_path):
        with pytest.raises(ConfigError, match=r"tracking\.metrics_path .* cannot be written"):
            JsonlTracker(path)


def test_a_slow_tracker_makes_nobody_wait_and_what_does_not_fit_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_group, "MAX_PENDING", 3)
    tracker = Slow()
    with structlog.testing.capture_logs() as logs:
        thread = TrackerThread(tracker)
        thread.submit(step(0))
        until("the first is taken", lambda: thread._queue.empty())
        for number in range(1, 9):
            thread.submit(step(number))
        assert thread.num_dropped == 5
        thread.close()
        thread.join(0.01)
        assert [entry["event"] for entry in logs] == ["tracker_is_slow", "tracker_did_not_end"]
        tracker.go.set()
        thread.join(60)
    assert (tracker.kept, thread.num_failed) == ([0, 1, 2, 3, -1], 0)


def test_a_tracker_that_fails_is_logged_once_counted_and_does_not_disturb_the_others(tmp_path: Path) -> None:
    path, buffer = tmp_path / "metrics.jsonl", cast(Any, RecordedBuffer())
    with structlog.testing.capture_logs() as logs:
        tracking = TrackerGroup("demo", [Broken(), JsonlTracker(path)], buffer=buffer)
        tracking.start(1, START)
        for number in range(1, 4):
            tracking.step(PolicyVersion(1, number), {"loss": 1.0}, skipped=None)
        tracking.start(2, START)  # after a rollback
        tracking.close()
    failures = [entry for entry in logs if entry["event"] == "tracker_failed"]
    assert [(entry["tracker"], entry["error"]) for entry in failures] == [("broken", "RuntimeError: no connection")]
    assert tracking.gauges() == {"num_tracking_dropped": 0.0, "num_tracking_failed": 6.0}
    assert [line["step"] for line in lines_of(path)] == [0, 1, 2, 3, 0]


def test_evaluations_are_told_once_also_over_several_starts(tmp_path: Path) -> None:
    tracking = {"metrics_path": str(tmp_path / "metrics.jsonl"), "tensorboard_dir": str(tmp_path / "events")}
    recipe = make_recipe(tmp_path / "model", tracking=tracking)
    buffer = RecordedBuffer()
    states: list[tuple[str, str]] = [("0-0", "pending"), ("0-0", "done"), ("1-2", "done")]
    for lineage, (version, buffer.eval_state) in enumerate(states, start=1):
        buffer.lineage = lineage
        buffer.request_eval(EvalRequest(version=version, token=f"token-{lineage}", num_prompts=8))
        trackers = open_trackers(recipe, buffer)  # pyright: ignore[reportArgumentType]
        trackers.start(lineage, START)
        trackers.close()
    lines = lines_of(tmp_path / "metrics.jsonl")
    assert [line["eval_id"] for line in lines if line["kind"] == "evaluation"] == ["eval-0-0", "eval-1-2"]
    assert [line["lineage"] for line in lines if line["kind"] == "start"] == [1, 2, 3]
    assert list((tmp_path / "events").glob("events.*"))


def test_tensorboard_draws_one_curve_along_the_active_lineage(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorboardTracker(tmp_path)
    tracker.start(begun(1, START))
    for number in range(1, 5):
        tracker.log(step(number, loss=number / 2, ess=None))
    tracker.close()
    tracker = TensorboardTracker(tmp_path)  # after a kill: the last checkpoint was at step 2
    tracker.start(begun(2, PolicyVersion(1, 2)))
    tracker.log(evaluation_record("demo", evaluation("1-2", accuracy=0.25)))
    for number in range(3, 6):
        tracker.log(step(number, lineage=2, loss=float(number)))
    tracker.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    losses = [(e.step, e.value) for e in events.Scalars("train/loss")]
    assert losses == [(1, 0.5), (2, 1.0), (3, 3.0), (4, 4.0), (5, 5.0)]
    assert [(e.step, e.value) for e in events.Scalars("eval/accuracy")] == [(2, 0.25)]
    assert "train/ess" not in events.Tags()["scalars"]


_BLOCK_BYTES = 32 * 1024
_RECORD_HEADER = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def history_of(path: Path) -> tuple[str, str, list[dict[str, Any]]]:
    """Return the group, the name and the logged rows of a run-*.wandb file, which is written without a network."""
    from wandb.proto import wandb_internal_pb2 as records

    group, name, history = "", "", []
    for data in _records(path.read_bytes()):
        record = records.Record()  # pyright: ignore[reportAttributeAccessIssue]  # made at import
        record.ParseFromString(data)
        if record.HasField("run"):
            group, name = record.run.run_group, record.run.display_name
        if record.HasField("history"):
            items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            history.append({key: value for key, value in items.items() if not key.startswith("_")})
    return group, name, history


def _records(data: bytes) -> Iterator[bytes]:
    whole, at = b"", 7  # the file's own header
    while at + _RECORD_HEADER.size <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _RECORD_HEADER.size:
            at += left
            continue
        _, length, kind = _RECORD_HEADER.unpack_from(data, at)
        at += _RECORD_HEADER.size
        assert kind in (_FULL, _FIRST, _MIDDLE, _LAST)
        whole += data[at : at + length]
        at += length
        if kind in (_FULL, _LAST):
            yield whole
            whole = b""


def test_weights_and_biases_keeps_a_run_per_lineage_in_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = WandbTracker(WandbSection(), {"trainer": {"num_steps": 3}}, folder=tmp_path)
    tracker.start(begun(1, START))
    for number in (1, 2, 3):
        tracker.log(step(number, loss=number / 2, ess=None))
    tracker.start(begun(2, PolicyVersion(1, 2)))
    tracker.log(evaluation_record("demo", evaluation("1-2", accuracy=0.25)))
    tracker.log(step(3, lineage=2, loss=3.0))
    tracker.close()

    def written() -> list[tuple[str, str, list[dict[str, Any]]]] | None:
        runs = sorted(map(history_of, tmp_path.glob("wandb/offline-run-*/run-*.wandb")), key=lambda run: run[1])
        return runs if [len(history) for _, _, history in runs] == [3, 2] else None

    # W&B's own process writes a moment after the end of a run; the end of the trainer's process waits for it
    runs = until("both files are written", written)
    assert runs is not None
    first, second = runs
    losses = [{"step": number, "train/loss": number / 2} for number in (1, 2, 3)]
    assert (first, second[:2]) == (("demo", "demo-1", losses), ("demo", "demo-2"))
    assert second[2][0].items() >= {"step": 2, "eval/accuracy": 0.25}.items()
    assert second[2][1:] == [{"step": 3, "train/loss": 3.0}]


@pytest.mark.parametrize(
    ("package", "make"),
    [
        ("tensorboard", lambda: TensorboardTracker(Path("x"))),
        ("wandb", lambda: WandbTracker(WandbSection(), {}, folder=Path("x"))),
    ],
)
def test_a_missing_package_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch, package: str, make: Any) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        make()
