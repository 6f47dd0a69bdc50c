"""The sources of ref log-probs, the moment of their computation, and changes of the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tba_trainer.learner.learner import Learner
from tba_trainer.learner.reference import CarriedReference, ModelReference

from tba.errors import ConfigError, MalformedError
from tba.versions import START, PolicyVersion
from tba.wire import Batch, RefLogprob
from tests.support.learner_values import make_learner, move, token_logprobs
from tests.support.rollout_values import replace
from tests.support.trainer_values import changed, make_batch, make_rollout


def model_reference(learner: Learner) -> ModelReference:
    assert isinstance(learner.reference, ModelReference)
    return learner.reference


def carrying(batch: Batch, values: list[float], version: PolicyVersion = START) -> Batch:
    return changed(batch, lambda row, r: replace(r, ref_logprob=RefLogprob.of(values[row], version)))


def test_a_ref_log_prob_that_a_rollout_carries_counts_only_for_its_version(folder: Path) -> None:
    rng = np.random.default_rng(0)
    current = make_rollout(rng, ref_logprob=RefLogprob.of(-7.5, START))
    stale = make_rollout(rng, ref_logprob=RefLogprob.of(-7.5, PolicyVersion(1, 50)))
    reference = model_reference(make_learner(folder))
    values = reference.logprobs([current, stale])
    assert values[0] == -7.5
    assert values[1] != -7.5
    assert reference.num_computed == 1


def test_ref_log_probs_are_computed_once_until_a_reset(folder: Path) -> None:
    batch = make_batch(0)
    learner = make_learner(folder, objective={"preset": "tba_prime", "reference_reset_steps": 50})
    reference = model_reference(learner)
    before = reference.logprobs(batch.rollouts)
    assert (reference.logprobs(batch.rollouts), reference.num_computed) == (before, 12)
    move(learner)
    reference.after_step(PolicyVersion(1, 50))
    after = reference.logprobs(batch.rollouts)
    assert (reference.num_computed, reference.version) == (24, PolicyVersion(1, 50))
    assert after[0] == pytest.approx(token_logprobs(learner.model, batch.rollouts[0]).sum(), abs=1e-4)
    assert after[0] != pytest.approx(before[0], abs=1e-3)


def test_the_cache_is_bounded_and_keeps_what_was_used_last(folder: Path) -> None:
    rng = np.random.default_rng(0)
    rollouts = [make_rollout(rng) for _ in range(4)]
    bounds = {"buffer": {"max_rollouts": 2}, "sampling": {"min_size_to_sample": 2}}
    reference = model_reference(make_learner(folder, **bounds))
    reference.logprobs(rollouts[:2])
    reference.logprobs([rollouts[0]])
    reference.logprobs([rollouts[2]])
    reference.logprobs([rollouts[0]])
    assert reference.num_computed == 3
    reference.logprobs([rollouts[1]])
    assert (reference.num_computed, len(reference.cache.tensors()["ref_logprobs"])) == (4, 2)


@pytest.mark.parametrize(
    ("objective", "version"),
    [
        ({"preset": "tb"}, START),
        ({"preset": "tba_prime", "reference_reset_steps": 2}, PolicyVersion(4, 4)),
        ({"preset": "kimi"}, START),
    ],
)
def test_the_reference_changes_on_schedule(folder: Path, objective: dict[str, Any], version: PolicyVersion) -> None:
    learner = make_learner(folder, objective=objective)
    for step in (1, 2, 3, 4):
        learner.gradients(make_batch(step), step=step, policy_ages=[0] * 12)
        learner.apply(step=step, lineage=4)
    assert learner.reference.version == version


@pytest.mark.parametrize("objective", [{"preset": "kimi"}, {"preset": "grpo"}, {"preset": "tb_behaviour"}])
def test_without_a_reference_no_copy(folder: Path, objective: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: Any) -> Any:
        raise AssertionError("a reference model was built")

    monkeypatch.setattr("tba_trainer.learner.reference.frozen_copy", refuse)
    learner = make_learner(folder, objective=objective)
    metrics = learner.gradients(make_batch(0), step=1, policy_ages=[3] * 12)
    assert metrics["kl_to_ref"] is None
    assert metrics["grad_norm"]
    assert list(learner.reference.tensors()) == []
    with pytest.raises(AssertionError, match="a reference model was built"):
        make_learner(folder, objective={"preset": "tb"})


def test_placed_at_the_searcher_the_gradient_is_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(0)
    here = make_learner(folder)
    move(here)
    expected = here.gradients(batch, step=1, policy_ages=[0] * 12)
    values = here.reference.logprobs(batch.rollouts)
    assert values is not None
    monkeypatch.setattr("tba_trainer.learner.reference.frozen_copy", None)  # no copy is made
    there = make_learner(folder, objective={"preset": "tb", "reference_placement": "searcher"})
    move(there)
    found = there.gradients(carrying(batch, [float(each.sum()) for each in values]), step=1, policy_ages=[0] * 12)
    assert found == expected
    assert found["kl_to_ref"] is not None


def test_placed_at_the_searcher_any_other_reference_than_the_start_is_refused(folder: Path) -> None:
    reference = make_learner(folder, objective={"preset": "tb", "reference_placement": "searcher"}).reference
    assert isinstance(reference, CarriedReference)
    for batch in (make_batch(0), carrying(make_batch(0), [-1.0] * 12, PolicyVersion(1, 3))):
        with pytest.raises(MalformedError, match=r"carries no ref log-prob of the starting model"):
            reference.logprobs(batch.rollouts)
    with pytest.raises(ConfigError, match=r"the checkpoint's reference is version 1-50, .* set it back"):
        reference.load({}, PolicyVersion(1, 50))
