"""Conversations on the wire: segments cover every token, each sampled token is trained once, all else is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.errors import LimitError, MalformedError
from tba.versions import START
from tba.wire import (
    Message,
    Rollout,
    Segment,
    TokenSequence,
    VersionSpan,
    decode_rollout,
    encode_rollout,
    float32_bytes,
    int32_bytes,
)
from tba.wire.sequences import MAX_TOKENS
from tests.support.rollout_values import replace
from tests.support.wire_values import conversation, scored_rollout


def test_the_parts_of_a_conversation_are_found() -> None:
    rollout = decode_rollout(encode_rollout(conversation()))
    assert rollout.prompt_tokens.tolist() == [1, 2, 3, 4, 5]
    assert rollout.response_tokens.tolist() == [10, 11, 12, 0, 20, 21, 0, 30, 31]
    assert [each.trained_spans for each in rollout.sequences] == [[(5, 9), (12, 15)], [(10, 12)]]
    assert (rollout.num_sampled, rollout.num_replies, rollout.num_tokens) == (9, 3, 30)
    assert (rollout.finish_reason, rollout.is_truncated) == ("length", True)
    one_turn = scored_rollout(3)
    replies = [Segment("assistant", "policy", 1, turn, True, ends) for turn, ends in ((1, "length"), (0, "stop"))]  # pyright: ignore[reportArgumentType]
    shown = [OLD, Segment("assistant", "policy", 1, 2, False, "abort")]
    assert rollout_of([USER, replies[0], *shown], [USER, replies[1]]).finish_reason == "length"  # of the highest turn
    assert (one_turn.num_replies, one_turn.finish_reason, one_turn.is_truncated) == (1, "stop", False)


USER = Segment("user", "environment", 2)
REPLY = Segment("assistant", "policy", 2, is_trained=True, finish_reason="stop")
OLD = Segment("assistant", "policy", 2, finish_reason="stop")
SECOND = Segment("assistant", "policy", 1, 1, is_trained=True, finish_reason="stop")
REPLIES = [Segment("assistant", "policy", 1, turn, is_trained=True, finish_reason="stop") for turn in range(5)]


def rollout_of(*layout: list[Segment], **changes: Any) -> Rollout:
    """Return a conversation with these sequences, whose tokens are all 7, without rewards of turns."""
    sequences = tuple(
        TokenSequence(int32_bytes([7] * sum(each.num_tokens for each in segments)), tuple(segments))
        for segments in layout
    )
    num = sum(each.num_tokens for segments in layout for each in segments if each.is_trained)
    spans = (VersionSpan.of(START, 0, num),) if num else ()
    known = replace(conversation(), version_spans=spans, sampler_logprobs=np.full(num, -0.5))
    known = replace(known, episode=replace(known.episode, turn_rewards=()))
    return replace(known, sequences=sequences, **changes)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ([[USER, REPLY, REPLY]], "the reply of turn 0 is trained twice"),
        ([[USER, REPLY], [USER, REPLY]], "the reply of turn 0 is trained twice"),
        ([[REPLY]], "sequence 0 trains a segment of origin 'policy' that begins at token 0"),
        ([[USER, REPLY], [USER, OLD]], "sequence 1 of 2 trains nothing"),
        ([[USER, SECOND, REPLY]], "sequence 0 has turn 0 after turn 1"),
        ([[Segment("tool", "environment", 1, parse_status="ok"), REPLY]], "environment' has parse_status 'ok'"),
        ([[*[Segment("tool", "environment", 1)] * 4090, each] for each in REPLIES], "20455 segments, more than 16384"),
        (
            [[USER, Segment("tool", "environment", 1, is_trained=True), REPLY]],
            "trains a segment of origin 'environment'",
        ),
        (
            [[USER, Segment("assistant", "template", 1, is_trained=True), REPLY]],
            "trains a segment of origin 'template'",
        ),
        ([[USER, Segment("user", "policy", 1, finish_reason="stop"), REPLY]], "has role 'user', origin 'policy'"),
        ([[USER, Segment("assistant", "policy", 1), REPLY]], "finish_reason None"),
        ([[USER, Segment("tool", "environment", 1, finish_reason="stop"), REPLY]], "finish_reason 'stop'"),
    ],
)
def test_sequences_that_break_a_rule_are_refused(layout: list[list[Segment]], message: str) -> None:
    with pytest.raises(MalformedError, match=message):
        decode_rollout(encode_rollout(rollout_of(*layout)))


def test_a_conversation_has_an_episode_and_bounds() -> None:
    good = rollout_of([USER, REPLY])
    assert decode_rollout(encode_rollout(good)).num_replies == 1
    for layout in ([[USER, REPLY, USER, SECOND]], [[USER, REPLY], [USER, OLD, SECOND]], [[USER, REPLY, USER]]):
        assert decode_rollout(encode_rollout(rollout_of(*layout))).num_tokens
        with pytest.raises(MalformedError, match="it has no episode"):
            decode_rollout(encode_rollout(rollout_of(*layout, episode=None)))
    half = Segment("user", "environment", MAX_TOKENS // 2)
    with pytest.raises(MalformedError, match=f"more than {MAX_TOKENS}"):
        decode_rollout(encode_rollout(rollout_of([half, REPLY], [half, OLD, SECOND])))
    episode = good.episode
    assert episode is not None
    for changes, message in (
        ({"turn_rewards": (float("nan"),)}, "turn_rewards hold nan"),
        ({"turn_rewards": (1.0, None)}, "have 2 rewards, and the last turn is 0"),
        ({"environment": "a\x1b[31m"}, "'episode.environment' holds the control character U\\+001B"),
        ({"messages": (Message("tool", "x" * 600_000),) * 2}, "1200000 characters"),
    ):
        with pytest.raises(MalformedError, match=message):
            decode_rollout(encode_rollout(replace(good, episode=replace(episode, **changes))))
    with pytest.raises(LimitError, match="messages"):
        decode_rollout(encode_rollout(replace(good, episode=replace(episode, messages=(Message("tool", ""),) * 4097))))


@given(st.data())
def test_any_valid_layout_is_read_as_it_was_written(data: st.DataObject) -> None:
    """The trained tokens are, in order, those of the trained segments; all of them have a log-prob and a version."""
    rng, turn, sequences, expected = np.random.default_rng(data.draw(st.integers(0, 9))), 0, [], []
    for _ in range(data.draw(st.integers(1, 3))):
        segments, tokens = [Segment("system", "environment", 1)], [1]
        kinds = data.draw(st.lists(st.sampled_from(["user", "template", "old", "reply"]), max_size=4))
        for kind in [*kinds, "reply"]:
            num, turn = data.draw(st.integers(1, 3)), turn + 1
            new = rng.integers(0, 1000, num).tolist()
            tokens += new
            if kind == "user":
                segments.append(Segment("user", "environment", num, turn))
            elif kind == "template":
                segments.append(Segment("assistant", "template", num, turn))
            else:
                is_trained = kind == "reply"
                segments.append(Segment("assistant", "policy", num, turn, is_trained, "stop"))
                expected += new if is_trained else []
        sequences.append(TokenSequence(int32_bytes(tokens), tuple(segments)))
    logprobs = -rng.random(len(expected))
    spans = (VersionSpan.of(START, 0, len(expected)),)
    written = replace(conversation(), version_spans=spans, sampler_logprobs=logprobs)
    written = replace(written, sequences=tuple(sequences), episode=replace(written.episode, turn_rewards=()))
    read = decode_rollout(encode_rollout(written))
    assert read.sequences == written.sequences
    assert read.response_tokens.tolist() == expected
    assert read.logprob_bytes == float32_bytes(logprobs)
    assert read.num_tokens == sum(len(each.tokens) for each in written.sequences)
