"""The asynchrony study's plan: what decides most comes first, and nothing is run twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from benchmarks.study.cells import LAGS_FIRST, SEEDS, Cell, Line, ordered, plan, tuned, tuning
from benchmarks.study.methods import LEARNING_RATES, METHODS

NUM_TUNING = len(LEARNING_RATES) * 2


def line(cell: Cell, final: float = 0.5, **result: object) -> Line:
    curve = {"sampled": [0.3, final, final, final], "greedy": [0.6, 0.9, 0.9, 0.9], "ess": [None, 0.9, 0.8, 0.8]}
    curve |= {"age": [None, 4.0, 4.0, 4.0]}
    return Line(cell=cell, result={"num_steps": 3, "num_steps_done": 3, "curve": curve, **result})


def finish(final: Callable[[Cell], float] = lambda cell: 0.5) -> dict[str, Line]:
    """Everything that the plan ever asks for."""
    lines: dict[str, Line] = {}
    while found := list(plan(lines)):
        lines |= {cell.key: line(cell, final(cell)) for cell in found}
    return lines


def test_study_tuning_comes_first_then_lag_16_and_1_of_contenders_seed_by_seed() -> None:
    weak = {"rloo", "reinforce"}
    lines = finish(lambda cell: 0.3 if cell.method in weak else 0.7)
    cells = list(ordered(lines))
    keys = [cell.key for cell in cells]
    assert len(set(keys)) == len(keys) == len(lines)
    num = NUM_TUNING * len(METHODS)
    assert {cell.kind for cell in cells[:num]} == {"tune"}
    assert [(c.method, c.lag, c.seed) for c in cells[num : num + len(METHODS)]] == [(m, 16, 0) for m in METHODS]
    num_strong = len(METHODS) - len(weak)
    then = cells[num + len(METHODS) :][: num_strong * (len(LAGS_FIRST) * len(SEEDS) - 1)]
    assert not {cell.method for cell in then} & weak
    assert {cell.lag for cell in then} == set(LAGS_FIRST)
    assert [cell.seed for cell in then] == sorted(cell.seed for cell in then)
    assert {cell.kind for cell in cells} == {"tune", "lag", "second", "replay", "k", "m", "scaling"}


def test_study_every_method_has_the_same_tuning_budget_on_seeds_of_its_own() -> None:
    for method in METHODS:
        cells = tuning(method)
        assert len(cells) == NUM_TUNING
        assert not {cell.seed for cell in cells} & set(SEEDS)


def test_study_the_best_setting_on_the_tuning_seed_is_taken() -> None:
    best = (LEARNING_RATES[1], METHODS["tb"].betas[1])
    lines = finish(lambda cell: 0.8 if (cell.learning_rate, cell.beta) == best else 0.7)
    assert tuned("tb", lines) == best
    assert tuned("tb", lines, rank=1) == (LEARNING_RATES[0], METHODS["tb"].betas[0])
    assert {(c.learning_rate, c.beta) for c in ordered(lines) if c.method == "tb" and c.kind == "lag"} == {best}
    lines.pop(tuning("tb")[0].key)
    assert tuned("tb", lines) is None


def test_study_a_run_collapses_below_its_start_or_well_below_its_best() -> None:
    cell = next(ordered({}))
    assert not line(cell, 0.5).collapsed
    assert line(cell, 0.29).collapsed
    falling = {"sampled": [0.3, 0.9, 0.7, 0.7, 0.7], "greedy": [0.6] * 5, "ess": [None] * 5}
    assert line(cell, curve=falling).collapsed
    broke = line(cell, num_steps_done=2)
    assert (broke.final, broke.broke, broke.collapsed) == (0.0, True, True)


def test_study_the_key_names_everything_that_a_result_depends_on() -> None:
    cell = next(ordered({}))
    others = {
        "kind": "lag",
        "method": "tb",
        "lag": 3,
        "learning_rate": 1.0,
        "beta": 7.0,
        "seed": 9,
        "most_on_policy_prob": 0.0,
        "group_size": 4,
        "scaling": "raw",
        "beta_then": 0.0,
    }
    assert others.keys() == cell.document().keys()
    assert all(replace(cell, **{name: value}).key != cell.key for name, value in others.items())
