"""A batch with rollouts that are not what they claim to be: they are left out, and named."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.errors import WireError
from tba.wire import Batch, DrawnGroup, decode_batch, decode_rollout, encode_batch, encode_rollout
from tba.wire.codec import pack
from tests.support.wire_values import scored_rollout

PLAIN_ROLLOUT = encode_rollout(scored_rollout(4))
ROLLOUT_FIELDS = msgpack.unpackb(PLAIN_ROLLOUT)


def changed_rollout(**fields: object) -> bytes:
    return pack({**ROLLOUT_FIELDS, **fields})


BAD = [
    (b"rubbish", "malformed"),
    (changed_rollout(schema=2), "schema-version"),
    (changed_rollout(surprise=1), "malformed"),
    (changed_rollout(sampler_logprobs=ROLLOUT_FIELDS["sampler_logprobs"][:8]), "malformed"),  # mismatched lengths
    (changed_rollout(response_tokens=b"\xff\xff\xff\xff" * 4), "malformed"),  # token id -1
    (changed_rollout(reward=float("nan")), "malformed"),
    (changed_rollout(prompt_tokens=bytes(4 * 131_073)), "too-large"),
]


def batch(*groups: list[bytes]) -> Batch:
    drawn = [
        DrawnGroup(prompt_id=f"p-{i}", source="recent", fallback=False, payloads=payloads)
        for i, payloads in enumerate(groups)
    ]
    return decode_batch(encode_batch(batch_id="b", deadline_s=9.0, seed=1, log_position=2, groups=drawn))


@pytest.mark.parametrize(("payload", "reason"), BAD)
def test_a_rollout_that_cannot_be_read_costs_only_itself(payload: bytes, reason: str) -> None:
    found = batch([PLAIN_ROLLOUT, payload, PLAIN_ROLLOUT], [PLAIN_ROLLOUT])
    assert [(group.prompt_id, len(group.rollouts)) for group in found.groups] == [("p-0", 2), ("p-1", 1)]
    [refused] = found.refused
    assert (refused.prompt_id, refused.reason) == ("p-0", reason)
    with pytest.raises(WireError) as caught:
        decode_rollout(payload)
    assert refused.detail == str(caught.value)


def test_a_group_of_which_nothing_is_left_is_gone_and_so_is_all_of_a_batch() -> None:
    found = batch([b"", b"x"], [PLAIN_ROLLOUT])
    assert [group.prompt_id for group in found.groups] == ["p-1"]
    assert [refused.prompt_id for refused in found.refused] == ["p-0", "p-0"]
    assert batch([b"x"], [b"y"]).groups == ()


def test_a_good_batch_has_nothing_refused() -> None:
    assert batch([PLAIN_ROLLOUT], [PLAIN_ROLLOUT, PLAIN_ROLLOUT]).refused == ()
    assert replace(batch([PLAIN_ROLLOUT])).rollouts[0].rollout_id == scored_rollout(4).rollout_id


@given(st.lists(st.lists(st.integers(-1, len(BAD) - 1), min_size=1, max_size=4), min_size=1, max_size=4))
def test_what_is_read_and_what_is_refused_is_everything_in_order(kinds: list[list[int]]) -> None:
    found = batch(*([PLAIN_ROLLOUT if kind < 0 else BAD[kind][0] for kind in group] for group in kinds))
    left = [(f"p-{i}", group.count(-1)) for i, group in enumerate(kinds) if -1 in group]
    assert [(group.prompt_id, len(group.rollouts)) for group in found.groups] == left
    expected = [(f"p-{i}", BAD[kind][1]) for i, group in enumerate(kinds) for kind in group if kind >= 0]
    assert [(refused.prompt_id, refused.reason) for refused in found.refused] == expected
