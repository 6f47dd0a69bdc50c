"""The gradient of a batch is the same however it is cut into micro-batches and dealt out to ranks, per objective."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tba_trainer.distributed.leader import encode_drawn_batch
from tba_trainer.learner.batch_metrics import batch_metrics
from tba_trainer.learner.forward_backward import (
    ALONE,
    ForwardBackward,
    ForwardResult,
    Logprobs,
    Plan,
    Ranks,
    plan_micro_batches,
    split_rounds,
)
from tba_trainer.model.context import Context, set_context
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.objectives import Objective, resolve

from tba.config import ObjectiveSection
from tba.config.objective import FAMILY, PRESETS
from tba.wire import Batch, decode_batch
from tests.support.rollout_values import replace
from tests.support.trainer_values import changed, make_batch

OWN = "tests.support.objective_values:weighted_loss"
BETA = 0.3
AGES = [0, 3, 40] * 4
RANK_WAIT_S = 60.0


def section(preset: str, **values: Any) -> ObjectiveSection:
    """Baselines with a KL too: then everything that may depend on theta does."""
    return ObjectiveSection.model_validate({"preset": preset, "beta": {"value": BETA}, **values})


def known_of(batch: Batch, objective: Objective, rng: np.random.Generator) -> dict[str, Logprobs]:
    """What the reference and the old policy say of the rollouts; they are asked for no other."""
    own = {id(r): -2 * rng.random(len(r.response_tokens)) for r in batch.rollouts}
    old = {id(r): r.sampler_logprobs + 0.1 * rng.random(len(r.response_tokens)) for r in batch.rollouts}
    recomputes = objective.parts.old_policy == "trainer"
    return {
        "reference": lambda rollouts: [own[id(r)] for r in rollouts],
        "old_policy": lambda rollouts: [old[id(r)] for r in rollouts] if recomputes else None,
    }


Result = tuple[torch.Tensor, dict[str, float | None], list[ForwardResult], int, int]
"""Gradient, metrics, what is known per rollout, forward passes, sequences in them."""


def run(
    model: Any, objective: ObjectiveSection, batch: Batch, max_tokens: int, context: Context | None = None, **given: Any
) -> Result:
    num_passes = num_sequences = 0

    class Counting(LogprobModel):
        def _token_logprobs(self, sequences: Any, with_entropy: bool) -> Any:
            nonlocal num_passes, num_sequences
            num_passes, num_sequences = num_passes + 1, num_sequences + sequences.num_rows
            return super()._token_logprobs(sequences, with_entropy)

    model = copy.deepcopy(model)
    set_context(model, context)
    rng, resolved = np.random.default_rng(0), resolve(objective, max_response_tokens=32)
    rewards = rng.random(len(batch.rollouts))
    known = given.pop("known", None) or known_of(batch, resolved, rng)
    usual = {"rewards": rewards, "policy_ages": AGES[: len(rewards)], "beta": BETA, "groups": batch.group_numbers}
    given = {"micro_batch_tokens": max_tokens, "ranks": ALONE, **usual, **known, **given}
    work = ForwardBackward(Counting(model, temperature=1.0), resolved, batch.rollouts, **given)
    metrics = work.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    return gradient, metrics, work.results(), num_passes, num_sequences


def run_ranks(
    model: Any, objective: ObjectiveSection, batch: Batch, max_tokens: int, num_ranks: int, **given: Any
) -> list[Result]:
    barrier = threading.Barrier(num_ranks, timeout=RANK_WAIT_S)
    parts: list[torch.Tensor] = [torch.empty(0)] * num_ranks

    def adder(rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def all_reduce(values: torch.Tensor) -> torch.Tensor:
            assert values.dtype == torch.float64
            parts[rank] = values.clone()
            barrier.wait()
            total = torch.stack(parts).sum(dim=0)
            barrier.wait()
            return total

        return all_reduce

    def work(rank: int) -> Result:
        ranks = Ranks(rank=rank, num_ranks=num_ranks, all_reduce=adder(rank))
        return run(model, objective, batch, max_tokens, ranks=ranks, **given)

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(work, range(num_ranks)))


def assert_same(found: Result, expected: Result) -> None:
    torch.testing.assert_close(found[0], expected[0], atol=2e-6, rtol=2e-4)
    assert found[1] == pytest.approx(expected[1], rel=1e-4, abs=1e-6)
    for one, other in zip(found[2], expected[2], strict=True):
        assert one.rollout is other.rollout
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.abs_gap == pytest.approx(other.abs_gap, abs=1e-4)
        for name in ("advantage", "weight"):
            value = getattr(other, name)
            assert getattr(one, name) == (None if value is None else pytest.approx(value, rel=1e-4, abs=1e-5)), name


@pytest.mark.parametrize("preset", [*PRESETS, OWN])
def test_the_gradient_does_not_depend_on_micro_batches_or_ranks(model: Any, preset: str) -> None:
    """4096 tokens: one pass for all. 60: groups whole in several. 1: every rollout alone."""
    batch, objective = make_batch(0), section(preset)
    whole = run(model, objective, batch, 4096)
    assert whole[0].norm() > 0
    for max_tokens in (60, 1):
        assert_same(run(model, objective, batch, max_tokens), whole)
    for num_ranks, max_tokens in ((2, 4096), (3, 30)):
        results = run_ranks(model, objective, batch, max_tokens, num_ranks)
        gradient = torch.stack([result[0] for result in results]).sum(dim=0)
        for result in results:
            assert_same((gradient, *result[1:]), whole)
        assert len({result[3] for result in results}) == 1  # the same number of collectives


@pytest.mark.parametrize("preset", ["tb", OWN, "rloo", "cispo", "m2po"])
def test_ranks_without_a_rollout_make_the_same_passes(model: Any, preset: str) -> None:
    batch, objective = make_batch(0, num_groups=1, group_size=2), section(preset)
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0.3  # the filler's token, which else has no gradient anyway
    whole = run(model, objective, batch, 4096)
    results = run_ranks(model, objective, batch, 4096, 5)
    assert_same((torch.stack([result[0] for result in results]).sum(dim=0), *results[4][1:]), whole)
    num_without = sum(float(result[0].norm()) == 0 for result in results)
    # m2po masks whole rollouts here, the others none
    assert num_without == 3 if preset != "m2po" else num_without >= 3
    assert len({result[3] for result in results}) == 1


@pytest.mark.parametrize(
    ("values", "max_tokens", "num_passes"),
    [
        ({"preset": "tb"}, 4096, 1),
        ({"preset": "tb"}, 60, 3),
        ({"preset": "tb"}, 1, 24),
        ({"preset": "kimi"}, 1, 12),
        ({"preset": "grpo", "beta": {"value": 0.0}}, 1, 12),
        ({"preset": "ppo_clip", "beta": {"value": 0.0}}, 60, 3),
        ({"preset": "ppo_clip"}, 4096, 1),
        ({"preset": "ppo_clip"}, 60, 6),
    ],
)
def test_a_first_pass_only_where_needed(model: Any, values: dict[str, Any], max_tokens: int, num_passes: int) -> None:
    """12 rollouts in 3 groups. Not where groups are whole, not where A_j does not read theta's log-probs of others."""
    assert run(model, section(**values), make_batch(0), max_tokens)[3] == num_passes


