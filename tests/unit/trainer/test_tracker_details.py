"""Histograms and sample rollouts of a batch: what they hold, where they go, and that they cannot end a run."""

from __future__ import annotations

import json
import re
import sys
import threading
from dataclasses import replace
from html import unescape
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import structlog
from tba_trainer.learner.forward_backward import ForwardResult
from tba_trainer.tracking import TrackerGroup
from tba_trainer.tracking.details import (
    COLUMNS,
    MAX_ROWS,
    MAX_TEXT_CHARS,
    Details,
    DetailsMaker,
    PromptTexts,
    histogram_of,
    pick_samples,
)
from tba_trainer.tracking.tensorboard import markdown_table
from tba_trainer.tracking.tracker import DetailTracker, Record, start_record, step_record
from tba_trainer.tracking.wandb import WandbTracker
from tba_trainer.trainer import train

from tba.config.trainer import WandbSection
from tba.store import FileStore
from tba.versions import START, PolicyVersion
from tests.support.tiny_model import make_tiny_model, make_tiny_tokenizer
from tests.support.trainer_values import RecordedBuffer, make_recipe, make_rollout
from tests.support.waits import until
from tests.support.wandb_files import history_of
from tests.support.wandb_server import WandbServer


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


def results_of(rewards: list[float], *, text: str = "2") -> list[ForwardResult]:
    """Results of a batch, one per reward; ages count from 0."""
    rng, prompt = np.random.default_rng(0), make_tiny_tokenizer()("1+1=")["input_ids"]
    rollouts = [
        replace(
            make_rollout(rng, reward=reward, version=PolicyVersion(1, 2)),
            prompt_tokens=np.array(prompt, dtype=np.int32),
            response_text=f"{text}{reward}",
            reward_parts={"exact": reward, "short": 0.5},
        )
        for reward in rewards
    ]
    return [
        ForwardResult(rollout=rollout, policy_age=age, logprob=-1.0, ref_logprob=None, abs_gap=0.0, advantage=0.25)
        for age, rollout in enumerate(rollouts)
    ]


def maker_of(folder: Path, *, histogram_interval: int = 2, sample_interval: int = 4) -> DetailsMaker:
    return DetailsMaker(
        texts=PromptTexts(folder, trust_remote_code=False),
        histogram_interval=histogram_interval,
        sample_interval=sample_interval,
    )


def details_of(folder: Path, rewards: list[float], *, step: int = 4) -> Details:
    details = maker_of(folder).make(PolicyVersion(1, step), results_of(rewards))
    assert details is not None
    return details


def test_whole_numbers_have_a_bin_each_and_others_bins_of_one_width() -> None:
    ages = histogram_of([0, 0, 3, 1])
    assert ages.counts == (2, 1, 0, 1)
    assert ages.edges == (-0.5, 0.5, 1.5, 2.5, 3.5)
    assert histogram_of([7]).counts == (1,)
    for values in ([0.0, 0.25, 1.0], [-1e9, 1e9, 0.5], [float(n) for n in range(1000)]):
        found = histogram_of(values)
        assert (len(found.counts), len(found.edges)) == (64, 65)
        assert sum(found.counts) == len(values)
        assert (found.edges[0], found.edges[-1]) == (min(values), max(values))


def test_a_table_has_the_best_the_worst_and_others_each_once_and_the_same_for_a_step() -> None:
    results = results_of([float(n) for n in range(20)])
    found = pick_samples(results, seed=4)
    assert [sample.which for sample in found] == ["best"] * 2 + ["worst"] * 2 + ["random"] * 4
    assert [sample.reward for sample in found[:4]] == [19, 18, 0, 1]
    assert len({sample.rollout_id for sample in found}) == MAX_ROWS
    assert [sample.reward for sample in found] == [sample.reward for sample in pick_samples(results, seed=4)]
    for number in (1, 2, 3, 5):
        few = [sample.reward for sample in pick_samples(results[:number], seed=0)]
        assert sorted(reward or 0.0 for reward in few) == list(range(number))


