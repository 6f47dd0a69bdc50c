"""What a step made of each rollout: A_j and the mean weight of its tokens, as the loss used them.

They are compared with the gradient of the loss with respect to every token's log-prob, which is -A_j w_jt / divisor.
test_trainer_forward_backward.py compares them over ranks.
"""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tba_trainer.learner import forward_backward
from tba_trainer.learner.forward_backward import ForwardBackward, ForwardResult
from tba_trainer.loop.step_record import BYTES_PER_TRAINED, MAX_TRAINED, trained_rollouts
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.objectives import resolve

from tba.config import ObjectiveSection
from tba.config.objective import PRESETS
from tba.fields import MAX_NUMBER
from tba.wire import Batch, Rollout
from tests.support.rollout_values import replace
from tests.support.trainer_values import changed, make_batch, make_rollout

OWN = "tests.support.objective_values:weighted_loss"
REWARDS = np.array([1.0, 0.25, 0.5, 0.0] + [0.5] * 4 + [0.0, 1.0, 1.0, 0.0])
"""The second of three groups is tied."""


class Watched(LogprobModel):
    """Keeps the log-probs of all passes with a gradient."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, temperature=1.0)
        self.passes: list[torch.Tensor] = []

    def logprobs_and_entropy(self, sequences: Any) -> Any:
        logprobs, entropy = super().logprobs_and_entropy(sequences)
        logprobs.retain_grad()
        self.passes.append(logprobs)
        return logprobs, entropy


def run(
    model: Any, batch: Batch, max_tokens: int, values: dict[str, Any]
) -> tuple[list[ForwardResult], list[float | None]]:
    """What is reported, and minus the sum of the gradients of each rollout's tokens; None: no pass was made."""
    policy = Watched(copy.deepcopy(model).double())
    # every divisor is then the number of kept rollouts
    aggregation = {} if values["preset"] == OWN else {"aggregation": "rollouts"}
    section = {"beta": {"value": 0.2}, **aggregation, **values}
    objective = resolve(ObjectiveSection.model_validate(section), max_response_tokens=32)
    rng = np.random.default_rng(0)
    old = {r.rollout_id: r.sampler_logprobs + 0.3 * rng.normal(size=len(r.response_tokens)) for r in batch.rollouts}
    ref = {r.rollout_id: -2 * rng.random(len(r.response_tokens)) for r in batch.rollouts}
    recomputes = objective.parts.old_policy == "trainer"
    work = ForwardBackward(
        policy,
        objective,
        batch.rollouts,
        groups=batch.group_numbers,
        rewards=REWARDS,
        reference=lambda rollouts: [ref[r.rollout_id] for r in rollouts],
        old_policy=lambda rollouts: [old[r.rollout_id] for r in rollouts] if recomputes else None,
        policy_ages=[0, 3, 40] * 4,
        beta=section["beta"]["value"],
        micro_batch_tokens=max_tokens,
    )
    work.backward()
    pulls: list[float | None] = [None] * len(batch.rollouts)
    for rows, logprobs in zip(work._micro_batches, policy.passes, strict=True):
        assert logprobs.grad is not None
        at = 0
        for row in rows:
            end = at + len(batch.rollouts[row].response_tokens)
            pulls[row] = -float(logprobs.grad[at:end].sum())
            at = end
    return work.results(), pulls


def near(batch: Batch) -> Batch:
    """The same batch, by a sampler so near to the tiny model that weights differ from 0."""
    rng = np.random.default_rng(1)

    def sampled(r: Rollout) -> np.ndarray:
        return (-3.5 + 0.4 * rng.normal(size=len(r.response_tokens))).astype(np.float32)

    return changed(batch, lambda _, r: replace(r, sampler_logprobs=sampled(r)))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("max_tokens", [4096, 60, 1])
def test_they_are_what_the_gradient_was_made_of(model: Any, preset: str, max_tokens: int) -> None:
    batch = near(make_batch(0))
    results, pulls = run(model, batch, max_tokens, {"preset": preset})
    num_moved = 0
    for result, pull in zip(results, pulls, strict=True):
        num_tokens = len(result.rollout.response_tokens)
        assert result.advantage is not None
        assert (result.weight is None) == (pull is None)
        if pull is not None:
            assert result.weight is not None
            expected = result.advantage * result.weight * num_tokens / len(results)
            assert pull == pytest.approx(expected, rel=1e-9, abs=1e-15)
            num_moved += pull != 0
    assert num_moved >= 2
    if PRESETS[preset].importance_weight == "none":
        assert {result.weight for result in results} <= {1.0, None}
    else:
        assert len({result.weight for result in results}) > 2