@pytest.mark.parametrize("preset", ["tb", "tba_prime", "grpo", "online_dpo"])
@pytest.mark.parametrize("max_tokens", [60, 4096])
def test_two_slots_of_one_prompt_are_two_groups(model: Any, preset: str, max_tokens: int) -> None:
    """Also after a way over the wire: the means of a group are those of its slot."""
    batch = make_batch(0)
    renamed = changed(batch, lambda _, rollout: replace(rollout, prompt_id="p"))
    groups = tuple(replace(group, prompt_id="p") for group in renamed.groups)
    same = decode_batch(encode_drawn_batch(replace(batch, groups=groups)))
    assert same.group_numbers == batch.group_numbers == [0] * 4 + [1] * 4 + [2] * 4
    expected, found = (run(model, section(preset), each, max_tokens) for each in (batch, same))
    torch.testing.assert_close(found[0], expected[0])
    assert found[1] == expected[1]


REWARDS = np.array([1.0] * 4 + [0.0, 1.0, 1.0, 0.0] + [0.25] * 4)
"""The first and the last of three groups are tied."""


def run_tied(model: Any, values: dict[str, Any], max_tokens: int = 4096) -> Result:
    objective, beta = ObjectiveSection.model_validate(values), values["beta"]["value"]
    known: dict[str, Any] = {"reference": lambda rollouts: [np.array([-5.0])] * len(rollouts) if beta else None}
    theta = copy.deepcopy(model).double()
    return run(theta, objective, make_batch(0), max_tokens, rewards=REWARDS, known=known, beta=beta)


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "dr_grpo_clamp"])
@pytest.mark.parametrize("max_tokens", [4096, 60])
def test_tied_groups_cost_no_pass(model: Any, preset: str, max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"preset": preset, "beta": {"value": 0.0}}
    found, metrics, results, _, num_sequences = run_tied(model, values, max_tokens=max_tokens)
    assert (num_sequences, metrics["num_rollouts_without_gradient"]) == (4, 8)
    assert [item.logprob is None for item in results] == [True] * 4 + [False] * 4 + [True] * 4
    monkeypatch.setattr(Objective, "reads_theta", True)  # then rewards alone do not decide which rows have a pass
    monkeypatch.setattr(Objective, "needs_complete_groups", False)
    expected, all_metrics, all_results, _, num_all = run_tied(model, values, max_tokens=max_tokens)
    assert num_all == 12
    assert expected.norm() > 0
    torch.testing.assert_close(found, expected, atol=1e-13, rtol=1e-11)
    assert metrics["loss"] == pytest.approx(all_metrics["loss"])
    assert metrics["advantage_abs_mean"] == pytest.approx(all_metrics["advantage_abs_mean"])
    assert [item.logprob for item in results[4:8]] == pytest.approx([item.logprob for item in all_results[4:8]])


