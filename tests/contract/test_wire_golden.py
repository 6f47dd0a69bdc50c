"""Golden bytes: what was written by an earlier build is read by this one, and this one writes the same."""

from __future__ import annotations

import json

import pytest

from tba.wire import (
    Rollout,
    decode_batch,
    decode_heartbeat,
    decode_manifest,
    decode_push,
    decode_rollout,
    encode_rollout,
)
from tests.support.wire_values import (
    GOLDEN,
    composite_rollout,
    conversation,
    encodings,
    heartbeat,
    manifest,
    payloads,
    pending_rollout,
    scored_rollout,
)


def assert_same(found: Rollout, expected: Rollout) -> None:
    for name in Rollout.__struct_fields__:
        got, want = getattr(found, name), getattr(expected, name)
        assert got == want, name
        assert type(got) is type(want), name


@pytest.mark.parametrize("name", sorted(encodings()))
def test_this_build_writes_the_golden_bytes(name: str) -> None:
    assert encodings()[name] == (GOLDEN / name).read_bytes()


def test_the_golden_rollout_reads_as_the_values() -> None:
    assert_same(decode_rollout((GOLDEN / "rollout_v2.msgpack").read_bytes()), scored_rollout())


def test_the_other_golden_bytes_read_as_the_values() -> None:
    assert_same(decode_rollout((GOLDEN / "rollout_parts_v2.msgpack").read_bytes()), composite_rollout())
    assert_same(decode_rollout((GOLDEN / "rollout_conversation_v2.msgpack").read_bytes()), conversation())
    assert_same(decode_rollout(encode_rollout(pending_rollout())), pending_rollout())
    assert decode_push((GOLDEN / "push_v1.msgpack").read_bytes(), max_bytes=1 << 20) == payloads()
    assert decode_heartbeat((GOLDEN / "heartbeat_v1.msgpack").read_bytes()) == heartbeat()


def test_the_golden_batch_reads_as_the_values() -> None:
    batch = decode_batch((GOLDEN / "batch_v1.msgpack").read_bytes())
    found = (batch.batch_id, batch.deadline_s, batch.seed, batch.log_position)
    assert found == ("batch-1", 1_700_000_100.0, 2**63 - 1, 12_345)
    groups = [(g.prompt_id, g.source, g.fallback, len(g.rollouts)) for g in batch.groups]
    assert groups == [("p-7", "recent", False, 2), ("p-8", "replay", True, 1)]
    for found, expected in zip(batch.rollouts, [scored_rollout(3), scored_rollout(3), pending_rollout()], strict=True):
        assert_same(found, expected)


def test_the_golden_manifest_reads_as_the_values_and_its_keys_keep_their_order() -> None:
    data = (GOLDEN / "manifest_v2.json").read_bytes()
    assert (decode_manifest(data), list(json.loads(data))[:4]) == (manifest(), ["schema", "run", "version", "parent"])


def test_policy_age_is_measured_from_the_oldest_version_that_made_a_token() -> None:
    assert str(scored_rollout().version) == "1-40"
