"""The world of studies/study: tasks, sampling, held-out accuracy, and a cell that trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tba_trainer.model.policy import load_policy

from examples.worlds.chain import problems as chain
from examples.worlds.chain.prepare import lesson
from studies.study.cells import Cell, Setting, World
from studies.study.data import read_cells, sources_digest
from studies.study.methods import METHODS
from studies.study.plan import Study
from studies.study.run import run_cells
from studies.study.training import Behaviour, recipe_of, train
from studies.study.world import CHARACTERS, EOS_ID, TASKS, HeldOut, Problems, decode, encode, sample, starting_model
from tba_cli.generators import addition
from tba_cli.starter_models import starting_model as quickstart

SETTING = Setting(learning_rate=1e-3, beta=0.05)


def cell_of(**world: object) -> Cell:
    return Cell(method="tba_prime", world=World(**{"num_steps": 10, **world}), setting=SETTING, seed=0)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=list(TASKS))
def task(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def start_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of an untrained starting model of a task."""
    made: dict[str, Path] = {}

    def start(task: str) -> Path:
        if task not in made:
            folder = tmp_path_factory.mktemp("study") / task
            small = lesson("0.3m")
            shape, max_length = (quickstart.SHAPE, 64) if task == "addition" else (small.shape, small.max_length_tokens)
            tokenizer = quickstart.build_tokenizer(CHARACTERS, max_length)
            torch.manual_seed(0)
            model = quickstart.build_model(tokenizer, shape)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            made[task] = folder
        return made[task]

    return start


def model_of(start: Path) -> torch.nn.Module:
    return load_policy(recipe_of(cell_of(), start).model, device="cpu", gradient_checkpointing=False)


def test_study_encodes_as_the_tokenizers_do() -> None:
    tokenizers = (quickstart.build_tokenizer(), quickstart.build_tokenizer(lesson("0.3m").characters))
    for module, tokenizer in zip((addition, chain), tokenizers, strict=True):
        for problem in module.all_problems("heldout")[:20]:
            ids = tokenizer(problem.text + problem.answer, add_special_tokens=False)["input_ids"]
            assert encode(problem.text + problem.answer) == ids
            assert decode([1, *ids, EOS_ID]) == problem.text + problem.answer
        assert tokenizer.eos_token_id == EOS_ID


def test_study_sampler_logprobs_are_the_policys_although_ended_rows_are_left_out(
    task: str, start_of: Callable[[str], Path]
) -> None:
    model = model_of(start_of(task))
    problems = Problems.of(task, "train", 6, 0)
    limit = TASKS[task].max_response_tokens
    found = sample(model, problems.prompts, 3, limit, torch.Generator().manual_seed(0))
    assert len(found.tokens) == 18
    assert len({len(tokens) for tokens in found.tokens}) > 1
    for row, (tokens, logprobs) in enumerate(zip(found.tokens, found.logprobs, strict=True)):
        prompt = problems.prompts[row // 3]
        all_tokens = torch.cat([prompt, torch.from_numpy(tokens).long()])[None]
        logits = model(input_ids=all_tokens).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(1).gather(1, all_tokens[0, len(prompt) :, None])[:, 0].detach()
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)
        assert EOS_ID not in tokens[:-1]
        assert len(tokens) == limit or tokens[-1] == EOS_ID


def test_study_rewards_are_those_of_the_tasks() -> None:
    sums, chains = Problems.of("addition", "train", 5, 0), Problems.of("chain", "train", 5, 0)
    for row, answer in enumerate(sums.answers):
        assert sums.reward(row, [*encode(answer), EOS_ID]) == 1
        assert sums.reward(row, encode(answer)) == 0
    for row, answer in enumerate(chains.answers):
        assert chains.reward(row, encode(f"1+2={answer}={answer}")) == 1
        assert chains.reward(row, [*encode(f"1+2={answer}="), EOS_ID]) == 0
        assert chains.reward(row, [*encode(f"1+2=9{answer}"), EOS_ID]) == 0


