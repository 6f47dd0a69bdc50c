"""The asynchrony study's world: sampling, exact accuracy, constant lag and replay are what they say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tba_trainer.model.policy import load_policy

from benchmarks.study.gradients import noise_of
from benchmarks.study.replay import Replay
from benchmarks.study.training import Behaviour, Settings, make_groups, recipe_of, train
from benchmarks.study.world import EOS_ID, HeldOut, Problems, encode, sample
from tba_cli.starter_models.addition_model import build_model, build_tokenizer
from tba_cli.tasks import addition

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
