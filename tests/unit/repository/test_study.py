"""The study of benchmarks/study: cells, data, and the world that it trains in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tba_trainer.model.policy import load_policy

from benchmarks.study.cells import LAGS_FIRST, SEEDS, Cell, Line, ordered, plan, tuned, tuning
from benchmarks.study.data import append_line, read_lines
from benchmarks.study.gradients import noise_of
from benchmarks.study.methods import LEARNING_RATES, METHODS
from benchmarks.study.replay import Replay
from benchmarks.study.report import report_text, write_report
from benchmarks.study.stats import estimate, ratio_interval
from benchmarks.study.training import Behaviour, Settings, make_groups, recipe_of, train
from benchmarks.study.verdict import best_baseline, sentences, standings
from benchmarks.study.world import EOS_ID, HeldOut, Problems, encode, sample
from tba_cli.generators import addition
from tba_cli.starter_models.addition_model import build_model, build_tokenizer

# ---- The asynchrony study's plan ------------------------------------------------------------------------------------


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


# ---- The asynchrony study's data file, its statistics and its report ------------------------------------------------


SOURCE = {"commit": "test", "sources_sha256": "0"}


def test_study_lines_come_back_and_a_torn_one_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cells.jsonl"
    cells = [found.cell for found in finish().values()][:3]
    assert read_lines(path) == {}
    append_line(path, cells[0], line(cells[0]).result, SOURCE)
    append_line(path, cells[1], line(cells[1]).result, SOURCE)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 4])
    assert list(read_lines(path)) == [cells[0].key, cells[1].key]
    append_line(path, cells[2], line(cells[2]).result, SOURCE)
    assert path.read_bytes().startswith(whole)
    assert list(read_lines(path)) == [cell.key for cell in cells]
    assert read_lines(path)[cells[2].key].final == line(cells[2]).final


def test_study_t_interval_covers_the_mean_in_95_of_100_cases() -> None:
    rng = np.random.default_rng(0)
    found = [estimate(rng.normal(0.7, 0.1, size=5).tolist()) for _ in range(4000)]
    assert np.mean([e.low < 0.7 < e.high for e in found]) == pytest.approx(0.95, abs=0.012)
    assert estimate([0.25]).mean == 0.25
    with pytest.raises(ValueError, match="no values"):
        estimate([])


def test_study_ratio_keeps_pairs_together() -> None:
    below = [0.2, 0.4, 0.6, 0.8, 0.9]
    assert ratio_interval([0.9 * b for b in below], below) == pytest.approx((0.9, 0.9, 0.9))


def test_study_verdict_says_who_is_ahead() -> None:
    def final(ours: float, at_lag_1: float) -> list[str]:
        levels = {"tba_prime": {16: ours, 1: at_lag_1}, "grpo": {16: 0.6, 1: 0.6}}
        lines = finish(lambda cell: levels.get(cell.method, {}).get(cell.lag, 0.4) + 0.001 * cell.seed)
        found = standings(lines)
        rival = best_baseline(found)
        assert rival is not None
        assert rival.method == "grpo"
        return sentences(found, "tba_prime")

    good = final(0.8, 0.85)
    assert all(sentence.endswith(": reached") for sentence in good)
    assert "`grpo` 0.200 ± 0.000 (n 5)" in good[2]
    assert "above 0 for 7 of 7" in good[2]
    without_rloo = {key: found for key, found in finish().items() if found.cell.method != "rloo"}
    assert sentences(standings(without_rloo), "tba_prime")[2].endswith("open, no cells of `rloo` yet")
    bad = final(0.5, 0.85)
    assert bad[0].endswith("not reached")
    assert bad[2].endswith("not reached")


def test_study_report_is_written_from_any_part_of_the_data(tmp_path: Path) -> None:
    lines = finish()
    for key in [key for key in lines if lines[key].cell.kind == "k"]:
        lines[key] = line(lines[key].cell, relative_variance=12.5)
    text = report_text(lines)
    assert "| `online_dpo` | baseline | 0.500 ± 0.000" in text
    assert "| 32 | 12.5 | 3 |" in text
    write_report(dict(list(lines.items())[:200]), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"tables.md", "accuracy_by_lag.png", "curves_lag16.png"}
    assert "No cell of this table has been run yet." in report_text({})


# ---- The asynchrony study's world -----------------------------------------------------------------------------------


OBJECTIVE = {"preset": "tba_prime", "beta": {"value": 0.05}}
SETTINGS = Settings(objective=OBJECTIVE, learning_rate=1e-3, lag=2, seed=0, num_steps=10, num_prompts=4)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained starting model."""
    folder = tmp_path_factory.mktemp("study") / "start"
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    build_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def model_of(start: Path) -> torch.nn.Module:
    return load_policy(recipe_of(SETTINGS, start).model, device="cpu", gradient_checkpointing=False)


def test_study_encodes_as_the_tokenizer_does() -> None:
    tokenizer = build_tokenizer()
    for problem in addition.all_problems("heldout")[:20]:
        ids = tokenizer(problem.text + problem.answer, add_special_tokens=False)["input_ids"]
        assert encode(problem.text + problem.answer) == ids
    assert tokenizer.eos_token_id == EOS_ID


