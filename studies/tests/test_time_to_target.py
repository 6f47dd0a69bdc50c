"""studies/time_to_target.py: data file, choice of learning rates, tables, and the begin of tba's clock."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from studies import time_to_target
from studies.data_file import source_digest
from studies.time_to_target_bench.cells import (
    SEEDS,
    TUNING_SEEDS,
    Cell,
    Point,
    Rate,
    Result,
    Side,
    append_result,
    read_results,
)
from studies.time_to_target_bench.report import best_rate, is_at_edge, one_source, report_text
from studies.time_to_target_bench.tba_side import first_engine_ready_s, tba_sets
from studies.time_to_target_bench.workloads import WORKLOADS
from tba.config import load_recipe


def result(
    side: Side, rate: float, seed: int, seconds: float | None, *, steps_per_s: float = 1.0, **changes: Any
) -> Result:
    """Return a result that reaches 0.9 after so many seconds; None: never."""
    cell = Cell(
        **{
            "workload": "quickstart",
            "side": side,
            "learning_rate": rate,
            "seed": seed,
            "num_steps": 120,
            "source": f"{side} now",
            **changes,
        }
    )
    last = (10.0, 0.5) if seconds is None else (seconds, 0.9)
    points = tuple(
        Point(step=round(at * steps_per_s), seconds=at, cpu_s=at, pass_at_1=accuracy, greedy=1.0)
        for at, accuracy in ((0.0, 0.3), last)
    )
    return Result(
        cell=cell,
        points=points,
        seconds_per_step=1.0,
        cpu_s_per_step=1.0,
        num_generated=1,
        response_tokens_mean=4.0,
        starts={"trainer_start": 0.0, "first_batch": 0.0},
    )


def tuned(side: Side, rates: dict[float, tuple[float | None, ...]]) -> list[Result]:
    return [
        result(side, rate, seed, seconds)
        for rate, times in rates.items()
        for seed, seconds in zip(TUNING_SEEDS, times, strict=True)
    ]


def by_cell(results: list[Result]) -> dict[Cell, Result]:
    return {each.cell: each for each in results}


def row(text: str, figure: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith(f"| {figure} |")).strip("| ").split(" | ")


def test_a_schedule_is_tuned_like_a_rate_and_falls_to_zero_at_the_last_step() -> None:
    falling = [result("tba", 1e-3, seed, 4.0, schedule="linear") for seed in TUNING_SEEDS]
    found = by_cell([*tuned("tba", {1e-3: (5.0, 5.0, 5.0), 2e-3: (9.0, 9.0, 9.0)}), *falling])
    assert best_rate(found, "quickstart", "tba", ()) == Rate(1e-3, "linear")
    assert is_at_edge(found, "quickstart", "tba", ())  # of its schedule it is the only one
    workload = WORKLOADS["quickstart"]
    rates = [
        load_recipe(workload.recipe, sets=tba_sets(workload, each.cell)).trainer.learning_rate
        for each in (falling[0], result("tba", 1e-3, 0, 1.0))
    ]
    assert [[rate.at(step) for step in (0, 60, 120)] for rate in rates] == [[1e-3, 5e-4, 0.0], [1e-3] * 3]


def test_the_rate_is_chosen_by_the_mean_where_never_is_infinity_and_an_edge_is_named() -> None:
    assert not set(TUNING_SEEDS) & set(SEEDS)
    rates = {1e-4: (50.0, 50.0, 50.0), 1e-3: (5.0, 5.0, None), 2e-3: (30.0, 90.0, 40.0), 4e-3: (None, None, 1.0)}
    found = by_cell(tuned("tba", rates))
    assert best_rate(found, "quickstart", "tba", ()) == Rate(2e-3)
    assert not is_at_edge(found, "quickstart", "tba", ())
    few = by_cell([*found.values(), result("tba", 1e-2, TUNING_SEEDS[0], 1.0)])
    assert best_rate(few, "quickstart", "tba", ()) == Rate(2e-3)  # a rate with one seed of three is not compared
    with pytest.raises(SystemExit, match="run `tune` first"):
        best_rate(found, "quickstart", "trl", ())


def test_a_slow_hour_of_the_machine_does_not_choose_the_rate() -> None:
    fast = tuned("tba", {1e-3: (10.0, 10.0, 10.0)})  # 10 steps
    slow = [result("tba", 5e-4, seed, 20.0, steps_per_s=0.25) for seed in TUNING_SEEDS]  # 5 steps in twice the time
    assert best_rate(by_cell([*fast, *slow]), "quickstart", "tba", ()) == Rate(5e-4)


def test_a_table_has_one_length_and_one_source_of_each_side() -> None:
    real = [*tuned("trl", {1e-3: (10.0,) * 3}), *tuned("tba", {1e-3: (10.0,) * 3})]
    real += [result("trl", 1e-3, 0, 10.0), result("tba", 1e-3, 0, 20.0)]
    old, trial = result("tba", 1e-3, 0, 1.0, source="before"), result("tba", 1e-3, 0, 1.0, num_steps=10)
    text = report_text(by_cell([old, *real, trial]))
    assert row(text, "seconds to 0.9")[1:] == ["10", "20", "**0.50** (0.50 to 0.50, n 1)"]
    assert "2 results of another source or another number of steps are left out" in text
    assert "WARNING: 0.001 constant is at the edge of the rates tried for tba" in text
    assert list(one_source(by_cell([old, *real, trial]), 10)[0]) == [trial.cell]


def test_sides_with_another_number_of_responses_to_a_prompt_are_no_pair() -> None:
    found = [*tuned("trl", {1e-3: (10.0,) * 3}), *tuned("tba", {1e-3: (10.0,) * 3})]
    found += [result("trl", 1e-3, 0, 10.0), result("tba", 1e-3, 0, 20.0)]
    fours = [result("tba", 1e-3, seed, 1.0, group_size=4, source="tba later") for seed in (*TUNING_SEEDS, 0, 5)]
    text = report_text(by_cell([*found, *fours]))
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## quickstart, K = 8",
        "## quickstart, K = 4",
    ]
    assert row(text, "seconds to 0.9")[1:] == ["10", "20", "**0.50** (0.50 to 0.50, n 1)"]
    assert text.count("TRL at ") == 1
    trl = [result("trl", 1e-3, seed, 3.0, group_size=4, source="trl later") for seed in (*TUNING_SEEDS, 0, 5)]
    four = report_text(by_cell([*found, *fours, *trl])).split("## quickstart, K = 4")[1]
    assert row(four, "seconds to 0.9")[1:] == ["3", "1", "3", "1", "**3.00** (3.00 to 3.00, n 2)"]


def test_a_side_that_never_reaches_the_target_is_not_dropped() -> None:
    found = [*tuned("trl", {1e-3: (10.0,) * 3}), *tuned("tba", {1e-3: (10.0,) * 3})]
    for seed, (trl, tba) in enumerate([(None, 5.0), (10.0, 5.0), (None, 5.0)]):
        found += [result("trl", 1e-3, seed, trl), result("tba", 1e-3, seed, tba)]
    assert row(report_text(by_cell(found)), "seconds to 0.9")[-1] == "**inf** (2.00 to inf, n 3)"


def test_the_data_file_survives_a_torn_line_and_the_last_line_of_a_cell_counts(tmp_path: Path) -> None:
    path, first = tmp_path / "cells.jsonl", result("tba", 1e-3, 0, 10.0, settings=("a=1",))
    append_result(path, first)
    with path.open("a") as file:
        file.write('{"cell": {"work')
    assert read_results(path) == {first.cell: first}
    again = result("tba", 1e-3, 0, 20.0, settings=("a=1",))
    append_result(path, again)
    assert [asdict(each) for each in read_results(path).values()] == [asdict(again)]


def test_the_source_changes_with_code_and_recipe_and_not_with_what_python_makes(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("1")
    before = source_digest(["code"], "recipe", root=tmp_path)
    (tmp_path / "code" / "a.pyc").write_text("made")
    assert source_digest(["code"], "recipe", root=tmp_path) == before
    assert source_digest(["code"], "another", root=tmp_path) != before
    (tmp_path / "code" / "a.py").write_text("2")
    assert source_digest(["code"], "recipe", root=tmp_path) != before


def test_only_the_schedules_that_are_asked_for_are_read(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    falling, constant = (result("tba", 1e-3, 0, 10.0, schedule=schedule) for schedule in ("linear", "constant"))
    for each in (falling, constant):
        append_result(path, each)
    asked = argparse.Namespace(data=path, schedules=["linear"])
    assert list(time_to_target._results(asked)) == [falling.cell]
    assert len(time_to_target._results(argparse.Namespace(data=path, schedules=["linear", "constant"]))) == 2


def test_another_number_of_responses_makes_the_results_of_trl_old() -> None:
    workload = WORKLOADS["quickstart"]
    shape = ("sampling.group_size=8", "sampling.prompts_per_batch=16", "sampling.rollouts_per_visit=8")
    assert time_to_target._source(workload, "trl", shape) != time_to_target._source(workload, "trl", ())
    other = time_to_target._source(workload, "trl", ("trainer.sync_interval=3",))
    assert other == time_to_target._source(workload, "trl", ())  # not read by TRL's side


def test_the_clock_begins_when_the_first_engine_is_ready(tmp_path: Path) -> None:
    for number, second in ((0, 30), (1, 20)):
        line = f"2026-11-23T21:52:{second}.500000Z [info     ] engine ready                   engine=embedded\n"
        (tmp_path / f"searcher-{number}.log").write_text(f"2026-11-23T21:52:01.0Z [info     ] starting\n{line}")
    assert first_engine_ready_s(tmp_path) % 60 == pytest.approx(20.5)
    (tmp_path / "other").mkdir()
    with pytest.raises(SystemExit, match="says when its engine was ready"):
        first_engine_ready_s(tmp_path / "other")