def test_details_are_made_at_their_steps_alone(tokenizer_folder: Path) -> None:
    results = results_of([0.0, 1.0])
    maker, never = maker_of(tokenizer_folder), maker_of(tokenizer_folder, histogram_interval=0, sample_interval=0)
    made = {step: maker.make(PolicyVersion(1, step), results) for step in range(1, 9)}
    assert [step for step, details in made.items() if details is not None] == [2, 4, 6, 8]
    assert [step for step, details in made.items() if details is not None and details.samples] == [4, 8]
    assert not any(never.make(PolicyVersion(1, step), results) for step in range(1, 9))
    assert maker.make(PolicyVersion(1, 4), []) is None  # every rollout was refused


def test_a_row_says_what_a_rollout_is_and_long_texts_are_cut(tokenizer_folder: Path) -> None:
    [row] = details_of(tokenizer_folder, [1.0]).rows()
    cells = dict(zip(COLUMNS, row, strict=True))
    assert len(str(cells.pop("rollout_id"))) == 32
    assert json.loads(str(cells.pop("reward_parts"))) == {"exact": 1.0, "short": 0.5}
    assert cells == {
        "which": "best",
        "prompt": "1+1=",
        "completion": "21.0",
        "reward": 1.0,
        "version": "1-2",
        "policy_age": 0,
        "advantage": 0.25,
        "task": "addition",
        "prompt_id": "p-0",
    }
    results = results_of([1.0], text="9" * 5000)
    long = replace(results[0].rollout, prompt_tokens=np.full(100_000, 4, dtype=np.int32), reward_parts=None)
    details = maker_of(tokenizer_folder).make(PolicyVersion(1, 4), [replace(results[0], rollout=long)])
    assert details is not None
    assert details.samples[0].prompt_tokens.base is None  # nothing of the payload stays in memory
    cells = dict(zip(COLUMNS, details.rows()[0], strict=True))
    assert (len(str(cells["prompt"])), len(str(cells["completion"]))) == (MAX_TEXT_CHARS, MAX_TEXT_CHARS)
    assert cells["reward_parts"] is None


def test_without_a_tokenizer_the_table_has_no_prompts_and_that_is_logged_once(tmp_path: Path) -> None:
    details = details_of(tmp_path / "nothing", [1.0, 0.0])
    with structlog.testing.capture_logs() as logs:
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in details.rows()]
    assert [(row["prompt"], row["completion"]) for row in rows] == [(None, "21.0"), (None, "20.0")]
    assert [entry["event"] for entry in logs] == ["prompts_not_shown"]


class Drawn:
    """A tracker that keeps the details that it gets."""

    name = "drawn"

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.details: list[Details] = []

    def start(self, record: Record) -> None:
        self.records.append(record)

    log = start

    def log_details(self, details: Details) -> None:
        self.details.append(details)

    def close(self) -> None:
        pass


class Plain:
    """A tracker that knows records alone."""

    name = "plain"

    def __init__(self) -> None:
        self.records: list[Record] = []

    def start(self, record: Record) -> None:
        self.records.append(record)

    log = start

    def close(self) -> None:
        pass


def group_of(trackers: list[Any], details: DetailsMaker) -> TrackerGroup:
    buffer: Any = RecordedBuffer()
    return TrackerGroup("demo", trackers, buffer=buffer, details=details, max_pending=100, close_s=60.0)


def test_details_go_to_trackers_that_can_draw_them_and_to_no_others(tokenizer_folder: Path) -> None:
    drawn, plain = Drawn(), Plain()
    tracking = group_of([plain, drawn], maker_of(tokenizer_folder))
    for step in range(1, 5):
        version = PolicyVersion(1, step)
        tracking.step(version, {"loss": 1.0}, skipped=None)
        tracking.details(version, results_of([0.0, 1.0]))
    tracking.close()
    assert [details.version.step for details in drawn.details] == [2, 4]
    assert [record.step for record in plain.records] == [record.step for record in drawn.records] == [1, 2, 3, 4]
    assert tracking.gauges() == {"num_tracking_dropped": 0.0, "num_tracking_failed": 0.0}


