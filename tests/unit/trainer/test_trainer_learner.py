"""A batch through the learner: micro-batching, temperature, reference cache, optimizer, what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tba_trainer.learner import learner as learner_module
from tba_trainer.learner.batch_metrics import AGE_BUCKETS, batch_metrics, bucket_name, ess_ratio, gap_limit
from tba_trainer.learner.forward_backward import ForwardBackward, ForwardResult
from tba_trainer.learner.learner import Optimizer
from tba_trainer.model.policy import frozen_copy, load_policy
from transformers import AutoModelForCausalLM

from tba.config import TrainerSection
from tba.errors import TbaError
from tba.versions import PolicyVersion
from tba.wire import VersionSpan
from tests.support.learner_values import make_learner, move, token_logprobs
from tests.support.rollout_values import replace
from tests.support.trainer_values import changed, make_batch, make_recipe, make_rollout
from tests.support.wire_values import conversation


def test_theta_and_reference_use_the_policy_temperature_and_never_that_of_the_rollout(folder: Path) -> None:
    rng = np.random.default_rng(0)
    hot = make_rollout(rng, temperature=2.0)
    cold = replace(hot, sampling=replace(hot.sampling, temperature=0.5))
    learner = move(make_learner(folder, model={"policy_temperature": 0.7}))
    start = load_policy(make_recipe(folder).model, device="cpu", gradient_checkpointing=False)
    [value] = learner.reference.logprobs([hot]) or [np.zeros(1)]
    assert value == pytest.approx(token_logprobs(start, hot, 0.7).sum(), abs=1e-4)
    assert value != pytest.approx(token_logprobs(start, hot).sum(), abs=1e-2)
    others = make_batch(0).groups[0]
    groups = [replace(others, rollouts=(rollout, *others.rollouts[1:])) for rollout in (hot, cold)]
    batches = [replace(make_batch(0), groups=(group,)) for group in groups]
    results = [learner.gradients(batch, step=1, policy_ages=[5] * 4) for batch in batches]
    assert results[0] == results[1]
    models = (learner.model, start)
    sums = [[token_logprobs(model, r, 0.7).sum() for r in groups[0].rollouts] for model in models]
    assert results[0]["kl_to_ref"] == pytest.approx(np.mean(np.subtract(sums[0], sums[1])), abs=1e-4)


def test_adamw_steps_like_torch_with_clipped_gradients(folder: Path) -> None:
    batch = make_batch(0)
    learner = make_learner(folder, trainer={"learning_rate": {"value": 1e-2}, "max_grad_norm": 0.5})
    twin = frozen_copy(learner.model).requires_grad_(True)
    metrics = learner.gradients(batch, step=1, policy_ages=[0] * 12)
    gradients = [p.grad.clone() for p in learner.model.parameters()]
    learner.apply(step=1, lineage=1)
    assert (metrics["grad_norm"] or 0.0) > 0.5
    assert torch.stack([g.norm() for g in gradients]).norm() == pytest.approx(0.5, rel=1e-3)
    adamw = torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0)
    for parameter, grad in zip(twin.parameters(), gradients, strict=True):
        parameter.grad = grad
    adamw.step()
    assert all(torch.equal(a, b) for a, b in zip(learner.model.parameters(), twin.parameters(), strict=True))


def test_an_infinite_gradient_is_reported_and_the_weights_are_not_touched(folder: Path) -> None:
    learner = make_learner(folder)
    learner.model.get_output_embeddings().weight.register_hook(lambda grad: grad * float("inf"))
    before = [p.detach().clone() for p in learner.model.parameters()]
    metrics = learner.gradients(make_batch(0), step=7, policy_ages=[0] * 12)
    assert not np.isfinite(metrics["grad_norm"] or 0.0)
    learner.skip(step=7, lineage=1)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))
    assert all(p.grad is None for p in learner.model.parameters())


def test_shuffled_rewards_are_permuted_over_the_whole_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = changed(make_batch(0), lambda row, r: replace(r, reward=float(row)))
    reached: list[list[float]] = []

    class Recording(ForwardBackward):
        def __init__(self, *args: Any, rewards: np.ndarray, **kwargs: Any) -> None:
            reached.append(rewards.tolist())
            super().__init__(*args, rewards=rewards, **kwargs)

    monkeypatch.setattr(learner_module, "ForwardBackward", Recording)
    own = [float(number) for number in range(12)]
    make_learner(folder).gradients(batch, step=1, policy_ages=[0] * 12)
    assert reached == [own]  # off: untouched
    reached.clear()
    for _ in range(2):
        learner = make_learner(folder, trainer={"shuffle_rewards": True})
        for step in (1, 2):
            learner.gradients(batch, step=step, policy_ages=[0] * 12)
    first, second, first_again, second_again = reached
    assert (first, second) == (first_again, second_again)  # seeded
    assert first != second  # drawn again for every batch
    for rewards in (first, second):
        assert sorted(rewards) == own
        assert rewards != own
        assert any(int(reward) // 4 != place // 4 for place, reward in enumerate(rewards))  # across groups of 4


def test_at_policy_age_0_ess_is_near_1_and_the_gap_near_0(folder: Path) -> None:
    learner = make_learner(folder)
    batch = make_batch(0)
    exact = changed(batch, lambda _, r: replace(r, sampler_logprobs=token_logprobs(learner.model, r)))
    metrics = learner.gradients(exact, step=1, policy_ages=[0] * 12)
    assert metrics["ess"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["logprob_gap_on_policy"] == pytest.approx(0.0, abs=1e-5)
    hot = changed(exact, lambda _, r: replace(r, sampler_logprobs=r.sampler_logprobs * 0.5))
    off = learner.gradients(hot, step=1, policy_ages=[0] * 12)
    assert (off["ess"] or 1.0) < 0.9
    assert (off["logprob_gap_on_policy"] or 0.0) > 0.5


def test_ess_counts_effective_samples() -> None:
    assert ess_ratio(np.zeros(8)) == pytest.approx(1.0)
    assert ess_ratio(np.array([0.0, -1e9, -1e9, -1e9])) == pytest.approx(0.25)
    assert ess_ratio(np.array([900.0, 900.0])) == pytest.approx(1.0)


def test_optimizer_state_of_another_model_is_refused(folder: Path) -> None:
    learner = make_learner(folder)
    with pytest.raises(TbaError, match=r"'exp_avg\.nothing' in the checkpoint belongs to no parameter"):
        learner.optimizer.load_state_tensors({"exp_avg.nothing": torch.zeros(1)})


RNG = np.random.default_rng(0)
EIGHT_BITS = {"engine": "vllm", "vllm": {"quantization": "fp8_per_block"}}


def scored(age: int, log_ratio: float, *, num_tokens: int = 4, abs_gap: float = 1.0) -> ForwardResult:
    rollout = make_rollout(RNG, sampler_logprobs=np.full(num_tokens, -1.0), num_response_tokens=num_tokens)
    logprob = log_ratio - num_tokens
    return ForwardResult(rollout=rollout, policy_age=age, logprob=logprob, ref_logprob=-9.0, abs_gap=abs_gap)


def metrics(items: list[ForwardResult], *, step: int = 1) -> dict[str, float | None]:
    return batch_metrics(items, step=step, success_reward=1.0, policy_temperature=1.0)


def test_the_gap_is_measured_where_the_sampler_drew_from_the_policy_itself() -> None:
    items = [scored(0, 0.0, abs_gap=0.4)]
    assert metrics(items)["logprob_gap_on_policy"] == pytest.approx(0.1)
    task = items[0].rollout.task
    found = batch_metrics(items, step=1, success_reward=1.0, policy_temperature=1.0, tasks_with_minimum=[task])
    assert found["logprob_gap_on_policy"] is None  # there it could not sample end of sequence at first
    # the run went back from 1-44 to 1-40, and version 1-44 made the end of this one: its age is 0 all the same
    spans = (VersionSpan.of(PolicyVersion(1, 40), 0, 2), VersionSpan.of(PolicyVersion(1, 44), 2, 4))
    left = [replace(items[0], rollout=replace(items[0].rollout, version_spans=spans))]
    assert metrics(left, step=41)["logprob_gap_on_policy"] is None
    assert metrics(left, step=45)["logprob_gap_on_policy"] == pytest.approx(0.1)


def test_responses_and_rewards_have_the_metrics_of_every_trainer() -> None:
    def item(num_tokens: int, task: str, reward: float, finish_reason: str, parts: dict[str, float] | None = None):
        result = scored(0, 0.0, num_tokens=num_tokens)
        fields = {"task": task, "reward": reward, "finish_reason": finish_reason, "reward_parts": parts}
        return replace(result, rollout=replace(result.rollout, **fields))

    items = [
        item(4, "sums", 1.0, "stop", {"right": 1.0, "short": 0.0}),
        item(8, "sums", 0.0, "length", {"right": 0.0}),  # the second scorer was not asked
        item(6, "sums", 0.5, "stop_string", {"right": 0.5, "short": 1.0}),
        item(2, "chat", 3.0, "stop"),
    ]
    found = metrics(items)
    assert (found["completions/mean_length"], found["completions/clipped_ratio"]) == (5.0, 0.25)
    assert {name: value for name, value in found.items() if name.startswith("rewards/")} == pytest.approx(
        {
            "rewards/sums/mean": 0.5,
            "rewards/sums/std": 0.5,
            "rewards/sums/right/mean": 0.5,
            "rewards/sums/right/std": 0.5,
            "rewards/sums/short/mean": 0.5,
            "rewards/sums/short/std": np.sqrt(0.5),
            "rewards/chat/mean": 3.0,
            "rewards/chat/std": None,
        }
    )
    many = [item(1, f"task-{number}", 0.0, "stop") for number in range(100)]
    assert sum(name.startswith("rewards/") for name in metrics(many)) == 48


def test_episodes_have_metrics_by_environment() -> None:
    plain, talks = scored(0, 0.0), [conversation(task="sums"), conversation(task="sums"), conversation(task="shop")]
    items = [plain, *(replace(plain, rollout=replace(each, reward=1.0)) for each in talks)]
    found = metrics(items)
    names = ("num_turns", "is_truncated", "decode_len", "environment_len")
    assert [found[f"{name}/sums/mean"] for name in names] == [3.0, 1.0, 9.0, 16.0]
    shares = [found[f"tools/sums/{name}_frequency"] for name in ("call", "ok", "invalid_json")]
    assert shares == [1.0, 1.0, 0.0]  # the reply that is repeated counts once
    assert found["num_turns/shop/mean"] == 3.0
    many = [replace(plain, rollout=conversation(task=f"task-{number}", reward=1.0)) for number in range(40)]
    assert sum(name.startswith("num_turns/") for name in metrics(many)) == 6


def test_the_limit_of_the_gap_is_wide_for_few_tokens_and_rollouts_of_another_start_are_left_out() -> None:
    items = [scored(0, 0.0, abs_gap=0.4), scored(3, 0.0, abs_gap=9.0)]
    given = {"step": 1, "success_reward": 1.0, "policy_temperature": 1.0, "max_gap": 0.5}
    found = batch_metrics(items, **given)
    assert (found["logprob_gap_on_policy"], found["logprob_gap_limit"]) == pytest.approx((0.1, 0.5 + 8 / 4))
    found = batch_metrics(items, **given, has_foreign_start=True)
    assert (found["logprob_gap_on_policy"], found["logprob_gap_limit"]) == (None, None)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, 0.05),
        ({"model": {"dtype": "float16"}}, 0.125),
        ({"model": {"dtype": "bfloat16"}}, 0.5),
        ({"trainer": {"compute_dtype": "bfloat16"}}, 0.5),
        ({"model": {"dtype": "bfloat16"}, "searcher": EIGHT_BITS}, 1.0),
        ({"searcher": {"engine": "simulated"}}, None),
    ],
)
def test_what_rounding_explains_follows_from_the_dtypes(sections: dict[str, Any], expected: float | None) -> None:
    assert gap_limit(make_recipe("m", **{"searcher": {"engine": "embedded"}, **sections})) == expected


def test_norms_and_biases_are_not_decayed(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attention_bias=True)
    optimizer = Optimizer(model, TrainerSection(weight_decay=0.5))
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.apply(learning_rate=0.1)
    changed = {name: float(parameter.detach().flatten()[0]) != 1 for name, parameter in model.named_parameters()}
    assert changed == {name: not ("norm" in name or "bias" in name) for name in changed}
    assert {"model.norm.weight", "model.layers.0.self_attn.q_proj.bias"} <= changed.keys()
    # by name: how they are grouped is no part of a checkpoint
    other = Optimizer(model, TrainerSection())
    other.load_state_tensors(optimizer.state_tensors())
    assert other.state_tensors().keys() == optimizer.state_tensors().keys()


@pytest.mark.parametrize(
    ("age", "name"),
    [(0, "0"), (1, "1_2"), (2, "1_2"), (3, "3_4"), (4, "3_4"), (5, "5_8"), (8, "5_8"), (9, "9_16"), (16, "9_16"),
     (17, "17_32"), (32, "17_32"), (33, "33_up"), (10**9, "33_up")],
)  # fmt: skip
def test_buckets_of_policy_ages(age: int, name: str) -> None:
    assert bucket_name(age) == name
    assert len({bucket_name(first) for first, _ in AGE_BUCKETS}) == 7


def test_each_bucket_is_measured_by_itself_and_only_those_that_occur_are_there() -> None:
    young = [scored(0, 0.0, abs_gap=0.4), scored(0, 0.0, abs_gap=0.4)]
    old = [scored(40, math.log(3.0), abs_gap=2.0), scored(99, 0.0, num_tokens=6, abs_gap=3.0)]
    found = metrics(young + old)
    assert found["ess_age_0"] == pytest.approx(1.0)
    assert found["ess_age_33_up"] == pytest.approx((3 + 1) ** 2 / (2 * (9 + 1)))
    assert found["log_ratio_mean_age_33_up"] == pytest.approx(math.log(3.0) / 2)
    assert found["log_ratio_token_abs_age_0"] == pytest.approx(0.8 / 8)
    assert found["log_ratio_token_abs_age_33_up"] == pytest.approx(5.0 / 10)
    assert (found["num_rollouts_age_0"], found["num_rollouts_age_33_up"]) == (2.0, 2.0)
    assert {name for name in found if "_age_" in name and name.startswith("ess")} == {"ess_age_0", "ess_age_33_up"}
    assert found["log_ratio_token_mean"] == pytest.approx(math.log(3.0) / 18)


def test_one_bucket_that_holds_all_says_what_the_whole_batch_says() -> None:
    found = metrics([scored(7, ratio) for ratio in (0.1, -0.5, 2.0)])
    assert (found["ess_age_5_8"], found["log_ratio_mean_age_5_8"]) == (found["ess"], found["log_ratio_mean"])


def test_what_is_not_finite_is_unknown_and_never_a_number() -> None:
    found = metrics([scored(0, math.nan, abs_gap=math.nan), scored(1, math.inf, abs_gap=math.inf), scored(2, 0.0)])
    for name in ("ess", "ess_age_0", "log_ratio_mean", "log_ratio_token_mean", "kl_to_ref", "logprob_gap_on_policy"):
        assert found[name] is None
    assert all(value is None or math.isfinite(value) for value in found.values())
    assert ess_ratio(np.array([0.0, -math.inf])) is None


def test_without_a_reference_the_kl_to_it_is_unknown() -> None:
    item = scored(0, 0.0)
    without = ForwardResult(rollout=item.rollout, policy_age=0, logprob=-1.0, ref_logprob=None, abs_gap=0.0)
    assert (metrics([without, without])["kl_to_ref"], metrics([item])["kl_to_ref"]) == (None, pytest.approx(5.0))
