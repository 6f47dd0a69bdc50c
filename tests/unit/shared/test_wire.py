"""Wire formats: what is refused, alone, in a push and in a batch."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tba.errors import LimitError, MalformedError, SchemaVersionError, WireError
from tba.wire import (
    MAX_ROLLOUTS_PER_PUSH,
    Batch,
    Group,
    Rollout,
    decode_batch,
    decode_heartbeat,
    decode_manifest,
    decode_push,
    decode_rollout,
    decode_rollouts,
    encode_batch,
    encode_heartbeat,
    encode_manifest,
    encode_push,
    encode_rollout,
    new_rollout_id,
    storable_parts,
    weight_manifest,
)
from tba.wire.codec import pack
from tba.wire.rollout import MAX_REWARD_PARTS
from tba.wire.weight_manifest import MAX_MANIFEST_BYTES
from tests.support.wire_values import batch_bytes, heartbeat, manifest, payloads, pending_rollout, scored_rollout

# ---- Bytes from a stranger ------------------------------------------------------------------------------------------


DECODERS: dict[str, tuple[Callable[[bytes], Any], bytes]] = {
    "rollout": (decode_rollout, encode_rollout(scored_rollout(4))),
    "push": (lambda data: decode_push(data, max_bytes=1 << 20), encode_push(payloads())),
    "batch": (decode_batch, batch_bytes()),
    "heartbeat": (decode_heartbeat, encode_heartbeat(heartbeat())),
    "manifest": (decode_manifest, encode_manifest(manifest())),
}
ROLLOUT = msgpack.unpackb(DECODERS["rollout"][1])
PACKED = ["rollout", "push", "batch", "heartbeat"]
FIELDS = [(name, field) for name in PACKED for field in msgpack.unpackb(DECODERS[name][1])]
UNSCORED = {"reward": None, "reward_status": "pending"}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | st.integers(0, 3), inner),
    max_leaves=8,
)


def changed(**fields: Any) -> bytes:
    return pack({**ROLLOUT, **fields})


def turn(
    tokens: bytes = bytes(20),
    num_prompt: int = 1,
    role: str = "assistant",
    origin: str = "policy",
    is_trained: bool = True,
    finish_reason: str | None = "stop",
    segments: list[Any] | None = None,
) -> dict[str, Any]:
    """Return the field `sequences` of a rollout of one prompt token and four of the response."""
    prompt = ["user", "environment", num_prompt, 0, False, None, None]
    reply = [role, origin, 4, 0, is_trained, finish_reason, None]
    return {"sequences": [[tokens, [prompt, reply] if segments is None else segments]]}


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.binary(max_size=300))
@example(data=b"")
@example(data=b"\xc1")
@example(data=b"\x80\x80")
@example(data=b"\x91" * 2000)
@example(data=b"\xdf\xff\xff\xff\xff")
@example(data=b"[" * 100_000)
def test_arbitrary_bytes_raise_nothing_but_a_wire_error(name: str, data: bytes) -> None:
    with pytest.raises(WireError):
        DECODERS[name][0](data)


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.data())
def test_a_flipped_byte_is_read_or_is_a_wire_error(name: str, data: st.DataObject) -> None:
    decode, good = DECODERS[name]
    raw = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        decode(bytes(raw))


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_every_missing_field_is_named(name: str, field: str) -> None:
    decode, good = DECODERS[name]
    document = msgpack.unpackb(good)
    del document[field]
    with pytest.raises(MalformedError, match=f"missing required field `{field}`"):
        decode(pack(document))


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_every_field_of_a_wrong_type_is_named(name: str, field: str) -> None:
    decode, good = DECODERS[name]
    document = msgpack.unpackb(good)
    right = (int, float) if isinstance(document[field], float) else type(document[field])
    if field == "reward_reason":  # the only field that is nil in the good document
        right = str
    wrong = [value for value in ({"a": 1}, "x", b"xy", [], 7, 0.5) if not isinstance(value, right)]
    for value in [*wrong, *([] if right is bool else [True])]:
        with pytest.raises(WireError, match=rf"Expected .* - at `\$\.{field}"):
            decode(pack({**document, field: value}))


@pytest.mark.parametrize(("name", "field"), FIELDS)
@settings(max_examples=25)
@given(value=ANYTHING)
def test_any_value_in_any_field_is_read_or_is_a_wire_error(name: str, field: str, value: object) -> None:
    decode, good = DECODERS[name]
    document = msgpack.unpackb(good)
    document[field] = value
    with contextlib.suppress(WireError):
        decode(pack(document))


@pytest.mark.parametrize("name", PACKED)
def test_unknown_fields_and_other_schemas_are_refused(name: str) -> None:
    decode, good = DECODERS[name]
    document = msgpack.unpackb(good)
    with pytest.raises(MalformedError, match="unknown field `surprise`"):
        decode(pack({**document, "surprise": 1}))
    with pytest.raises(SchemaVersionError, match="schema 9 is not one this build reads"):
        decode(pack({**document, "schema": 9}))
    with pytest.raises(SchemaVersionError, match="schema 0 is not one this build reads"):
        decode(pack({"schema": 0}))
    with pytest.raises(MalformedError, match="not one valid msgpack document"):
        decode(good + b"\x00")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollout_id": b"short"}, "'rollout_id' must be 16 bytes, got 5"),
        (turn(segments=[]), r"array` of length >= 1 - at `\$\.sequences\[0\]\[1\]`"),
        ({"sequences": []}, r"array` of length >= 1 - at `\$\.sequences`"),
        (turn(num_prompt=0), r"`int` >= 1 - at `\$\.sequences\[0\]\[1\]\[0\]\[2\]`"),
        (turn(tokens=b"abc"), "the segments of sequence 0 have 5 tokens, its tokens 3 bytes"),
        (turn(num_prompt=2), "the segments of sequence 0 have 6 tokens, its tokens 20 bytes"),
        ({"sampler_logprobs": b"\0" * 12}, "it has 3 sampler_logprobs for 4 trained tokens"),
        ({"sampler_logprobs": b"\0\0\xc0\x7f" * 4}, "'sampler_logprobs' holds nan, not a finite number"),
        ({"sampler_logprobs": b"\0\0\x80\x3f" * 4}, "'sampler_logprobs' holds 1, above 0"),
        (turn(tokens=b"\xff" * 4 + bytes(16)), "'sequences' holds -1; token ids must not be negative"),
        ({"version_spans": []}, r"array` of length >= 1 - at `\$\.version_spans`"),
        ({"version_spans": [[1, 1, 0, 3]]}, "must cover the 4 trained tokens"),
        ({"version_spans": [[1, 1, 0, 2], [1, 2, 3, 4]]}, "without gaps"),
        ({"version_spans": [[1, 1, 0]]}, r"of at least length 4, got 3 - at `\$\.version_spans\[0\]`"),
        ({"version_spans": [[True, 1, 0, 4]]}, r"Expected `int`, got `bool` - at `\$\.version_spans\[0\]\[0\]`"),
        ({"version_spans": [[1, -1, 0, 4]]}, r"Expected `int` >= 0 - at `\$\.version_spans\[0\]\[1\]`"),
        (turn(finish_reason="bored"), r"enum value 'bored' - at `\$\.sequences\[0\]\[1\]\[1\]\[5\]`"),
        (turn(finish_reason=None), "origin 'policy' and finish_reason None"),
        (turn(role="user"), "a segment of sequence 0 has role 'user', origin 'policy'"),
        (turn(origin="environment", finish_reason=None), "trains a segment of origin 'environment'"),
        (turn(is_trained=False), "sequence 0 of 1 trains nothing"),
        ({"reward": None}, "reward is None but reward_status is 'scored'"),
        ({"reward_status": "pending"}, r"reward is 1\.0 but reward_status is 'pending'"),
        ({"reward_status": "failed", "reward": None}, "failed reward needs a reward_reason"),
        ({**UNSCORED, "reward_parts": {"a": 1.0}}, "it has reward_parts but reward_status is 'pending'"),
        ({"reward_version": None}, "scored reward needs a reward_version"),
        ({"reward": math.nan}, "'reward' is nan, not a finite number"),
        ({"reward": math.inf}, "'reward' is inf"),
        ({"ref_logprob": [math.nan, 0, 0]}, "'ref_logprob' is nan, not a finite number"),
        ({"ref_logprob": [-1.0, 0]}, r"of at least length 3, got 2 - at `\$\.ref_logprob`"),
        ({"ref_logprob": [-1.0, -1, 0]}, r"Expected `int` >= 0 - at `\$\.ref_logprob\[1\]`"),
        ({"run": ""}, r"Expected `str` of length >= 1 - at `\$\.run`"),
        ({"sampling": {**ROLLOUT["sampling"], "top_p": 0.0}}, r"top_p in \(0, 1\]"),
        ({"sampling": {**ROLLOUT["sampling"], "temperature": -1.0}}, "temperature must be from 0"),
        ({"sampling": {**ROLLOUT["sampling"], "stop": [1]}}, r"got `int` - at `\$\.sampling\.stop\[0\]`"),
        ({"sampling": {"temperature": 1.0}}, r"missing required field `top_p` - at `\$\.sampling`"),
        ({"started_at_s": math.nan}, "started_at_s nan"),
    ],
)
def test_a_rollout_whose_fields_disagree_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(MalformedError, match=message):
        decode_rollout(changed(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_text": "x" * 1_000_001}, r"length <= 1000000 - at `\$\.response_text`"),
        ({"searcher_id": "x" * 257}, r"length <= 256 - at `\$\.searcher_id`"),
        (turn(tokens=bytes(4 * 131_073)), r"length <= 524288 - at `\$\.sequences\[0\]\[0\]`"),
    ],
)
def test_a_rollout_beyond_a_limit_is_a_limit_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(LimitError, match=message):
        decode_rollout(changed(**fields))


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ({}, MalformedError, r"length >= 1 - at `\$\.reward_parts`"),
        ({"a": "1"}, MalformedError, "Expected `float`"),
        ({1: 1.0}, MalformedError, "Expected `str`, got `int` - at `key` in"),
        ({"a": math.nan}, MalformedError, "has nan for the part 'a', not a finite number"),
        ({"a\n": 1.0}, MalformedError, r"has the part 'a.n', a name that no recipe can give"),
        ({"x" * 64: 1.0}, MalformedError, "a name that no recipe can give"),
        ({str(n): 0.0 for n in range(MAX_REWARD_PARTS + 1)}, LimitError, r"length <= 256 - at `\$\.reward_parts`"),
    ],
)
def test_parts_of_a_reward_have_bounds(parts: dict, error: type[WireError], message: str) -> None:
    with pytest.raises(error, match=message):
        decode_rollout(changed(reward_parts=parts))


def test_parts_are_left_out_of_the_bytes_where_there_are_none() -> None:
    plain = scored_rollout(4)
    scored = plain.with_reward(0.5, "v", {"a": 0.25, "b": 1})
    assert decode_rollout(encode_rollout(scored)).reward_parts == {"a": 0.25, "b": 1.0}
    assert "reward_parts" not in msgpack.unpackb(encode_rollout(plain))
    assert encode_rollout(scored.with_reward(1.0, "addition-1")) == encode_rollout(plain)
    assert "reward_parts" not in msgpack.unpackb(encode_rollout(scored.with_failure("timeout: 5 s")))
    assert encode_rollout(decode_rollout(encode_rollout(plain))) == encode_rollout(plain)  # a snapshot writes it again


@pytest.mark.parametrize(
    ("parts", "is_composite", "stored"),
    [
        (None, True, None),
        ({}, True, None),
        ({"exact": 1.0}, False, None),  # it is the reward
        ({"exact": 0.5}, False, {"exact": 0.5}),  # its weight is 2
        ({"format": 1.0}, True, {"format": 1.0}),  # a gate has decided
        ({"a": 0.5, "b": 0.5}, False, {"a": 0.5, "b": 0.5}),  # the recipe of the reward service is another one
        ({"a b": 0.5, "c": 0.5}, True, None),
    ],
)
def test_the_only_score_is_no_part_where_it_is_the_reward(parts: Any, is_composite: bool, stored: Any) -> None:
    assert storable_parts(parts, 1.0, is_composite=is_composite) == stored


def test_a_push_has_limits_on_bytes_and_on_items() -> None:
    data = encode_push(payloads())
    assert decode_push(data, max_bytes=len(data)) == payloads()
    with pytest.raises(LimitError, match=f"{len(data)} bytes exceed the limit of {len(data) - 1}"):
        decode_push(data, max_bytes=len(data) - 1)
    assert len(decode_push(encode_push([b"x"] * MAX_ROLLOUTS_PER_PUSH), max_bytes=1 << 20)) == MAX_ROLLOUTS_PER_PUSH
    with pytest.raises(LimitError, match="0 rollouts; a push holds 1 to 512"):
        decode_push(encode_push([]), max_bytes=1 << 20)
    with pytest.raises(LimitError, match=r"length <= 512 - at `\$\.rollouts`"):
        decode_push(encode_push([b"x"] * (MAX_ROLLOUTS_PER_PUSH + 1)), max_bytes=1 << 20)


def test_a_batch_needs_groups_and_groups_need_rollouts() -> None:
    document = msgpack.unpackb(batch_bytes())
    with pytest.raises(MalformedError, match=r"length >= 1 - at `\$\.groups`"):
        decode_batch(pack({**document, "groups": []}))
    empty = {"prompt_id": "p", "source": "recent", "fallback": False, "rollouts": []}
    with pytest.raises(MalformedError, match=r"length >= 1 - at `\$\.groups\[0\]\.rollouts`"):
        decode_batch(pack({**document, "groups": [empty]}))
    with pytest.raises(MalformedError, match=r"Expected `object`, got `int` - at `\$\.groups\[0\]`"):
        decode_batch(pack({**document, "groups": [1]}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_tokens": [-1]}, r"canary\.prompt_tokens\.0"),
        ({"prompt_tokens": [2**31]}, r"canary\.prompt_tokens\.0"),
        ({"response_tokens": [True, 4]}, r"canary\.response_tokens\.0"),
        ({"prompt_tokens": [1] * 65}, r"canary\.prompt_tokens: List should have at most 64"),
        ({"prompt_tokens": [1] * 63}, r"canary: a canary of 65 tokens; at most 64 are allowed"),
        ({"logprobs": [-0.5]}, r"canary: 1 log-probs for 2 response tokens"),
        ({"tolerance": 1e999}, r"canary\.tolerance"),
    ],
)
def test_a_canary_that_no_engine_could_run_is_refused_before_it_runs(changes: dict[str, Any], message: str) -> None:
    document = json.loads(DECODERS["manifest"][1])
    document["canary"] |= changes
    with pytest.raises(MalformedError, match=f"weight manifest: {message}"):
        decode_manifest(json.dumps(document).encode())


def test_a_manifest_has_a_largest_size() -> None:
    good = DECODERS["manifest"][1]
    decode_manifest(good + b" " * (MAX_MANIFEST_BYTES - len(good)))
    with pytest.raises(MalformedError, match=f"weight manifest: {MAX_MANIFEST_BYTES + 1} bytes, the limit is"):
        decode_manifest(good + b" " * (MAX_MANIFEST_BYTES - len(good) + 1))


def test_a_manifest_that_nobody_would_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    value = manifest()
    size = len(encode_manifest(value))
    monkeypatch.setattr(weight_manifest, "MAX_MANIFEST_BYTES", size)
    assert len(encode_manifest(value)) == size
    monkeypatch.setattr(weight_manifest, "MAX_MANIFEST_BYTES", size - 1)
    message = f"weight manifest: {size} bytes for {len(value.tensors)} tensors, the limit is {size - 1}"
    with pytest.raises(MalformedError, match=message):
        encode_manifest(value)


def test_rollout_ids_are_unique_and_sort_by_time() -> None:
    ids = [new_rollout_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert all(len(item) == 16 and item[6] >> 4 == 7 and item[8] >> 6 == 2 for item in ids)
    assert [item[:6] for item in ids] == sorted(item[:6] for item in ids)


# ---- A whole push is checked at once, and exactly as each of its rollouts would be ----------------------------------


GOOD = [encode_rollout(scored_rollout(4)), encode_rollout(pending_rollout()), encode_rollout(scored_rollout(1))]
EDGES = (0.0, -1.0, 1e-4, 9.9e-5, 1.0001e-4, 1.0, 1e-40, float("nan"), float("inf"), float("-inf"))
FLOATS = st.sampled_from(EDGES) | st.floats(width=32)
ARRAYS = st.one_of(
    st.lists(FLOATS, max_size=5).map(lambda values: np.array(values, "<f4").tobytes()),
    st.lists(st.integers(-2, 2), max_size=5).map(lambda values: np.array(values, "<i4").tobytes()),
    st.binary(max_size=20),
)
NUMBERS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.sampled_from(EDGES)
VALUES = st.recursive(
    NUMBERS | st.sampled_from(["", "scored", "pending", "failed", "stop", "x" * 257]) | ARRAYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["top_p", "stop", "seed"]), inner),
    max_leaves=6,
)
SPANS = st.lists(st.lists(st.integers(0, 4) | VALUES, min_size=3, max_size=5), max_size=3)


@st.composite
def changed_fields(draw: st.DrawFn) -> bytes:
    """A valid rollout with some fields changed, most of them to something of the right kind."""
    document: dict[str, Any] = msgpack.unpackb(draw(st.sampled_from(GOOD)))
    for name in draw(st.lists(st.sampled_from(sorted(document)), min_size=1, max_size=3)):
        if name == "version_spans":
            document[name] = draw(SPANS)
        elif name == "sampling":
            setting = draw(st.sampled_from(["temperature", "top_p", "stop"]))
            document[name] = {**document["sampling"], setting: draw(VALUES)}
        elif name.endswith(("tokens", "logprobs")):
            document[name] = draw(ARRAYS)
        else:
            document[name] = draw(VALUES)
    return msgpack.packb(document) or b""


@st.composite
def changed_bytes(draw: st.DrawFn) -> bytes:
    """A valid rollout with some bytes changed, cut off or added."""
    raw = bytearray(draw(st.sampled_from(GOOD)))
    for _ in range(draw(st.integers(1, 3))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw[: draw(st.none() | st.integers(0, len(raw)))]) + draw(st.sampled_from([b"", b"\x00"]))


@settings(max_examples=400)
@given(st.lists(st.sampled_from(GOOD) | changed_fields() | changed_bytes(), min_size=1, max_size=8))
def test_a_push_is_checked_as_each_of_its_rollouts_is(payloads: list[bytes]) -> None:
    for item, payload in zip(decode_rollouts(payloads), payloads, strict=True):
        (alone,) = decode_rollouts([payload])
        assert type(item) is type(alone)
        if isinstance(item, Rollout) and isinstance(alone, Rollout):
            assert encode_rollout(item) == encode_rollout(alone)
        else:
            assert str(item) == str(alone)


def test_the_largest_log_prob_is_the_float32_next_to_a_ten_thousandth() -> None:
    edge = np.float32(1e-4)
    good, bad = (
        encode_rollout(scored_rollout(4)).replace(scored_rollout(4).logprob_bytes, np.full(4, value).tobytes())
        for value in (edge, np.nextafter(edge, np.float32(1)))
    )
    first, second = decode_rollouts([good, bad])
    assert isinstance(first, Rollout)
    assert "above 0" in str(second)


# ---- A batch with rollouts that are not what they claim to be -------------------------------------------------------


PLAIN_ROLLOUT = DECODERS["rollout"][1]
BAD = [
    (b"rubbish", "malformed"),
    (pack({"schema": 0}), "schema-version"),
    (changed(schema=9), "schema-version"),
    (changed(surprise=1), "malformed"),
    (changed(sampler_logprobs=ROLLOUT["sampler_logprobs"][:8]), "malformed"),  # mismatched lengths
    (changed(response_tokens=b"\xff\xff\xff\xff" * 4), "malformed"),  # token id -1
    (changed(reward=float("nan")), "malformed"),
    (changed(**turn(tokens=bytes(4 * 131_073))), "too-large"),
]


def batch(*groups: list[bytes]) -> Batch:
    drawn = tuple(Group(f"p-{i}", "recent", False, tuple(payloads)) for i, payloads in enumerate(groups))
    return decode_batch(encode_batch(Batch(batch_id="b", deadline_s=9.0, seed=1, log_position=2, groups=drawn)))


@given(st.lists(st.lists(st.integers(-1, len(BAD) - 1), min_size=1, max_size=4), min_size=1, max_size=4))
def test_what_is_read_and_what_is_refused_is_everything_in_order(kinds: list[list[int]]) -> None:
    found = batch(*([PLAIN_ROLLOUT if kind < 0 else BAD[kind][0] for kind in group] for group in kinds))
    left = [(f"p-{i}", group.count(-1)) for i, group in enumerate(kinds) if -1 in group]
    assert [(group.prompt_id, len(group.rollouts)) for group in found.groups] == left
    expected = [(place, BAD[kind][1]) for place, kind in enumerate(chain.from_iterable(kinds)) if kind >= 0]
    assert [(place, each.reason) for place, each in zip(found.unreadable, found.refused, strict=True)] == expected
    for refused, kind in zip(found.refused, (kind for kind in chain.from_iterable(kinds) if kind >= 0), strict=True):
        with pytest.raises(WireError) as caught:
            decode_rollout(BAD[kind][0])
        assert refused.detail == str(caught.value)