def test_details_that_cannot_be_made_are_counted_logged_once_and_end_nothing(tokenizer_folder: Path) -> None:
    broken: Any = [None]
    drawn = Drawn()
    tracking = group_of([drawn], maker_of(tokenizer_folder, histogram_interval=1))
    with structlog.testing.capture_logs() as logs:
        for step in range(1, 4):
            tracking.details(PolicyVersion(1, step), broken)
        tracking.details(PolicyVersion(1, 4), results_of([1.0]))
        tracking.close()
    assert [entry["event"] for entry in logs] == ["details_failed"]
    assert tracking.gauges()["num_tracking_failed"] == 3.0
    assert len(drawn.details) == 1


def test_text_of_a_model_is_no_markup_in_a_table_of_tensorboard() -> None:
    from tensorboard.plugin_util import markdown_to_safe_html

    text = '<b>bold</b> | *stars* `code` [a](http://b) <script>x</script> __x__\n| --- | # "quoted" \\* &amp; 你好'
    html = markdown_to_safe_html(markdown_table(["text", "reward"], [[text, 1.0], [None, -0.5]]))
    cells = [part.partition("</td>")[0] for part in html.split("<td>")[1:]]
    assert [unescape(cell) for cell in cells] == [text.replace("\n", "<br>"), "1.0", "", "-0.5"]
    assert re.findall(r"<[^>]*>", cells[0]) == ["<br>"]


