"""What the learner keeps beside theta: weights of published versions; and the clip of gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tba_trainer.learner.forward_backward import ALONE
from tba_trainer.learner.learner import OLD_LOGPROBS, OLD_POLICY, Learner
from tba_trainer.learner.old_policy import OldPolicy
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.policy import load_policy
from tba_trainer.model.slices import Layout, TensorSlice, written_slices

from tba.versions import START, PolicyVersion
from tba.wire import Batch, VersionSpan
from tests.support.learner_values import gradient, make_learner, make_state, move, token_logprobs
from tests.support.rollout_values import replace
from tests.support.trainer_values import changed, make_batch, make_recipe, make_rollout

FIRST, SECOND, THIRD = PolicyVersion(1, 2), PolicyVersion(1, 4), PolicyVersion(1, 6)


def old_policy_of(learner: Learner, *, max_versions: int = 8) -> OldPolicy:
    policy, sizes = LogprobModel(learner.model, temperature=1.0), {"max_cached": 100, "micro_batch_tokens": 4096}
    return OldPolicy(learner.model, policy, max_versions=max_versions, **sizes, ranks=ALONE)


def test_every_token_has_the_log_prob_of_the_weights_that_sampled_it(folder: Path) -> None:
    learner, rng = make_learner(folder), np.random.default_rng(0)
    old = old_policy_of(learner)
    one = make_rollout(rng, version=FIRST)
    # the weights changed in the middle of this response
    spans = (VersionSpan.of(FIRST, 0, 3), VersionSpan.of(SECOND, 3, 7))
    two = replace(make_rollout(rng), version_spans=spans)
    old.remember(FIRST)
    first = [token_logprobs(learner.model, rollout) for rollout in (one, two)]
    move(learner)
    old.remember(SECOND)
    second = token_logprobs(learner.model, two)
    move(learner, seed=2)
    theta = [parameter.detach().clone() for parameter in learner.model.parameters()]
    found = old.logprobs([one, two, one])
    np.testing.assert_allclose(found[0], first[0], atol=1e-5)
    np.testing.assert_allclose(found[1], [*first[1][:3], *second[3:]], atol=1e-5)
    np.testing.assert_array_equal(found[2], found[0])
    assert old.num_missing_tokens == 0
    assert all(torch.equal(a, b) for a, b in zip(theta, learner.model.parameters(), strict=True))


def test_without_the_version_tokens_keep_the_samplers_log_probs_and_are_counted(folder: Path) -> None:
    learner, rng = make_learner(folder), np.random.default_rng(0)
    old = old_policy_of(learner, max_versions=2)
    for version in (FIRST, SECOND, THIRD):
        old.remember(version)
    gone, here = make_rollout(rng, version=FIRST), make_rollout(rng, version=SECOND)
    found = old.logprobs([gone, here])
    np.testing.assert_array_equal(found[0], gone.sampler_logprobs)
    assert not np.allclose(found[1], here.sampler_logprobs)
    assert old.num_missing_tokens == len(gone.response_tokens)
    old.logprobs([gone])  # known by its id: nothing new
    assert old.num_missing_tokens == 0


def test_another_name_of_the_same_weights_is_no_second_copy(folder: Path) -> None:
    """A resume publishes the checkpoint's weights under its own lineage: that must not drop an older version."""
    learner, rng = make_learner(folder), np.random.default_rng(0)
    old = old_policy_of(learner, max_versions=2)
    old.remember(FIRST)
    move(learner)
    old.remember(SECOND)
    old.remember(PolicyVersion(2, 4), same_as=SECOND)
    versions = (FIRST, SECOND, PolicyVersion(2, 4))
    rollouts = [make_rollout(rng, version=version) for version in versions]
    found = old.logprobs(rollouts)
    assert old.num_missing_tokens == 0
    again = old_policy_of(make_learner(folder), max_versions=2)
    again.load(dict(written_slices(old.tensors(), Layout())))
    more = [make_rollout(rng, version=version) for version in versions]
    for mine, theirs in zip(again.logprobs(more), old.logprobs(more), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert again.num_missing_tokens == 0
    assert all(len(values) == len(rollout.response_tokens) for values, rollout in zip(found, rollouts, strict=True))


def test_the_ratio_is_taken_to_the_log_probs_that_were_computed_again(folder: Path) -> None:
    """Whatever the sampler reported: with the old policy `trainer` it does not matter."""
    batch, objective = make_batch(0), {"preset": "tba_prime_published", "beta": 0.3}
    other = changed(batch, lambda row, r: replace(r, sampler_logprobs=r.sampler_logprobs - 0.5 * (row < 4)))
    found = [gradient(move(make_learner(folder, objective=objective)), each) for each in (batch, other)]
    torch.testing.assert_close(found[0], found[1])
    assert found[0].norm() > 0


def test_a_checkpoint_keeps_the_weights_of_published_versions_and_their_log_probs(folder: Path) -> None:
    sections = {"objective": {"preset": "tba_prime_published", "beta": 0.3}}
    learner = move(make_learner(folder, **sections))
    learner.remember(FIRST)
    batch = make_batch(0)
    expected = gradient(learner, batch)
    kept: dict[str, dict[str, TensorSlice]] = {}
    for section, name, rows in learner.capture():
        kept.setdefault(section, {})[name] = rows
    assert {OLD_POLICY, OLD_LOGPROBS} <= kept.keys()
    assert {name.partition("/")[0] for name in kept[OLD_POLICY]} == {str(START), str(FIRST)}
    resumed = make_learner(folder, **sections)
    resumed.restore(make_state(str(FIRST), learner), kept)
    assert torch.equal(gradient(resumed, batch), expected)
    later = replace(make_rollout(np.random.default_rng(5)), version_spans=(VersionSpan.of(FIRST, 0, 7),))
    ours, theirs = (cast(OldPolicy, each._old_policy) for each in (resumed, learner))
    np.testing.assert_array_equal(ours.logprobs([later])[0], theirs.logprobs([later])[0])


def clip(folder: Path, usual: float | None, **trainer: float | None) -> dict[str, float | None]:
    learner = make_learner(folder, trainer=dict(trainer))
    metrics = learner.gradients(make_batch(0), step=1, policy_ages=[0] * 12, usual_grad_norm=usual)
    norm = torch.stack([p.grad.norm() for p in learner.model.parameters()]).norm()
    return {**{name: metrics[name] for name in ("grad_norm", "grad_clipped", "grad_norm_limit")}, "after": float(norm)}


def test_the_clip_is_absolute_or_relative_to_the_usual_norm_or_none(folder: Path) -> None:
    free = clip(folder, None)
    norm = free["grad_norm"]
    assert norm is not None
    assert norm > 0.1
    assert free == {"grad_norm": norm, "grad_clipped": 0.0, "grad_norm_limit": None, "after": pytest.approx(norm)}
    absolute = clip(folder, 1e9, max_grad_norm=norm / 4)
    assert (absolute["grad_clipped"], absolute["after"]) == (1.0, pytest.approx(norm / 4, rel=1e-4))
    spike = clip(folder, norm / 8)
    assert (spike["grad_clipped"], spike["after"]) == (1.0, pytest.approx(norm / 4, rel=1e-4))
    usual = clip(folder, norm)
    assert (usual["grad_clipped"], usual["after"]) == (0.0, pytest.approx(norm, rel=1e-4))


@pytest.mark.parametrize("preset", ["tb", "dapo", "grpo"])
def test_a_truncated_rollout_counts_in_its_group_and_teaches_nothing(folder: Path, preset: str) -> None:
    def with_first(**fields: Any) -> Batch:
        return changed(masked, lambda row, r: replace(r, **fields) if row == 0 else r)

    masked = make_batch(0)
    masked = with_first(finish_reason="length")
    objective = {"preset": preset, "mask_truncated": True}
    found = gradient(move(make_learner(folder, objective=objective)), masked)
    # what it says does not matter, what it got does
    if preset != "tb":  # there its log-ratio is in the group mean
        said = with_first(response_tokens=(masked.rollouts[0].response_tokens + 1) % 33)
        torch.testing.assert_close(gradient(move(make_learner(folder, objective=objective)), said), found)
    got = with_first(reward=9.0)
    assert not torch.allclose(gradient(move(make_learner(folder, objective=objective)), got), found)
    plain = gradient(move(make_learner(folder, objective={"preset": preset})), masked)
    assert not torch.allclose(plain, found)


def test_shares_and_divisors_leave_masked_rollouts_out(folder: Path) -> None:
    """As if they were not in the batch, but for the baseline of their group."""
    batch = changed(make_batch(0), lambda row, r: replace(r, finish_reason="length" if row >= 8 else "stop"))
    for aggregation in ("rollouts", "groups", "tokens", "sequence_mean"):
        objective = {"preset": "cispo", "aggregation": aggregation, "importance_clamp": 1.1, "mask_truncated": True}
        learners = [move(make_learner(folder, objective=objective)) for _ in range(2)]
        masked = learners[0].gradients(batch, step=1, policy_ages=[0] * 12)
        without = learners[1].gradients(replace(batch, groups=batch.groups[:2]), step=1, policy_ages=[0] * 8)
        for name in ("loss", "grad_norm", "clipped_share", "clipped_high_share", "advantage_abs_mean"):
            assert masked[name] == pytest.approx(without[name], rel=1e-4), (aggregation, name)
        assert 0 < (masked["clipped_share"] or 0) < 1


def test_a_batch_of_truncated_rollouts_alone_gives_no_gradient(folder: Path) -> None:
    batch = changed(make_batch(0), lambda _, r: replace(r, finish_reason="length"))
    learner = move(make_learner(folder, objective={"preset": "tb", "mask_truncated": True}))
    assert gradient(learner, batch).abs().max() == 0.0


def test_the_entropy_is_that_of_theta(folder: Path) -> None:
    learner, rng = make_learner(folder, model={"policy_temperature": 0.7}), np.random.default_rng(0)
    rollout = make_rollout(rng)
    batch = make_batch(0, num_groups=1, group_size=2)
    group = replace(batch.groups[0], rollouts=(rollout, replace(rollout, rollout_id=rng.bytes(16), reward=0.0)))
    metrics = learner.gradients(replace(batch, groups=(group,)), step=1, policy_ages=[0, 0])
    ids = torch.from_numpy(np.concatenate([rollout.prompt_tokens, rollout.response_tokens])).long()[None]
    model = load_policy(make_recipe(folder).model, device="cpu", gradient_checkpointing=False)
    with torch.no_grad():
        logits = model(ids).logits[0, len(rollout.prompt_tokens) - 1 : -1] / 0.7
    expected = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert metrics["entropy"] == pytest.approx(float(expected), rel=1e-4)
