"""studies/overlap.py and studies/learning_curve.py: cells, data, ratios, and the clock."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tba_searcher.engines.tokenizer import TextCodec

from studies import overlap
from studies.data_file import source_digest
from studies.learning_curve import Judge, _step_times, reached
from studies.overlap_bench.runs import CHANGES, Cell, Pace, cells
from studies.overlap_bench.tables import ratio_of, table
from tba.config import load_recipe
from tba.errors import ConfigError
from tba_cli.generators.addition import CHARACTERS
from tba_cli.prompts.reader import heldout_prompts
from tba_cli.starter_models import starting_model as quickstart

ROOT = Path(__file__).parents[2]
PACE = Pace(measured_step_s=0.1, tokens_per_batch=448, ratio=4, slowdown=5, num_slots=32)


def result(*curve: tuple[float, float], late: float | None = 0.0) -> dict[str, Any]:
    return {
        "curve": [[seconds, step, accuracy, accuracy] for step, (seconds, accuracy) in enumerate(curve)],
        "num_steps": 10,
        "train_s": 20.0,
        "trainer_idle_share": 0.5,
        "mean_policy_age": 4.0,
        "rollouts_generated": 100,
        "rollouts_trained": 150,
        "pace_late_share": late,
        "trainer_late_share": 0.0,
        "cpu_s": 3.0,
    }


def test_one_searcher_makes_a_batch_in_as_many_steps_as_the_ratio_says() -> None:
    assert PACE.step_s == pytest.approx(0.5)
    assert PACE.tokens_per_batch / PACE.tokens_per_s == pytest.approx(4 * PACE.step_s)


def test_cells_come_seed_by_seed_have_names_of_their_own_and_change_keys_that_exist() -> None:
    found = list(cells(range(2)))
    assert len({cell.key for cell in found}) == len(found)
    assert [cell.seed for cell in found] == sorted(cell.seed for cell in found)
    for cell in found:
        slowed, _ = PACE.changes()
        changes = {**CHANGES, **slowed, **cell.changes()}
        recipe = load_recipe(
            ROOT / "recipes" / "quickstart.toml",
            environ={},
            sets=[f"{key}={value}" for key, value in changes.items()],
        )
        assert recipe.searcher.num_searchers == cell.searchers
        assert recipe.sampling.alternate == cell.lock_step
        assert recipe.searcher.engine == "studies.pace:paced_engine"


def test_a_cell_that_has_a_line_is_not_run_again_and_another_length_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run_cell(cell: Cell, *_: Any, **__: Any) -> dict[str, Any]:
        ran.append(cell.key)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return result((0.0, 0.3), (10.0, 0.8))

    monkeypatch.setattr(overlap, "run_cell", run_cell)
    monkeypatch.setattr(overlap, "measure_pace", lambda *_, **__: PACE)
    args = argparse.Namespace(json=tmp_path / "data.jsonl", seeds=1, cells="", steps=9, target=0.5, max_minutes=None)
    with pytest.raises(KeyboardInterrupt):
        overlap.run(args)
    with args.json.open("a") as file:
        file.write('{"key": "torn')
    overlap.run(args)
    assert ran.count(ran[2]) == 2
    assert sorted(set(ran)) == sorted(cell.key for cell in cells([0]))
    assert len(ran) == len(set(ran)) + 1
    data = overlap.read(args.json)
    assert data.settings is not None
    assert Pace(**data.settings["pace"]) == PACE
    assert (len(data.lines), data.num_other) == (8, 0)
    with pytest.raises(SystemExit, match="give the same --steps"):
        overlap.run(argparse.Namespace(**{**vars(args), "steps": 10}))
    monkeypatch.setattr(overlap, "source", lambda: "other code")
    overlap.run(args)
    assert len(ran) == 9 + 8
    data = overlap.read(args.json)
    assert (data.source, len(data.lines), data.num_other) == ("other code", 8, 8)


def rows_of(found: dict[str, tuple[Cell, dict[str, Any]]]) -> dict[str, dict[str, str]]:
    head, _, *rows = [line.strip("| ").split(" | ") for line in table(found, 0.8).splitlines()]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def pairs(*times: tuple[float | None, float | None], late: tuple[float | None, ...] = ()) -> Any:
    """Return lock-step and asynchronous cells of four searchers with these times, by seed."""
    found = {}
    for seed, (lock_s, mine_s) in enumerate(times):
        for is_lock, seconds in ((True, lock_s), (False, mine_s)):
            cell = Cell(seed=seed, searchers=4, lock_step=is_lock)
            curve = ((0.0, 0.3), (1.0, 0.4)) if seconds is None else ((0.0, 0.3), (seconds, 0.8))
            found[cell.key] = (cell, result(*curve, late=late[seed] if late and is_lock else 0.0))
    return found


def test_ratios_are_paired_by_seed_and_what_never_reached_the_target_took_infinitely_long() -> None:
    ratio = "lock-step, same searchers / this"
    # seeds differ far more than the two ways do
    found = rows_of(pairs((3.0, 1.0), (50.0, 10.0), (400.0, 100.0)))
    mine, lock = found["searchers-n4-async"], found["searchers-n4-lock"]
    assert (mine["seeds"], mine["s to 0.8"], mine[ratio]) == ("3", "10.0", "4.00 (3.00 to 5.00)")
    assert (lock[ratio], mine["lock-step, one searcher / this"]) == ("1.00 (1.00 to 1.00)", "-")
    found = rows_of(pairs((None, 1.0), (20.0, 10.0), (None, 100.0)))
    assert found["searchers-n4-async"][ratio] == "inf (2.00 to inf)"
    found = rows_of(pairs((3.0, None), (20.0, 10.0), (9.0, None)))
    assert found["searchers-n4-async"][ratio] == "0.00 (0.00 to 2.00)"
    assert rows_of(pairs((3.0, 1.0)))["searchers-n4-async"][ratio] == "3.00"


def test_a_late_cell_is_marked_by_its_worst_seed_and_left_out_of_ratios() -> None:
    times = ((3.0, 1.0), (50.0, 10.0), (400.0, 100.0))
    found = rows_of(pairs(*times, late=(0.0, 0.02, 0.4)))
    lock = found["searchers-n4-lock (too late or unknown: 1 of 3, not in ratios)"]
    assert lock["late: engines"] == "40.0 %"
    assert found["searchers-n4-async"]["lock-step, same searchers / this"] == "4.00 (3.00 to 5.00)"
    found = rows_of(pairs(*times, late=(0.0, None, 0.0)))
    assert found["searchers-n4-lock (too late or unknown: 1 of 3, not in ratios)"]["late: engines"] == "unknown"
    assert found["searchers-n4-async"]["lock-step, same searchers / this"] == "3.50 (3.00 to 4.00)"


def test_the_time_to_a_target_is_interpolated_and_none_where_it_is_never_reached() -> None:
    curve = [(0.0, 0.3), (10.0, 0.5), (20.0, 0.4), (30.0, 0.8)]
    assert reached(curve, 0.4) == pytest.approx(5.0)
    assert reached(curve, 0.6) == pytest.approx(25.0)
    assert reached(curve, 0.2) == 0.0
    assert reached(curve, 0.9) is None
    assert reached([], 0.1) is None
    assert (ratio_of(6.0, 2.0), ratio_of(None, 2.0), ratio_of(6.0, None), ratio_of(None, None)) == (
        3.0, float("inf"), 0.0, None,
    )  # fmt: skip


def test_the_clock_is_that_of_the_trainer_and_a_second_start_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    start = {"kind": "start", "metrics": {}}
    step = {"kind": "step", "step": 4, "at_s": 1010.0, "metrics": {"train_s": 10.0, "step_s": 0.5}}
    path.write_text("".join(json.dumps(each) + "\n" for each in (start, step)))
    assert _step_times(path) == ({4: 10.0}, 1000.0)
    path.write_text("".join(json.dumps(each) + "\n" for each in (start, step, start)))
    with pytest.raises(ConfigError, match="started more than once"):
        _step_times(path)


def test_expected_accuracy_is_the_probability_of_the_answers_at_the_policy_temperature(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = quickstart.build_tokenizer(CHARACTERS, quickstart.MAX_LENGTH_TOKENS)
    model: Any = quickstart.build_model(tokenizer, quickstart.SHAPE).eval()
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    codec, total = TextCodec(tmp_path), 0.0
    prompts = heldout_prompts(load_recipe(ROOT / "recipes" / "quickstart.toml", environ={}))[:7]
    for prompt in prompts:
        tokens, probability = list(codec.encode_prompt(prompt.text)), 1.0
        for token in codec.encode_prompt(prompt.data["answer"]) + codec.eos_ids:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([tokens])).logits[0, -1]
            probability *= float((logits / 0.5).softmax(0)[token])
            tokens.append(token)
        total += probability
    found, greedy = Judge(tmp_path, prompts, temperature=0.5).measure(dict(model.named_parameters()))
    assert found == pytest.approx(total / 7, rel=1e-4)
    assert 0 <= greedy <= 1


def test_the_source_changes_with_code_and_recipe_and_not_with_what_python_makes(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("1")
    before = source_digest(["code"], "recipe", root=tmp_path)
    (tmp_path / "code" / "a.pyc").write_text("made")
    assert source_digest(["code"], "recipe", root=tmp_path) == before
    assert source_digest(["code"], "another", root=tmp_path) != before
    (tmp_path / "code" / "a.py").write_text("2")
    assert source_digest(["code"], "recipe", root=tmp_path) != before
