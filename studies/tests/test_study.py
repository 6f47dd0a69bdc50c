"""The studies of studies/study: tuning, plan, data, statistics and tables."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from studies.study import plan as arms_of
from studies.study.cells import Cell, Line, Setting, World, cells_of
from studies.study.data import append_line, digests, meaning, read_lines, sources_digest
from studies.study.methods import ALWAYS
from studies.study.plan import LAGS, NUM_FULL, SCREENING, SEEDS, Arm, Study
from studies.study.report import report_text, write_report
from studies.study.stats import difference_interval, estimate, ratio_interval
from studies.study.tables import area_between, kept_table, num_generated, step_of
from studies.study.training import num_steps_of
from studies.study.tuning import MAX_SETTINGS, neighbours, tune
from studies.study.tuning import SEEDS as TUNING_SEEDS
from studies.study.world import NUM_TRAIN, TASKS

Score = Callable[[Cell], float]
NOISE = {"within": 1.0, "between": 3.0, "signal": 2.0, "cpu_s": 6.0}


def line(cell: Cell, level: float = 0.5, **result: object) -> Line:
    if not cell.setting.learning_rate:
        return Line(cell=cell, result=NOISE)
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


# ---- Tuning ---------------------------------------------------------------------------------------------------------


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


# ---- The plan -------------------------------------------------------------------------------------------------------


def test_study_the_lags_that_tell_methods_apart_come_first(whole: dict[str, Line]) -> None:
    first = list(Study({}).plan())
    assert {cell.method for cell in first if cell.world == World(lag=16)} == {*arms_of.FIRST, "tb", *arms_of.IMITATING}
    assert (first[0].world, first[-1].world) == (World(lag=16), SCREENING)
    tuned_first = {key: each for key, each in whole.items() if each.cell.world == World(lag=16)}
    then = list(Study(tuned_first).plan())
    assert then[0].world == World()
    assert then[-1].world == SCREENING

    def place(wanted: Callable[[Cell], bool]) -> int:
        return next(number for number, cell in enumerate(then) if wanted(cell))

    replay = [place(lambda cell, m=method: cell.world == arms_of.REPLAY and cell.method == m) for method in arms_of.FEW]
    question = place(lambda cell: cell.world == World(lag=4))
    assert replay[0] < question < replay[1] < place(lambda cell: not cell.setting.learning_rate)


def test_study_log_z_is_compared_at_the_setting_of_tb_and_beyond_one_epoch(whole: dict[str, Line]) -> None:
    arms = arms_of.log_z_arms()
    study = Study(whole)
    tuning = study.tuning("tb", World(lag=4))
    assert tuning is not None
    found = {arm.method: study.found(arm) for arm in arms}
    assert {name: set(lines) for name, lines in found.items()} == {"tb": set(SEEDS), "tb_log_z": set(SEEDS)}
    assert {each.cell.setting for lines in found.values() for each in lines.values()} == {tuning.best}
    assert num_steps_of(arms[0].world) * 16 > 3 * NUM_TRAIN
    text = report_text(study, "x")
    assert "## A log Z per prompt, 600 steps" in text
    assert "| `tb_log_z`, lag 4 |" in text


def test_study_screening_decides_the_full_comparison(whole: dict[str, Line]) -> None:
    lines = finish(lambda cell: 0.3 if cell.method in ("grpo", "kimi") else 0.6 if cell.method != "gspo" else 0.7)
    full = Study(lines).full()
    assert full[: len(ALWAYS)] == ALWAYS
    assert len(full) == NUM_FULL
    assert "gspo" in full
    assert "kimi" not in full
    known = {key: each for key, each in whole.items() if each.cell.world in (SCREENING, World(lag=16))}
    assert World(task="chain", lag=16) in {cell.world for cell in Study(known).plan()}
    unscreened = {key: each for key, each in whole.items() if each.cell.world != SCREENING}
    assert {cell.world for cell in Study(unscreened).plan()} == {SCREENING}


def test_study_every_compared_method_is_tuned_at_every_lag_of_the_task(whole: dict[str, Line]) -> None:
    study = Study(whole)
    for task in TASKS:
        run = {(each.cell.method, each.cell.world.lag) for each in whole.values() if each.cell.world.task == task}
        if task == "chain":
            assert run == {(method, lag) for method in arms_of.CHAIN_METHODS for lag in LAGS}
        for lag in LAGS:
            methods = [arm.method for arm in study.at_lag(task, lag)]
            assert len(methods) == len(set(methods))
            assert set(methods) == {*arms_of.CHAIN_METHODS, *(study.full() if task == "addition" else ())}
            for arm in study.at_lag(task, lag):
                tuning = study.tuning(arm.method, World(task=task, lag=lag))
                assert tuning is not None
                assert tuning.is_inside
                assert set(study.found(arm)) == set(SEEDS)


def test_study_a_run_that_two_questions_need_is_one_cell(whole: dict[str, Line]) -> None:
    study = Study(whole)
    plain = next(arm for arm in arms_of.hazard_arms() if arm.world == World(lag=4))
    again = next(arm for arm in arms_of.group_size_arms() if arm.world == World(lag=4) and arm.method == plain.method)
    assert study.found(plain) == study.found(again)


def test_study_the_key_names_everything_that_a_result_depends_on() -> None:
    cell = cells_of("tb", World(), Setting(learning_rate=1e-3, beta=0.1), [0])[0]
    others = {"task": "chain", "priority": "age", "hazard": "hack", "clip": "none", "is_raw": True}
    worlds = [replace(World(), **{part.name: others.get(part.name, 7)}) for part in fields(World)]
    found = [replace(cell, world=world) for world in worlds]
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


# ---- Data, statistics, report ---------------------------------------------------------------------------------------


def test_study_lines_come_back_and_a_torn_one_is_cut_off(tmp_path: Path, whole: dict[str, Line]) -> None:
    path = tmp_path / "deep" / "cells.jsonl"
    first, second, third, other = list(whole.values())[:4]
    assert read_lines(path) == {}
    append_line(path, first.cell, first.result, digest="a")
    append_line(path, other.cell, other.result, digest="b")
    append_line(path, second.cell, second.result, digest="a")
    torn = path.read_bytes()
    path.write_bytes(torn + torn[: len(torn) // 5])
    assert list(read_lines(path, "a")) == [first.cell.key, second.cell.key]
    append_line(path, third.cell, third.result, digest="a")
    assert path.read_bytes().startswith(torn)
    assert read_lines(path, "a") == {each.cell.key: each for each in (first, second, third)}
    assert digests(path) == {"a": 3, "b": 1}


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
    # 128 / 32 prompts: within 0.5 and between 1.5 of the signal at K = 8
    assert "| 32 | 4 | 0.50 | 1.50 | 2.00 | 0.45 | 6.00 | 6.45 |" in text
    path = tmp_path / "cells.jsonl"
    plain = [each for each in whole.values() if each.cell.world in (SCREENING, World(lag=16))]
    for number, each in enumerate(plain):
        append_line(path, each.cell, each.result, digest=sources_digest())
        if number == 40:
            write_report(path, tmp_path / "early")
    write_report(path, tmp_path / "late")
    assert {each.name for each in (tmp_path / "early").iterdir()} == {"tables.md"}
    assert {each.name for each in (tmp_path / "late").iterdir()} == {"tables.md", "curves_addition.png"}
    assert "41 cells of the code" in (tmp_path / "early" / "tables.md").read_text()


def test_study_equal_generation_and_equal_training_are_about_the_same_runs() -> None:
    plain = World(lag=4, num_steps=300)
    arms = [Arm(method="grpo", world=replace(plain, replay_m=m), tuned_in=plain) for m in (None, 0.5)]
    arms += [replace(arms[1], world=replace(arms[1].world, samples_per_insert=4))]
    assert [num_generated(arm, 9) for arm in arms] == [9 * 128, 9 * 128, 128 + 8 * 32]
    assert [step_of(arm, 384) for arm in arms] == [3, 3, 9]


def test_study_a_curve_that_is_late_by_its_lag_keeps_everything_once_it_is_moved_back(whole: dict[str, Line]) -> None:
    num = num_steps_of(World())
    steps = [*range(0, num + 1, 2)]

    def late(each: Line) -> Line:
        lag = each.cell.world.lag
        sampled = [0.2 + 0.7 * (1 - math.exp(-max(0, step - lag) / 40)) for step in steps]
        return replace(
            each, result={**each.result, "curve": {**each.result["curve"], "step": steps, "sampled": sampled}}
        )

    moved = {
        key: late(each) if each.cell.seed in SEEDS and each.cell.setting.learning_rate else each
        for key, each in whole.items()
        if each.cell.world.num_steps == 0
    }
    study = Study(whole | moved)
    (early,) = {each.area for each in study.found(Arm(method="tb", world=World(), tuned_in=World())).values()}
    (aged,) = {
        each.area for each in study.found(Arm(method="tb", world=World(lag=16), tuned_in=World(lag=16))).values()
    }
    plain, back = (
        next(
            row for row in kept_table(study, "addition", is_moved=moved_back).splitlines() if row.startswith("| `tb` ")
        )
        for moved_back in (False, True)
    )
    assert f"| {aged / early:.0%} (" in plain
    assert aged / early < 0.9
    assert back == "| `tb` | " + " | ".join(["100% (100% to 100%)"] * 4) + " |"


def test_study_the_area_between_two_steps_is_the_mean_of_the_curve_there() -> None:
    curve = {"step": [0, 10, 20, 30], "sampled": [0.0, 0.4, 0.4, 1.0]}
    each = line(Cell(method="grpo", world=World(), setting=Setting(learning_rate=1e-3), seed=0), curve=curve)
    assert area_between(each, 0, 30) == pytest.approx((2 + 4 + 7) / 30)
    assert area_between(each, 5, 25) == pytest.approx((0.3 * 5 + 4 + 0.55 * 5) / 20)  # neither end is a point
    assert area_between(each, 12, 14) == pytest.approx(0.4)
    broken = line(each.cell, num_steps=150, num_steps_done=40, curve=curve)
    assert area_between(broken, 0, 150) == pytest.approx(broken.area)
    assert area_between(broken, 31, 150) == 0