def test_a_training_run_draws_histograms_and_samples_in_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = make_recipe(
        make_tiny_model(tmp_path / "model"),
        tracking={"tensorboard_dir": str(tmp_path / "events"), "histogram_interval": 1, "sample_interval": 2},
    )
    buffer: Any = RecordedBuffer()
    train(recipe, buffer=buffer, store=FileStore(tmp_path / "store"), stop=threading.Event())
    events = EventAccumulator(str(tmp_path / "events"), size_guidance={"histograms": 0, "tensors": 0}).Reload()
    ages = events.Histograms("histogram/policy_age")
    assert [event.step for event in ages] == [1, 2, 3, 4]
    assert [sum(event.histogram_value.bucket) for event in ages] == [12.0] * 4
    assert len(events.Histograms("histogram/reward")) == 4
    tables = events.Tensors("samples/text_summary")
    assert [event.step for event in tables] == [2, 4]
    lines = tables[0].tensor_proto.string_val[0].decode().splitlines()
    assert lines[0] == f"| {' | '.join(COLUMNS)} |"
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| best"] * 2 + ["| worst"] * 2 + ["| random"] * 4
    kinds = {json.loads(line)["kind"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()}
    assert kinds == {"start", "step", "evaluation"}


def fill(tracker: DetailTracker, details: Details) -> None:
    """Log two lineages, the first one with details."""
    tracker.start(start_record("demo", 1, START))
    for number in (3, 4):
        tracker.log(step_record("demo", PolicyVersion(1, number), {"loss": number / 2, "ess": None}, skipped=None))
    tracker.log_details(details)
    tracker.start(start_record("demo", 2, PolicyVersion(1, 4)))
    tracker.log(step_record("demo", PolicyVersion(2, 5), {"loss": 9.0}, skipped=None))
    tracker.close()


def test_weights_and_biases_keeps_histograms_and_tables_without_a_network(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_DATA_DIR", "")  # restored to what it was before
    monkeypatch.delenv("WANDB_DATA_DIR")
    fill(WandbTracker(WandbSection(mode="offline"), {}, folder=tmp_path), details_of(tokenizer_folder, [0.0, 1.0, 1.0]))

    def written() -> dict[str, Any] | None:
        runs = {name: lines for _, name, lines in map(history_of, tmp_path.glob("wandb/offline-run-*/run-*.wandb"))}
        first = runs.get("demo-1", [])
        return first[2] if len(first) == 3 and runs.get("demo-2") == [{"step": 5, "train/loss": 9.0}] else None

    # W&B's own process writes a moment after the end of a run
    line = until("both files are written", written)
    assert line is not None
    assert (line["step"], line["histogram/policy_age/values"], line["histogram/reward/values"]) == (
        4,
        [1, 1, 1],
        [1, 2],
    )
    assert line["histogram/policy_age/bins"] == [-0.5, 0.5, 1.5, 2.5]
    [path] = tmp_path.glob(f"wandb/offline-run-*/files/{line['samples/path']}")
    table = json.loads(path.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [(row["prompt"], row["completion"]) for row in rows] == [
        ("1+1=", "21.0"),
        ("1+1=", "21.0"),
        ("1+1=", "20.0"),
    ]
    assert (tmp_path / "artifacts" / "staging").is_dir()  # not in the home folder


def test_weights_and_biases_gets_numbers_histograms_and_tables_over_a_network(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    with WandbServer().running() as server:
        environ = {"BASE_URL": server.url, "API_KEY": "0" * 40, "ERROR_REPORTING": "false", "DATA_DIR": str(tmp_path)}
        for name, value in environ.items():
            monkeypatch.setenv(f"WANDB_{name}", value)
        wandb.teardown()  # its process keeps the address that it began with
        tracker = WandbTracker(WandbSection(), {"seed": 5}, folder=tmp_path)
        tracker.start(start_record("demo", 1, START))
        tracker.log(step_record("demo", PolicyVersion(1, 4), {"loss": 2.0}, skipped=None))
        tracker.log_details(details_of(tokenizer_folder, [0.0, 1.0, 1.0]))
        tracker.close()
        wandb.teardown()
    [run] = server.runs.values()
    assert (run["project"], run["groupName"], run["displayName"]) == ("tba", "demo", "demo-1")
    assert json.loads(run["config"])["seed"]["value"] == 5
    numbers, details = server.history
    assert (numbers["step"], numbers["train/loss"]) == (4, 2.0)
    assert details["histogram/reward"]["values"] == [1, 2]
    # once for the run, and once as an artifact with all versions of the table
    tables = [json.loads(body) for name, body in server.files.items() if name.endswith(".table.json")]
    assert [table["columns"] for table in tables] == [list(COLUMNS)] * 2
    assert [row[COLUMNS.index("completion")] for row in tables[0]["data"]] == ["21.0", "21.0", "20.0"]
    assert server.unknown == []


class TrackioCalls(ModuleType):
    """What trackio is asked for: its calls are those of W&B, its step is an argument."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.calls: list[tuple[Any, ...]] = []
        self.__spec__ = ModuleSpec("trackio", None)

    def init(self, *, project: str, group: str, name: str, **more: Any) -> TrackioCalls:
        self.calls.append(("init", project, group, name, more["config"]["lineage"]))
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self.calls.append(("log", step, sorted(values)))

    def finish(self) -> None:
        self.calls.append(("finish",))

    def Histogram(self, *, np_histogram: tuple[Any, Any]) -> None:
        assert len(np_histogram[0]) + 1 == len(np_histogram[1])

    def Table(self, *, columns: list[str], data: list[list[Any]]) -> None:
        assert (columns, len(data)) == (list(COLUMNS), 3)


def test_trackio_gets_the_calls_of_weights_and_biases(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackio = TrackioCalls()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    tracker = WandbTracker(WandbSection(project="sums", mode="trackio"), {}, folder=tmp_path / "wandb")
    fill(tracker, details_of(tokenizer_folder, [0.0, 1.0, 1.0]))
    assert trackio.calls == [
        ("init", "sums", "demo", "demo-1", 1),
        ("log", 3, ["train/loss"]),
        ("log", 4, ["train/loss"]),
        ("log", 4, ["histogram/policy_age", "histogram/reward", "samples"]),
        ("finish",),
        ("init", "sums", "demo", "demo-2", 2),
        ("log", 5, ["train/loss"]),
        ("finish",),
    ]
    assert not (tmp_path / "wandb").exists()