def test_study_sampler_logprobs_are_the_policys(start: Path) -> None:
    model = model_of(start)
    problems = Problems.of("train", 6, 0)
    found = sample(model, problems.prompts, 3, torch.Generator().manual_seed(0))
    assert len(found.tokens) == 18
    for row, (tokens, logprobs) in enumerate(zip(found.tokens, found.logprobs, strict=True)):
        prompt = problems.prompts[row // 3]
        whole = torch.cat([prompt, torch.from_numpy(tokens).long()])[None]
        logits = model(input_ids=whole).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(1).gather(1, whole[0, len(prompt) :, None])[:, 0].detach()
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)
        assert EOS_ID not in tokens[:-1]


def test_study_accuracy_is_exact(start: Path) -> None:
    problems = Problems.of("heldout", 512, 0)
    width = max(map(len, problems.answers))
    rows = torch.tensor([[*answer, *[EOS_ID] * (width - len(answer))] for answer in problems.answers])
    wrong = torch.arange(len(rows)) % 4 == 0  # a quarter of the answers ends differently

    def oracle(**inputs: torch.Tensor) -> SimpleNamespace:
        logits = torch.nn.functional.one_hot(rows, 16) * 30.0  # [N, R, V]
        logits[wrong, 1] = logits[wrong, 1].roll(1, dims=1)
        return SimpleNamespace(logits=logits)

    accuracy = HeldOut().accuracy(oracle)
    assert accuracy.greedy == pytest.approx(0.75)
    assert accuracy.sampled == pytest.approx(0.75, abs=1e-4)


def test_study_behaviour_is_theta_of_lag_steps_ago(start: Path) -> None:
    model, twin = model_of(start), model_of(start)
    behaviour = Behaviour(twin, lag=2)
    name, parameter = next(iter(model.named_parameters()))
    seen = []
    for num_steps in range(5):
        with torch.no_grad():
            parameter.fill_(float(num_steps))
        policy, version = behaviour.at(model, num_steps)
        seen.append((version, float(dict(policy.named_parameters())[name].detach().flatten()[0])))
    assert seen == [(0, 0.0), (0, 0.0), (0, 0.0), (1, 1.0), (2, 2.0)]
    assert float(dict(behaviour.now(model).named_parameters())[name].detach().flatten()[0]) == 4.0


def test_study_a_run_is_on_policy_at_lag_0_and_is_not_at_lag_2(start: Path) -> None:
    fresh = train(Settings(objective=OBJECTIVE, learning_rate=1e-3, lag=0, seed=0, num_steps=10, num_prompts=4), start)
    late = train(SETTINGS, start)
    again = train(SETTINGS, start)
    assert fresh["curve"]["ess"][1] == pytest.approx(1.0, abs=1e-3)
    assert fresh["curve"]["age"][1] == 0.0
    assert late["curve"]["ess"][1] < 0.999
    assert late["curve"]["age"][1] == pytest.approx((0 + 1 + 2 * 8) / 10)
    assert again["curve"] == late["curve"]
    assert late["num_steps_done"] == 10


def test_study_replay_draws_groups_from_everything_by_mop(start: Path) -> None:
    settings = Settings(
        objective=OBJECTIVE, learning_rate=1e-3, lag=0, seed=0, num_steps=1, num_prompts=4, most_on_policy_prob=0.5
    )
    replay = Replay(recipe_of(settings, start), seed=0)
    model, problems = model_of(start), Problems.of("train", 400, 0)
    sources, ages = [], []
    for step in range(40):
        rows = list(range(4 * step, 4 * step + 4))
        samples = sample(model, problems.prompts[rows], 8, torch.Generator().manual_seed(step))
        groups = replay.exchange(make_groups(problems, rows, samples, step, first=4 * step), step)
        assert len(groups) == 4
        for group in groups:
            assert {rollout.prompt_id for rollout in group.rollouts} == {group.prompt_id}
            assert len({rollout.rollout_id for rollout in group.rollouts}) == 8
            sources.append(group.source)
            if group.source == "recent":
                ages += [step - rollout.version.step for rollout in group.rollouts]
    assert 0.38 < sources.count("recent") / len(sources) < 0.62
    assert max(ages) <= 1


def test_study_raw_scale_is_the_a_form_with_another_clip(start: Path) -> None:
    """Without a clip AdamW does not see a constant factor, so at one beta the two forms differ by the clip alone."""
    tb = {"preset": "tb", "beta": {"value": 0.5}}
    runs = [
        train(
            Settings(
                objective=tb,
                learning_rate=1e-3,
                lag=0,
                seed=0,
                num_steps=10,
                num_prompts=4,
                max_grad_norm=1e6,
                raw_scale=raw,
            ),
            start,
        )
        for raw in (False, True)
    ]
    np.testing.assert_allclose(runs[0]["curve"]["sampled"], runs[1]["curve"]["sampled"], rtol=1e-2)


def test_study_gradient_noise_is_variance_over_signal() -> None:
    torch.manual_seed(0)
    mean = torch.full((200,), 0.1, dtype=torch.float64)
    found = noise_of(mean + torch.randn(500, 200, dtype=torch.float64))
    assert found["variance"] == pytest.approx(200, rel=0.02)
    assert found["signal"] == pytest.approx(200 * 0.01, rel=0.1)
    assert found["relative_variance"] == pytest.approx(100, rel=0.1)
    assert noise_of(torch.zeros(4, 3))["relative_variance"] is None
