"""The study of the age of rollouts on a pretrained model, with a tiny one in its place."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from studies import pretrained_age
from studies.pretrained_age import Cell, Line, Sampler, cells_of, read_cells, report, rows_of, run_cell, train
from tba.api import Prompt
from tests.support.tiny_model import make_tiny_model


def args_of(path: Path, **changes: Any) -> argparse.Namespace:
    base = {"methods": ("tb_positive", "grpo"), "lags": (0, 16), "seeds": (0, 1), "learning_rates": (3e-5,)}
    return argparse.Namespace(**{**base, "betas": (), "steps": 20, "json": path, **changes})


def line(method: str = "grpo", lag: int = 0, seed: int = 0, *, sampled: list[float], **result: int) -> Line:
    curve = {"step": [0, 10, 20], "sampled": sampled, "ess": [None, 0.9, 0.5]}
    cell = Cell(method=method, lag=lag, learning_rate=3e-5, beta=0.0, seed=seed, num_steps=20)
    return Line(cell=cell, result={"num_steps_done": 20, "curve": curve, **result})


def test_age_the_order_is_balanced_and_a_cell_that_has_a_line_is_not_run_again(tmp_path: Path) -> None:
    cells = cells_of(args_of(path := tmp_path / "age.jsonl"))
    assert [(cell.seed, cell.lag, cell.method) for cell in cells[1:3]] == [(0, 0, "grpo"), (0, 16, "tb_positive")]
    path.write_text(json.dumps({"cell": asdict(cells[1]), "result": {}, "commit": "another+changes"}) + "\n")
    assert cells_of(args_of(path)) == [cells[0], *cells[2:]]
    assert len(cells_of(args_of(path, steps=40))) == len(cells) == 8
    betas = [(cell.method, cell.beta) for cell in cells_of(args_of(path, betas=(0.1, 0.2), seeds=(9,)))]
    assert betas == [("tb_positive", 0.1), ("tb_positive", 0.2), ("grpo", 0.0)] * 2


def test_age_no_cell_begins_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, args = line(sampled=[0.2, 0.4, 0.6]), args_of(tmp_path / "age.jsonl", eval_samples=1)
    monkeypatch.setattr(pretrained_age, "train", lambda *_: {**done.result, "cpu_s": 1.0})
    for until_s, num_lines in ((0.0, 0), (float("inf"), 1)):
        run_cell(done.cell, [], args, until_s)
        assert len(read_cells(args.json)) == num_lines


def test_age_prompts_come_in_epochs_that_differ() -> None:
    first, second = (rows_of(step, 9, 4, 0) + rows_of(step + 1, 9, 4, 0) for step in (1, 3))
    assert [len(set(first)), len(set(second)), first == second] == [8, 8, False]


@pytest.mark.parametrize(("lag", "steps"), [(0, [0, 1, 2, 3, 4]), (2, [0, 0, 0, 1, 2])])
def test_age_rollouts_come_from_the_policy_of_lag_steps_before(
    lag: int, steps: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, sample = list[tuple[int, int, bytes]](), Sampler.rollouts

    def recorded(self: Sampler, weights: Path, step: int, asked: Any) -> Any:
        calls.append((step, len(list(weights.parent.iterdir())), weights.read_bytes()))
        return sample(self, weights, step, asked)

    monkeypatch.setattr(Sampler, "rollouts", recorded)
    monkeypatch.setattr(pretrained_age, "score", lambda item, rule: 1.0 + len(item.response) % 2)
    monkeypatch.setattr(pretrained_age, "EVAL_EVERY_STEPS", 3)
    cell = Cell(method="tba_prime", lag=lag, learning_rate=1e-3, beta=0.05, seed=0, num_steps=5)
    fields = [{"prompt_id": f"{n}", "text": f"{n} + 1 =", "split": "train" if n < 8 else "heldout"} for n in range(10)]
    prompts = [Prompt.model_validate({"task": "sum", **each}) for each in fields]
    curve = train(cell, prompts, make_tiny_model(tmp_path, tied=True), eval_samples=2)["curve"]
    assert [step for step, _, _ in calls] == [0, *steps[:3], 3, *steps[3:], 5]
    assert max(num_files for _, num_files, _ in calls) == lag + 1
    assert len({weights for _, _, weights in calls}) == len({0, *steps, 3, 5})
    assert curve["policy_age_mean"] == [None, (3 - sum(steps[:3])) / 3, (7 - sum(steps[3:])) / 2]
    assert curve["logprob_gap_on_policy"][1] < 0.1
    assert [value is None for value in curve["greedy"]] == [False, True, False]


def test_age_tables_compare_the_seeds_that_both_lags_have() -> None:
    lines = [line(sampled=[0.2, 0.4, 0.6]), line(seed=1, sampled=[0.2, 0.8, 0.8]), line(lag=16, sampled=[0.2] * 3)]
    lines.append(line("tb", sampled=[0.2, 0.4, 0.4], num_steps_done=19))
    areas, finals, ess = report(lines).split("\n\n")[2::2]
    assert "| grpo | 3e-05 / 0 | 20 | 0.525 (0.400, 0.650), 100% | 0.200 (0.200), 50% |" in areas
    assert "| grpo | 3e-05 / 0 | 20 | 0.650 (0.500, 0.800), 100% | 0.200 (0.200), 40% |" in finals
    assert "| tb | 3e-05 / 0 | 20 | 0.000 (0.000) | - |" in finals
    assert "| 0.700 (0.700, 0.700), 100% | 0.700 (0.700), 100% |" in ess