@pytest.mark.parametrize(("preset", "beta"), [("grpo", 0.1), ("tb", 0.1), ("kimi", 0.1), ("m2po", 0.0)])
def test_tied_groups_have_their_pass_where_more_than_rewards_decide(model: Any, preset: str, beta: float) -> None:
    _, metrics, *_, num_sequences = run_tied(model, {"preset": preset, "beta": {"value": beta}})
    assert (num_sequences, metrics["num_rollouts_without_gradient"]) == (12, 0)


@pytest.mark.parametrize("preset", FAMILY)
@pytest.mark.parametrize("max_tokens", [4096, 60, 10])
def test_masked_tied_groups_cost_no_pass_and_only_their_gradient(model: Any, preset: str, max_tokens: int) -> None:
    """The gradient is that of the group that is left, divided by all rollouts; nothing is asked of the others."""
    batch, theta, objective = make_batch(0), copy.deepcopy(model).double(), section(preset, mask_tied=True)
    resolved = resolve(objective, max_response_tokens=32)
    known = known_of(batch, resolved, np.random.default_rng(0))
    asked: list[Any] = []

    def noted(logprobs: Logprobs) -> Logprobs:
        def ask(rollouts: Any) -> Any:
            asked.append([r.rollout_id for r in rollouts])
            return logprobs(rollouts)

        return ask

    watched = {name: noted(logprobs) for name, logprobs in known.items()}
    found, metrics, results, *_ = run(theta, objective, batch, max_tokens, rewards=REWARDS, known=watched)
    rows = slice(4, 8)
    assert asked == [[r.rollout_id for r in batch.rollouts[rows]]] * 2
    alone = replace(batch, groups=batch.groups[1:2])
    # the ages of the group: AGES repeats after three rollouts and not after four
    expected, *_ = run(theta, section(preset), alone, 4096, rewards=REWARDS[rows], known=known, policy_ages=AGES[rows])
    expected *= 4 / 12
    # norms and rotary embeddings of the model are float32 in any case
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-4)
    unmasked, *_ = run(theta, section(preset), batch, max_tokens, rewards=REWARDS, known=known)
    assert (unmasked - expected).norm() > 100 * (found - expected).norm()
    assert (metrics["num_rollouts_without_gradient"], metrics["frac_reward_zero_std"]) == (8, pytest.approx(2 / 3))
    assert [item.logprob is None for item in results] == [True] * 4 + [False] * 4 + [True] * 4
    pulls = [item.advantage or 0.0 for item in results]
    assert any(pulls[4:8])
    assert not any(pulls[:4] + pulls[8:])
    measured = batch_metrics(results, step=1, success_reward=1.0, policy_temperature=1.0)
    assert measured["num_rollouts"] == 12
    # as the others that depend on theta, of those that a pass was made for
    differences = [(item.logprob or 0.0) - (item.ref_logprob or 0.0) for item in results[4:8]]
    assert measured["kl_to_ref"] == pytest.approx(np.mean(differences))