def test_study_accuracy_of_addition_is_exact() -> None:
    problems = Problems.of("addition", "heldout", 512, 0)
    answers = [[*encode(answer), EOS_ID] for answer in problems.answers]
    width = max(map(len, answers))
    rows = torch.tensor([[*answer, *[EOS_ID] * (width - len(answer))] for answer in answers])
    wrong = torch.arange(len(rows)) % 4 == 0  # a quarter of the answers ends differently

    def oracle(**inputs: torch.Tensor) -> SimpleNamespace:
        logits = torch.nn.functional.one_hot(rows, 16) * 30.0  # [N, R, V]
        logits[wrong, 1] = logits[wrong, 1].roll(1, dims=1)
        return SimpleNamespace(logits=logits)

    accuracy = HeldOut("addition").accuracy(oracle)
    assert accuracy.greedy == pytest.approx(0.75)
    assert accuracy.sampled == pytest.approx(0.75, abs=1e-4)


def test_study_behaviour_is_theta_of_lag_steps_ago(start_of: Callable[[str], Path]) -> None:
    model, twin = (model_of(start_of("addition")) for _ in range(2))
    behaviour, found = Behaviour(twin, 2), []
    name, parameter = next(iter(model.named_parameters()))
    for num_steps in range(7):
        with torch.no_grad():
            parameter.fill_(float(num_steps))
        policy, version = behaviour.at(model, num_steps)
        found.append((version, float(dict(policy.named_parameters())[name].detach().flatten()[0])))
    assert found == [(n, float(n)) for n in (0, 0, 0, 1, 2, 3, 4)]


def test_study_a_run_is_on_policy_at_lag_0_and_is_not_at_lag_2(start_of: Callable[[str], Path]) -> None:
    start = start_of("addition")
    fresh, late, again = (train(cell_of(lag=lag), start) for lag in (0, 2, 2))
    assert fresh["curve"]["ess"][1] == pytest.approx(1.0, abs=1e-3)
    assert fresh["curve"]["age"][1] == 0.0
    assert late["curve"]["ess"][1] < 0.9999
    assert late["curve"]["age"][1] == pytest.approx((0 + 1 + 2 * 8) / 10)
    assert again["curve"] == late["curve"]
    assert late["num_steps_done"] == 10
    # without a running median the product does not clip: the first 8 steps are as they are
    assert late["clip_share"] <= 0.2


def test_study_every_method_makes_a_step(start_of: Callable[[str], Path]) -> None:
    start = start_of("addition")
    for method, about in METHODS.items():
        setting = Setting(learning_rate=1e-4, beta=about.beta)
        found = train(Cell(method=method, world=World(num_steps=1), setting=setting, seed=0), start)
        assert found["num_steps_done"] == 1, method


def test_study_a_chain_run_trains_on_responses_of_many_lengths(start_of: Callable[[str], Path]) -> None:
    found = train(cell_of(task="chain", num_steps=1), start_of("chain"))
    assert found["num_steps_done"] == 1
    assert found["num_generated"] == 128
    assert 1 < found["curve"]["num_tokens"][0] <= 64


def test_study_workers_run_what_is_planned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_of: Callable[[str], Path]
) -> None:
    cells = [cell_of(num_steps=1, lag=lag) for lag in (0, 1)]
    monkeypatch.setattr(Study, "plan", lambda study: iter([c for c in cells if c.key not in study.lines]))
    monkeypatch.setattr("studies.study.world.starting_model", lambda *_: start_of("addition"))
    path = tmp_path / "cells.jsonl"
    run_cells(path, models=tmp_path / "models")
    assert list(read_cells(path, sources_digest())) == [cell.key for cell in cells]
    run_cells(path, models=tmp_path / "models")
    assert len(path.read_text().splitlines()) == 2


def test_study_starting_models_are_those_of_the_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def make(path: Path, *, seed: int, num_threads: int) -> None:
        asked.append((path.name, seed))
        path.mkdir()
        (path / "config.json").write_text("{}")

    monkeypatch.setattr("tba_cli.starter_models.starting_model.make_starting_model", make)
    for _ in range(2):
        assert starting_model(tmp_path, "addition", 3) == tmp_path / "addition-3"
    assert asked == [("addition-3", 3)]
    assert TASKS["chain"].start == "0.3m"
