"""The filters that choose the rollouts of a batch to train on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tba_trainer.loop.batches import Requirements, batch_counts, count_reasons, filter_batch

from tba.versions import START, LineageTree, PolicyVersion
from tba.wire import Batch, Group, RefLogprob, Refusal, Rollout, VersionSpan
from tests.support.rollout_values import replace
from tests.support.trainer_values import VOCAB_SIZE, make_batch, make_recipe, make_rollout
from tests.support.wire_values import conversation

NEEDS = Requirements(vocab_size=VOCAB_SIZE, max_tokens=64, ref_logprobs=False, min_group=2)
TREE = LineageTree({1: START, 2: PolicyVersion(1, 40)})
TRAINER = PolicyVersion(2, 50)


def filtered(batch: Batch, needs: Requirements = NEEDS) -> Batch:
    return filter_batch(batch, needs, lineages=TREE, trainer=TRAINER)


def with_first(change: dict[str, object]) -> Batch:
    batch = make_batch(0)
    first = batch.groups[0]
    changed = replace(first, rollouts=(replace(first.rollouts[0], **change), *first.rollouts[1:]))
    return replace(batch, groups=(changed, *batch.groups[1:]))


def spans(*versions: tuple[int, int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan.of(PolicyVersion(*v), i, i + 1) for i, v in enumerate(versions))


REFUSALS = [
    ({"reward": None, "reward_status": "pending"}, "no-reward", "its reward is None (status 'pending')"),
    ({"reward": 1e308}, "reward-size", "its reward is 1e+308, beyond +-1e+09: scale the reward"),
    ({"reward": -1e308}, "reward-size", "its reward is -1e+308"),
    ({"prompt_id": "another"}, "prompt", "it names prompt 'another'"),
    ({"response_tokens": np.array([5, VOCAB_SIZE])}, "vocabulary", f"token id {VOCAB_SIZE} is outside"),
    ({"prompt_tokens": np.array([10**6])}, "vocabulary", "token id 1000000 is outside the model's vocabulary of 33"),
    ({"response_tokens": np.full(64, 5)}, "too-long", "67 tokens in one sequence, model and recipe allow 64"),
    ({"sampler_logprobs": np.array([-0.5, -1e30])}, "sampler-logprob", "no sampler draws such a token"),
    ({"version_spans": spans((2, 51))}, "future-version", "version 2-51 comes after the trainer's own, 2-50"),
    ({"version_spans": spans((2, 49), (2, 51))}, "future-version", "version 2-51"),
    ({"version_spans": spans((3, 1))}, "unknown-version", "no trainer start of this run made version 3-1"),
    ({"version_spans": spans((0, 1))}, "unknown-version", "version 0-1"),
    ({"version_spans": spans((2, 39))}, "unknown-version", "version 2-39"),
]


@pytest.mark.parametrize(("change", "reason", "sentence"), REFUSALS)
def test_a_bad_rollout_is_refused_and_costs_only_itself(change: dict[str, object], reason: str, sentence: str) -> None:
    batch = with_first(change)
    found = filtered(batch)
    (bad, *others), *groups = (group.rollouts for group in batch.groups)
    assert [group.rollouts for group in found.groups] == [tuple(others), *groups]
    [refused] = found.refused
    assert refused.reason == reason
    assert refused.detail.startswith(f"rollout {bad.rollout_id.hex()} of prompt {batch.groups[0].prompt_id!r}: ")
    assert sentence in refused.detail


def test_rollouts_of_another_environment_are_not_compared() -> None:
    """Nor those of another version of it, nor those of one turn with episodes; the first good one decides."""
    batch = make_batch(0, num_groups=1)
    first, *others = batch.groups[0].rollouts
    kinds = [("game", "1"), ("game", "1"), ("game", "2")]
    episodes = [replace(conversation().episode, environment=name, environment_version=v) for name, v in kinds]
    mixed = [replace(each, episode=episode) for each, episode in zip(others, episodes, strict=True)]
    bad = replace(first, reward=None, reward_status="pending")
    group = replace(batch.groups[0], rollouts=(bad, *mixed))
    found = filtered(replace(batch, groups=(group,)))
    assert [each.rollouts for each in found.groups] == [tuple(mixed[:2])]
    assert [refused.reason for refused in found.refused] == ["no-reward", "environment"]


@pytest.mark.parametrize("version", [(0, 0), (1, 40), (1, 55), (2, 40), (2, 50)])
def test_versions_that_may_be_are_taken_also_those_of_a_lineage_that_died_later(version: tuple[int, int]) -> None:
    batch = with_first({"version_spans": spans(version)})
    assert filtered(batch) == batch


def test_ref_logprobs_are_needed_where_only_searchers_compute_them() -> None:
    needs, batch = replace(NEEDS, ref_logprobs=True), make_batch(0)

    def with_ref(value: RefLogprob | None) -> Batch:
        rollouts = ([replace(r, ref_logprob=value) for r in group.rollouts] for group in batch.groups)
        groups = (replace(g, rollouts=tuple(of_it)) for g, of_it in zip(batch.groups, rollouts, strict=True))
        return filtered(replace(batch, groups=tuple(groups)), needs)

    for value in (None, RefLogprob.of(-3.0, PolicyVersion(1, 40))):
        found = with_ref(value)
        assert (found.groups, count_reasons(found.refused)) == ((), {"ref-logprob": 12})
    assert with_ref(RefLogprob.of(-3.0, START)).refused == ()


def test_what_is_left_of_a_group_alone_goes_too_where_rollouts_are_compared() -> None:
    rng = np.random.default_rng(0)
    rollouts = tuple(make_rollout(rng, prompt_id="p", reward=reward) for reward in (None, None, 1.0))
    batch = replace(make_batch(0), groups=(Group(prompt_id="p", source="recent", fallback=False, rollouts=rollouts),))
    found = filtered(batch)
    assert (found.groups, count_reasons(found.refused)) == ((), {"group-of-one": 1, "no-reward": 2})
    alone = filtered(batch, replace(NEEDS, min_group=1))
    assert alone.rollouts == [rollouts[2]]
    # another slot of the same prompt is another group, and no company
    twice = replace(batch, groups=(*batch.groups, replace(batch.groups[0], rollouts=(rollouts[2],))))
    assert filtered(twice).groups == ()


def test_what_decoding_refused_stays_refused() -> None:
    before = Refusal(reason="malformed", detail="rollout: field 'run' is missing")
    found = filtered(replace(with_first({"reward": None}), refused=(before,)))
    assert (found.refused[0], count_reasons(found.refused)) == (before, {"malformed": 1, "no-reward": 1})


def test_what_is_needed_follows_from_the_model_and_the_objective(folder: Path, model: Any) -> None:
    def needs(sections: dict[str, dict[str, object]] | None = None, **objective: object) -> Requirements:
        return Requirements.of(make_recipe(folder, objective=objective, **(sections or {})), model)

    assert needs() == Requirements(vocab_size=VOCAB_SIZE, max_tokens=64 + 64, ref_logprobs=False, min_group=2)
    assert needs({"searcher": {"max_prompt_tokens": 8, "max_response_tokens": 5}}).max_tokens == 13
    assert needs({"searcher": {"max_response_tokens": 1000}}).max_tokens == 512  # the model's own
    # a snapshot was made with the limits of another recipe
    assert needs({"run": {"name": "demo", "snapshot": "other/saved"}}).max_tokens == 512
    assert needs(reference_placement="searcher").ref_logprobs
    assert not needs(preset="reinforce", beta=0.0).ref_logprobs
    assert needs(preset="reinforce", beta=0.0).min_group == 1
    assert needs(preset="grpo").min_group == 2


@given(
    st.lists(st.lists(st.sampled_from([None, *range(len(REFUSALS))]), min_size=1, max_size=4), min_size=1, max_size=4)
)
def test_every_rollout_is_either_trained_on_or_refused(kinds: list[list[int | None]]) -> None:
    rng = np.random.default_rng(0)
    groups = []
    for number, members in enumerate(kinds):
        rollouts: list[Rollout] = []
        for kind in members:
            rollout = make_rollout(rng, prompt_id=f"p-{number}")
            rollouts.append(rollout if kind is None else replace(rollout, **REFUSALS[kind][0]))
        groups.append(Group(prompt_id=f"p-{number}", source="replay", fallback=True, rollouts=tuple(rollouts)))
    found = filtered(replace(make_batch(0), groups=tuple(groups)))
    good = {f"p-{n}": members.count(None) for n, members in enumerate(kinds)}
    assert Counter(r.prompt_id for r in found.rollouts) == {p: n for p, n in good.items() if n >= 2}
    assert len(found.rollouts) + len(found.refused) == sum(map(len, kinds))
    assert all(group.rollouts for group in found.groups)


def test_a_batch_says_which_slots_fell_back_and_which_scores_failed() -> None:
    batch = make_batch(0)
    first, *others = batch.groups
    failed = {"timeout": 5, "Wrong: words": 2} | {f"reason-{number}": 1 for number in range(10)}
    batch = replace(batch, groups=(replace(first, fallback=True), *others), scores_failed=failed)
    found = batch_counts(batch)
    assert found.pop("fallback_share") == 1 / len(batch.groups)
    assert found.pop("scores_failed/timeout") == 5
    assert found.pop("scores_failed/other") == 2 + 3  # no name of a metric; beyond the eight commonest
    assert found == {f"scores_failed/reason-{number}": 1 for number in range(7)}
