"""The studies of studies/study: tuning, plan, data, statistics and tables."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from studies.data_file import append_line
from studies.study.cells import Cell, Line, Setting, World, cells_of
from studies.study.data import digests, meaning, read_cells, sources_digest
from studies.study.plan import COMPARED, LAGS, SEEDS, Study, at_lag
from studies.study.report import report_text, write_report
from studies.study.stats import difference_interval, estimate, ratio_interval
from studies.study.training import num_steps_of
from studies.study.tuning import MAX_SETTINGS, neighbours, tune
from studies.study.tuning import SEEDS as TUNING_SEEDS

Score = Callable[[Cell], float]


def line(cell: Cell, level: float = 0.5, **result: object) -> Line:
    num = num_steps_of(cell.world)
    same = [level] * 3
    curve = {"step": [0, num // 2, num], "sampled": same, "greedy": same, "ess": [None, 0.9, 0.8], "age": [None, 4, 4]}
    base = {"num_steps": num, "num_steps_done": num, "clip_share": 0.1, "cpu_s": 1.0, "curve": curve}
    return Line(cell=cell, result={**base, **result})


def peaked(cell: Cell) -> float:
    """A level with one peak, elsewhere for each method."""
    rng = random.Random(cell.method)
    rate = math.log2(max(cell.setting.learning_rate, 1e-9) / 4e-4) - rng.uniform(-2, 2)
    beta = math.log(cell.setting.beta / 0.1, 4) - rng.uniform(-1, 1) if cell.setting.beta else 0.0
    return 0.8 - 0.02 * rate**2 - 0.02 * beta**2


def finish(score: Score = peaked) -> dict[str, Line]:
    """Everything that the plan ever asks for."""
    lines: dict[str, Line] = {}
    while found := list(Study(lines).plan()):
        lines |= {cell.key: line(cell, score(cell)) for cell in found}
    return lines


@pytest.fixture(scope="module")
def whole() -> dict[str, Line]:
    return finish()


def tuned(score: Score, method: str = "tb", begin: Setting | None = None) -> dict[str, Line]:
    lines: dict[str, Line] = {}
    while todo := tune(lines, method, World(lag=16), begin).todo:
        lines |= {cell.key: line(cell, score(cell)) for cell in todo}
    return lines


def test_study_tuning_ends_at_a_setting_that_is_better_than_all_its_neighbours() -> None:
    far = Setting(learning_rate=4e-4 * 2**5, beta=0.2 / 4)

    def score(cell: Cell) -> float:
        rate, beta = (math.log2(getattr(cell.setting, n) / getattr(far, n)) for n in ("learning_rate", "beta"))
        return 0.9 - 0.01 * rate**2 - 0.01 * beta**2

    found = tune(tuned(score), "tb", World(lag=16))
    assert found.best == far
    assert found.is_inside
    assert all(found.scores[each] < found.scores[far] for each in neighbours(far))


def test_study_tuning_gives_up_where_the_best_is_always_at_the_edge_and_says_so() -> None:
    lines = tuned(lambda cell: 0.5 + 0.01 * math.log2(cell.setting.learning_rate))
    found = tune(lines, "tb", World(lag=16))
    assert found.is_done
    assert not found.is_inside
    assert len(found.scores) <= MAX_SETTINGS
    assert found.best == max(found.scores, key=lambda setting: setting.learning_rate)


def test_study_tuning_takes_the_mean_of_seeds_that_are_used_for_nothing_else(whole: dict[str, Line]) -> None:
    assert not set(TUNING_SEEDS) & set(SEEDS)
    assert {each.cell.seed for each in whole.values()} == {*TUNING_SEEDS, *SEEDS}
    lines = tuned(lambda cell: 0.9 if (cell.seed, cell.setting.learning_rate) == (100, 8e-4) else 0.5, "grpo")
    assert tune(lines, "grpo", World(lag=16)).scores[Setting(learning_rate=8e-4)] == pytest.approx((0.9 + 0.5 * 2) / 3)


def write(path: Path, each: Line, digest: str) -> None:
    append_line(path, {"key": each.cell.key, "digest": digest, "cell": each.cell.document(), "result": each.result})


def test_study_the_lags_that_tell_methods_apart_come_first(whole: dict[str, Line]) -> None:
    first = list(Study({}).plan())
    assert {cell.method for cell in first} == set(COMPARED["addition"])
    assert {cell.world for cell in first} == {World(lag=16)}
    tuned_first = {key: each for key, each in whole.items() if each.cell.world == World(lag=16)}
    then = list(dict.fromkeys(cell.world for cell in Study(tuned_first).plan()))
    assert then == [World(task="chain", lag=16), World(), World(lag=64), World(lag=4), World(lag=1)]


def test_study_every_compared_method_is_tuned_at_every_lag_of_the_task(whole: dict[str, Line]) -> None:
    study = Study(whole)
    for task, methods in COMPARED.items():
        run = {(each.cell.method, each.cell.world.lag) for each in whole.values() if each.cell.world.task == task}
        assert run == {(method, lag) for method in methods for lag in LAGS}
        for arm in (arm for lag in LAGS for arm in at_lag(task, lag)):
            tuning = study.tuning(arm)
            assert tuning is not None
            assert tuning.is_inside
            assert set(study.found(arm)) == set(SEEDS)


def test_study_the_key_names_everything_that_a_result_depends_on() -> None:
    cell = cells_of("tb", World(), Setting(learning_rate=1e-3, beta=0.1), [0])[0]
    found = [replace(cell, world=world) for world in (World(task="chain"), World(lag=1), World(num_steps=7))]
    found += [replace(cell, seed=1), replace(cell, method="grpo"), replace(cell, setting=Setting(learning_rate=1e-3))]
    assert len({each.key for each in [cell, *found]}) == len(found) + 1
    assert all(Cell.of(each.document()) == each for each in found)


def test_study_area_is_the_mean_of_the_curve_and_a_run_that_broke_has_nothing_from_there() -> None:
    cell = cells_of("tb", World(num_steps=40), Setting(learning_rate=1e-3, beta=0.1), [0])[0]
    curve = {"step": [0, 20, 40], "sampled": [0.2, 0.6, 0.8], "greedy": [1.0] * 3}
    assert line(cell, curve=curve).area == pytest.approx((0.4 + 0.7) / 2)
    broke = {"step": [0, 20], "sampled": [0.2, 0.6], "greedy": [1.0] * 2}
    found = line(cell, curve=broke, num_steps_done=20)
    assert found.area == pytest.approx((20 * 0.4 + 1 * 0.3) / 40)
    assert (found.final, found.broke, found.collapsed) == (0.0, True, True)


def test_study_lines_of_other_code_do_not_count_unless_they_were_taken_over(
    tmp_path: Path, whole: dict[str, Line]
) -> None:
    path = tmp_path / "deep" / "cells.jsonl"
    first, second, other = list(whole.values())[:3]
    assert read_cells(path) == {}
    for each, digest in ((first, "a"), (other, "b"), (second, "a")):
        write(path, each, digest)
    assert read_cells(path, "a") == {each.cell.key: each for each in (first, second)}
    assert digests(path) == {"a": 2, "b": 1}
    path.with_name("cells.adopted.jsonl").write_text('{"old":"b","new":"c"}\n{"old":"c","new":"a"}\n')
    assert read_cells(path, "a") == read_cells(path)


def test_study_the_digest_is_of_what_the_code_does() -> None:
    assert meaning("def f(x):\n    return x + 1\n") == meaning('def f(x):\n    """Add."""\n    return x+1  # one\n')
    assert meaning("def f(x):\n    return x + 1\n") != meaning("def f(x):\n    return x + 2\n")


def test_study_t_interval_covers_the_mean_in_95_of_100_cases() -> None:
    rng = np.random.default_rng(0)
    found = [estimate(rng.normal(0.7, 0.1, size=5).tolist()) for _ in range(4000)]
    covered = np.mean([abs(each.mean - 0.7) < each.half_width for each in found])
    assert covered == pytest.approx(0.95, abs=0.012)
    with pytest.raises(ValueError, match="no values"):
        estimate([])


def test_study_bootstrap_keeps_pairs_together() -> None:
    below = [0.2, 0.4, 0.6, 0.8, 0.9]
    ratio = ratio_interval([0.9 * b for b in below], below)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((0.9, 0.9, 0.9))
    gap = difference_interval([b + 0.1 for b in below], below)
    assert (gap.value, gap.low, gap.high) == pytest.approx((0.1, 0.1, 0.1))
    assert difference_interval(below, [0.5] * 5).low < 0 < difference_interval(below, [0.5] * 5).high


def test_study_report_is_written_from_any_part_of_the_data(tmp_path: Path, whole: dict[str, Line]) -> None:
    text = report_text(Study(whole), sources_digest())
    assert "No cell of this table has been run yet." not in text
    assert "**given up**" not in text
    assert "0 of those known now are left" in text
    path = tmp_path / "cells.jsonl"
    plain = [each for each in whole.values() if each.cell.world == World(lag=16)]
    for number, each in enumerate(plain):
        write(path, each, sources_digest())
        if number == 4:
            write_report(path, tmp_path / "early")
    write_report(path, tmp_path / "late")
    assert {each.name for each in (tmp_path / "early").iterdir()} == {"tables.md"}
    assert {each.name for each in (tmp_path / "late").iterdir()} == {"tables.md"}
    assert "5 cells of the code" in (tmp_path / "early" / "tables.md").read_text()