MASKED = section("tba_prime_published", mask_tied=True, mask_truncated=True)
PLAIN = [section(name, beta={"value": 0.0}) for name in ("grpo", "reinforce", "ppo_clip", "raft", "cispo")]


@pytest.mark.parametrize("objective", [*PLAIN, MASKED], ids=lambda each: each.preset)
@pytest.mark.parametrize(("num_ranks", "max_tokens"), [(2, 4096), (3, 30), (7, 4096)])
def test_ranks_agree_what_has_no_pass(model: Any, objective: ObjectiveSection, num_ranks: int, max_tokens: int) -> None:
    """Also with fewer rollouts than ranks. All make the same number of passes, since each is a collective."""
    whole = run(model, objective, make_batch(0), 4096, rewards=REWARDS)
    results = run_ranks(model, objective, make_batch(0), max_tokens, num_ranks, rewards=REWARDS)
    torch.testing.assert_close(torch.stack([r[0] for r in results]).sum(dim=0), whole[0], atol=2e-6, rtol=2e-4)
    assert whole[0].norm() > 0
    for result in results:
        assert result[1] == pytest.approx(whole[1], rel=1e-4, abs=1e-6)
        assert [item.logprob is None for item in result[2]] == [item.logprob is None for item in whole[2]]
    assert len({result[3] for result in results}) == 1


@pytest.mark.parametrize("objective", [PLAIN[0], section("tba_prime", mask_tied=True)], ids=lambda each: each.preset)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_batch_of_tied_groups_alone_has_no_gradient(model: Any, objective: ObjectiveSection, num_ranks: int) -> None:
    """Its metrics are unknown, and all ranks make the same passes."""
    for gradient, metrics, results, num_passes, num_sequences in run_ranks(
        model, objective, make_batch(0), 4096, num_ranks, rewards=np.ones(12)
    ):
        assert (num_passes, num_sequences) == (1, 1)  # the filler
        assert (gradient.abs().max(), metrics["entropy"], metrics["num_rollouts_without_gradient"]) == (0, None, 12)
        found = batch_metrics(results, step=1, success_reward=1.0, policy_temperature=1.0)
        assert [found[name] for name in ("ess", "log_ratio_mean", "kl_to_ref", "ess_age_0")] == [None] * 4
        assert found["num_rollouts"] == 12


Rows = list[tuple[int, int]]
ROWS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 6)), min_size=1, max_size=60)


def plan_of(rows: Rows, max_tokens: int, *, num_ranks: int = 1, keep_groups: bool = True) -> Plan:
    lengths, groups, places = [length for length, _ in rows], [group for _, group in rows], range(len(rows))
    return plan_micro_batches(lengths, groups, max_tokens, rows=places, num_ranks=num_ranks, keep_groups=keep_groups)


def split(rows: Rows, plan: Plan) -> list[int]:
    return split_rounds(plan, [group for _, group in rows])


def load(rows: Rows, micro_batch: list[int]) -> int:
    return sum(rows[i][0] for i in micro_batch)


@given(rows=ROWS, max_tokens=st.integers(1, 500), num_ranks=st.integers(1, 5), keep_groups=st.booleans())
def test_every_rollout_is_once_within_the_bound(rows: Rows, max_tokens: int, num_ranks: int, keep_groups: bool) -> None:
    plan = plan_of(rows, max_tokens, num_ranks=num_ranks, keep_groups=keep_groups)
    everything = [micro_batch for micro_batches in plan for micro_batch in micro_batches]
    assert sorted(i for micro_batch in everything for i in micro_batch) == list(range(len(rows)))
    for micro_batch in everything:
        assert load(rows, micro_batch) <= max_tokens or len(micro_batch) == 1
    assert {len(micro_batches) for micro_batches in plan} == {num_ranks}
    incomplete = set()
    for number, micro_batch in ((n, each) for n, micro_batches in enumerate(plan) for each in micro_batches):
        here = {rows[i][1] for i in micro_batch}
        if {i for i, (_, group) in enumerate(rows) if group in here} != set(micro_batch):
            incomplete.add(number)
    assert split(rows, plan) == sorted(incomplete)


