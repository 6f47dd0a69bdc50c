"""Conversations in a batch: each sampled token is trained once, and nothing else is, whatever the sequences show."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tba_trainer.learner.forward_backward import pack_rollouts
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.packing import rollout_sums

from tba.config.objective import PRESETS
from tba.versions import START
from tba.wire import Batch, Episode, Rollout, Segment, TokenSequence, VersionSpan, int32_bytes
from tests.support.model_families import PACKED, PADDED, make_family_model
from tests.support.rollout_values import replace
from tests.support.trainer_values import VOCAB_SIZE, changed, make_batch, make_rollout
from tests.unit.trainer.test_trainer_forward_backward import OWN, assert_same, run, run_ranks, section
from tests.unit.trainer.test_trainer_packing import alone, gradient

Part = tuple[str, int, int]
"""What a segment is: `p` prompt or environment, `o` an old reply, `t` a trained one; its turn; its number of tokens."""


def sequence(parts: Sequence[Part], tokens: Sequence[int]) -> TokenSequence:
    segments = []
    for kind, turn, num_tokens in parts:
        origin = {"p": "environment", "o": "policy", "t": "policy"}[kind]
        ends = None if origin == "environment" else "stop"
        role = "user" if ends is None else "assistant"
        segments.append(Segment(role, origin, num_tokens, turn, kind == "t", ends))  # pyright: ignore[reportArgumentType]
    assert sum(part[2] for part in parts) == len(tokens)
    return TokenSequence(int32_bytes(tokens), tuple(segments))


def talk(rollout: Rollout, *sequences: TokenSequence, is_truncated: bool = False) -> Rollout:
    """Return a rollout with these sequences, and with log-probs that depend on the place of a token alone."""
    num = sum(end - start for each in sequences for start, end in each.trained_spans)
    episode = Episode(
        episode_id="e",
        environment="talk",
        environment_version="1",
        seed=0,
        stop_condition="done",
        is_truncated=is_truncated,
    )
    logprobs = -np.random.default_rng(7).random(num) * 3
    spans = (VersionSpan.of(START, 0, num),)
    return replace(rollout, sequences=sequences, episode=episode, version_spans=spans, sampler_logprobs=logprobs)


def some(rng: np.random.Generator, num: int) -> list[int]:
    return rng.integers(3, VOCAB_SIZE, num).tolist()


def in_one(rollout: Rollout, seed: int, last: Sequence[int] = (4, 5)) -> Rollout:
    """Two turns, and what the environment said after the last one, in one sequence."""
    rng = np.random.default_rng(seed)
    prompt, first, between, second = (some(rng, num) for num in (4, 3, 2, 5))
    parts = [("p", 0, 4), ("t", 0, 3), ("p", 1, 2), ("t", 1, 5), ("p", 1, len(last))]
    return talk(rollout, sequence(parts, [*prompt, *first, *between, *second, *last]))


def in_cuts(rollout: Rollout, seed: int) -> Rollout:
    """The same two turns, each in a sequence of its own that shows what the policy saw."""
    rng = np.random.default_rng(seed)
    prompt, first, between, second = (some(rng, num) for num in (4, 3, 2, 5))
    return talk(
        rollout,
        sequence([("p", 0, 4), ("t", 0, 3)], [*prompt, *first]),
        sequence([("p", 0, 4), ("o", 0, 3), ("p", 1, 2), ("t", 1, 5)], [*prompt, *first, *between, *second]),
    )


def batch_of(make: Any, **given: Any) -> Batch:
    return changed(make_batch(0), lambda row, rollout: make(rollout, row, **given))


@pytest.fixture(scope="module")
def exact() -> Any:
    """A model that computes all of it in float64: others have parts in float32."""
    return make_family_model("gpt2").double()


# where the divisor counts all tokens that are shown, cuts show some twice
SUMMED = [name for name, parts in PRESETS.items() if parts.aggregation != "whole_sequence_mean"]


@pytest.mark.parametrize("preset", [*SUMMED, OWN])
def test_a_conversation_in_one_sequence_is_the_sum_over_its_cuts(exact: Any, preset: str) -> None:
    """Float64: for every objective, loss, gradient and what is known per rollout are equal."""
    objective = section(preset)
    whole, cuts = (run(exact, objective, batch_of(make), 4096) for make in (in_one, in_cuts))
    assert whole[0].norm() > 0
    torch.testing.assert_close(cuts[0], whole[0], atol=1e-12, rtol=1e-9)
    assert cuts[1] == pytest.approx(whole[1], rel=1e-9, abs=1e-12)
    for one, other in zip(cuts[2], whole[2], strict=True):
        for name in ("logprob", "ref_logprob", "abs_gap", "advantage", "weight"):
            found, expected = getattr(one, name), getattr(other, name)
            assert found == (None if expected is None else pytest.approx(expected, rel=1e-9)), name


def in_branches(rollout: Rollout, seed: int, *, cuts: bool = False) -> Rollout:
    """One reply, then two histories that go on from it; with `cuts` that reply is a sequence of its own."""
    rng = np.random.default_rng(seed)
    prompt, shared, left, right = (some(rng, num) for num in (4, 3, 6, 7))
    first = sequence([("p", 0, 4), ("t", 0, 3)], [*prompt, *shared])
    kind = "o" if cuts else "t"
    one = sequence([("p", 0, 4), (kind, 0, 3), ("p", 1, 2), ("t", 1, 4)], [*prompt, *shared, *left])
    two = sequence([("p", 0, 4), ("o", 0, 3), ("p", 2, 2), ("t", 2, 5)], [*prompt, *shared, *right])
    return talk(rollout, *([first] if cuts else []), one, two)


@pytest.mark.parametrize("preset", [*SUMMED, OWN])
def test_two_branches_are_the_sum_without_what_they_share(exact: Any, preset: str) -> None:
    branches, cuts = (run(exact, section(preset), batch_of(in_branches, cuts=cuts), 4096) for cuts in (False, True))
    torch.testing.assert_close(cuts[0], branches[0], atol=1e-12, rtol=1e-9)
    assert cuts[1] == pytest.approx(branches[1], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("preset", ["tb", "tba_prime", "grpo", "gspo", OWN])
def test_micro_batches_and_ranks_do_not_change_the_gradient(model: Any, preset: str) -> None:
    """Every third rollout has one turn, every third two sequences."""

    def mixed(rollout: Rollout, row: int) -> Rollout:
        return rollout if row % 3 == 0 else (in_one, in_cuts)[row % 3 - 1](rollout, row)

    batch, objective = batch_of(mixed), section(preset)
    whole = run(model, objective, batch, 4096)
    for max_tokens in (60, 1):
        assert_same(run(model, objective, batch, max_tokens), whole)
    results = run_ranks(model, objective, batch, 30, 3)
    assert_same((torch.stack([result[0] for result in results]).sum(dim=0), *results[0][1:]), whole)


@pytest.mark.parametrize("name", [*PACKED, *PADDED])
def test_branches_count_what_they_share_once(name: str) -> None:
    """Values and gradient are those of the model's own passes, without the shared reply in the second branch."""
    rng = np.random.default_rng(1)
    prompt, shared, ask, left, other, right = (some(rng, num) for num in (5, 3, 2, 4, 3, 6))
    rollout = talk(
        make_rollout(rng),
        sequence([("p", 0, 5), ("t", 0, 3), ("p", 1, 2), ("t", 1, 4)], [*prompt, *shared, *ask, *left]),
        sequence([("p", 0, 5), ("o", 0, 3), ("p", 2, 3), ("t", 2, 6)], [*prompt, *shared, *other, *right]),
    )
    plain = make_rollout(rng, num_prompt_tokens=3, num_response_tokens=4)
    model = make_family_model(name)
    own, policy = copy.deepcopy(model), LogprobModel(model, temperature=0.7)
    packed = pack_rollouts([rollout, plain], torch.device("cpu"))
    found = policy.token_logprobs(packed)

    def own_values(before: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        return alone(own, np.array(before, np.int32), np.array(tokens, np.int32), 0.7)

    first = own_values(prompt, [*shared, *ask, *left])
    expected = torch.cat(
        [
            first[:3],
            first[5:],
            own_values([*prompt, *shared, *other], right),
            own_values(plain.prompt_tokens.tolist(), plain.response_tokens.tolist()),
        ]
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient(model, found), gradient(own, expected), atol=1e-4, rtol=1e-5)
    assert packed.row.tolist() == [0] * 13 + [1] * 4
    assert packed.trained_tokens.tolist() == [*rollout.response_tokens, *plain.response_tokens]
    sums = torch.stack([found[:13].sum(), found[13:].sum()])
    torch.testing.assert_close(rollout_sums(found, packed), sums)


def test_an_episode_that_a_limit_ended_is_masked_as_a_response_that_was_cut_off(model: Any) -> None:
    """Its last reply may have ended by itself."""

    def cut(rollout: Rollout, row: int) -> Rollout:
        found = in_one(rollout, row)
        return talk(rollout, *found.sequences, is_truncated=row >= 8)

    masked = run(model, section("tb", mask_truncated=True), batch_of(cut), 4096)
    assert [item.rollout.is_truncated for item in masked[2]] == [False] * 8 + [True] * 4
    plain = run(model, section("tb", mask_truncated=True), batch_of(in_one), 4096)
    assert not torch.equal(masked[0], plain[0])


SEGMENTS = st.lists(st.tuples(st.sampled_from("pot"), st.integers(1, 4)), min_size=1, max_size=5)


@given(st.lists(SEGMENTS, min_size=1, max_size=4))
def test_packing_predicts_exactly_the_trained_tokens(layout: list[list[tuple[str, int]]]) -> None:
    """Each is predicted by the place of the token before it in its own sequence, whatever prefixes are shared."""
    rng, sequences, turn = np.random.default_rng(0), [], 0
    for kinds in layout:
        parts = [("p", 0, 1)]
        for kind, num_tokens in [*kinds, ("t", 1)]:
            turn += 1
            parts.append((kind, turn, num_tokens))
        # tokens of two values: prefixes are shared now and then
        sequences.append(sequence(parts, rng.integers(3, 5, sum(part[2] for part in parts)).tolist()))
    rollout = talk(make_rollout(rng), *sequences)
    packed = pack_rollouts([rollout, rollout], torch.device("cpu"))
    ids, places = packed.input_ids[0].numpy(), packed.predictor_places
    starts = np.cumsum([0, *packed.lengths])
    expected, before = [], []
    for number, each in enumerate([*rollout.sequences, *rollout.sequences]):
        at = packed.positions[starts[number] : starts[number + 1]]
        np.testing.assert_array_equal(ids[at], each.tokens[: len(at)])  # every input is the sequence's own token
        np.testing.assert_array_equal(packed.position_ids[0].numpy()[at], np.arange(len(at)))
        for start, end in each.trained_spans:
            expected += each.tokens[start:end].tolist()
            before += at[start - 1 : end - 1].tolist()
    assert packed.trained_tokens.tolist() == expected
    assert places.tolist() == before
    assert packed.num_trained == (rollout.num_sampled,) * 2