def test_without_a_pass_the_advantage_is_known_all_the_same(model: Any) -> None:
    """Of a tied group, and of rollouts that are masked."""
    batch = near(changed(make_batch(0), lambda row, r: r if row else replace(r, finish_reason="length")))
    values = {"preset": "dr_grpo_clamp", "beta": {"value": 0.0}, "mask_truncated": True}
    results, pulls = run(model, batch, 60, values)
    expected = REWARDS - REWARDS.reshape(3, 4).mean(axis=1).repeat(4)
    assert [result.advantage for result in results] == pytest.approx(expected.tolist(), abs=1e-15)
    assert [result.weight is None for result in results] == [True, False, False, False] + [True] * 4 + [False] * 4
    assert [pull is None for pull in pulls] == [result.weight is None for result in results]
    # with a KL there is a pass for it, in which its tokens have no weight
    results, pulls = run(model, batch, 60, {**values, "beta": {"value": 0.1}})
    assert (results[0].weight, pulls[0]) == (0.0, 0.0)
    assert results[0].advantage
    assert all(result.weight for result in results[1:])


@pytest.mark.parametrize("preset", [*(name for name in PRESETS if name != "reinforce"), OWN])
@pytest.mark.parametrize("max_tokens", [4096, 60])
def test_masked_groups_pull_nothing(model: Any, preset: str, max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, values = near(make_batch(0)), {"preset": preset}
    # m2po chooses the tokens that it masks among those that teach: here it masks none
    monkeypatch.setattr(forward_backward, "second_moment_cut", lambda squares: math.inf)
    _, unmasked = run(model, batch, max_tokens, values)
    results, pulls = run(model, batch, max_tokens, {**values, "mask_tied": True})
    others = [*range(4), *range(8, 12)]
    assert [pulls[i] or 0.0 for i in range(4, 8)] == [0.0] * 4
    assert [pulls[i] for i in others] == pytest.approx([unmasked[i] for i in others], rel=1e-5, abs=1e-12)
    assert any(pulls[i] for i in others)
    # who reads the log-probs of other groups still has them
    reads_all = preset in ("m2po", "ppo_clip", OWN)
    assert [results[i].logprob is not None for i in range(4, 8)] == [reads_all] * 4


def test_an_objective_from_outside_has_neither(model: Any) -> None:
    results, _ = run(model, make_batch(0), 60, {"preset": OWN})
    assert {(result.advantage, result.weight) for result in results} == {(None, None)}
    assert all(result.logprob is not None for result in results)


def result(advantage: float | None, weight: float | None) -> ForwardResult:
    unknown: dict[str, Any] = {"policy_age": 0, "logprob": None, "ref_logprob": None, "abs_gap": 0.0}
    return ForwardResult(rollout=make_rollout(np.random.default_rng(0)), advantage=advantage, weight=weight, **unknown)


def test_numbers_are_rounded_and_what_is_not_finite_is_unknown() -> None:
    pairs = (1.23456789, 0.0000123456789), (math.nan, math.inf), (-math.inf, None), (-98765432.1, 10.0 * MAX_NUMBER)
    results = [result(advantage, weight) for advantage, weight in pairs]
    found = trained_rollouts(results, max_bytes=10**6)
    assert found is not None
    assert (found.advantages, found.weights) == ([1.23457, None, None, -98765400.0], [1.23457e-05, None, None, None])
    assert found.rollout_ids == [results[0].rollout.rollout_id.hex()] * 4


def test_a_batch_that_takes_too_much_room_is_not_reported() -> None:
    one = result(-1.23456e-100, 1.23456e100)
    assert trained_rollouts([], max_bytes=10**9) is None
    assert trained_rollouts([one] * 3, max_bytes=2 * BYTES_PER_TRAINED) is None
    found = trained_rollouts([one] * MAX_TRAINED, max_bytes=10**9)
    assert found is not None
    assert len(found.model_dump_json()) < BYTES_PER_TRAINED * MAX_TRAINED
    assert trained_rollouts([SimpleNamespace()] * (MAX_TRAINED + 1), max_bytes=10**9) is None  # pyright: ignore