def test_a_plan_of_some_rollouts_is_that_of_them_alone() -> None:
    rows = [(5, 0), (50, 1), (8, 0), (3, 2), (7, 2)]
    chosen = [0, 2, 3, 4]
    lengths, groups = [length for length, _ in rows], [group for _, group in rows]
    plan = plan_micro_batches(lengths, groups, 13, rows=chosen, num_ranks=2, keep_groups=True)
    alone = plan_of([rows[row] for row in chosen], 13, num_ranks=2)
    assert plan == [[[chosen[i] for i in micro_batch] for micro_batch in micro_batches] for micro_batches in alone]


@given(rows=ROWS, spare_tokens=st.integers(0, 200))
def test_on_one_rank_no_group_is_split_where_all_fit(rows: Rows, spare_tokens: int) -> None:
    """Splitting costs a pass and saves nothing there: the tokens of all micro-batches are the same. If a group does
    not fit, some are split anyway, and a plan that splits others too may have fewer tokens in such rounds."""
    sizes = Counter[int]()
    for length, group in rows:
        sizes[group] += length
    plan = plan_of(rows, max(sizes.values()) + spare_tokens)
    assert split(rows, plan) == []


@given(rows=ROWS, max_tokens=st.integers(60, 500), num_ranks=st.integers(1, 5))
def test_loads_differ_by_no_more_than_the_longest_rollout(rows: Rows, max_tokens: int, num_ranks: int) -> None:
    plan = plan_of(rows, max_tokens, num_ranks=num_ranks, keep_groups=False)
    loads = [load(rows, micro_batch) for micro_batches in plan for micro_batch in micro_batches]
    assert max(loads) - min(loads) <= max(length for length, _ in rows)
    assert loads == sorted(loads, reverse=True)  # ranks with similar loads work at the same time


@given(rows=ROWS, max_tokens=st.integers(60, 500), num_ranks=st.integers(1, 5))
def test_there_are_few_more_micro_batches_than_tokens_need(rows: Rows, max_tokens: int, num_ranks: int) -> None:
    """With the longest rollout at most half the bound, every bin, except in the last round, is at least half full."""
    half = [(max(1, length // 2), group) for length, group in rows]
    plan = plan_of(half, max_tokens, num_ranks=num_ranks, keep_groups=False)
    need = -(-sum(length for length, _ in half) // (max_tokens * num_ranks))
    assert len(plan) <= 2 * need


@pytest.mark.parametrize(
    ("rows", "max_tokens", "num_ranks", "expected"),
    [
        ([(10, 0)] * 8, 100, 1, [[[*range(8)]]]),
        ([(10, 0)] * 8, 100, 4, [[[0, 4], [1, 5], [2, 6], [3, 7]]]),  # no rank is idle
        ([(5, 0)], 10, 3, [[[0], [], []]]),
        ([(50, 0), (3, 1), (2, 2)], 10, 1, [[[0]], [[1, 2]]]),  # longer than the bound: alone
        ([(8, 0), (2, 1), (7, 2), (3, 3)], 11, 1, [[[0, 1]], [[2, 3]]]),  # balanced by tokens
    ],
)
def test_plans(rows: Rows, max_tokens: int, num_ranks: int, expected: Plan) -> None:
    assert plan_of(rows, max_tokens, num_ranks=num_ranks) == expected


def test_groups_stay_whole_over_ranks_where_that_is_balanced_enough() -> None:
    rows = [(10, group) for group in range(4) for _ in range(8)] + [(1, 4)]
    plan = plan_of(rows, 100, num_ranks=2)
    assert split(rows, plan) == []
    assert [[load(rows, m) for m in micro_batches] for micro_batches in plan] == [[81, 80], [80, 80]]
