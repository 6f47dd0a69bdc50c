"""A whole push is checked at once, and exactly as each of its rollouts would be."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.errors import WireError
from tba.wire import RolloutDocument, check_push, decode_rollout, encode_rollout
from tests.support.wire_values import pending_rollout, scored_rollout

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
            document[name] = {
                **document["sampling"],
                draw(st.sampled_from(["temperature", "top_p", "stop"])): draw(VALUES),
            }
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


def decoded(payload: bytes) -> Any:
    try:
        return decode_rollout(payload)
    except WireError as error:
        return error


@settings(max_examples=400)
@given(st.lists(st.sampled_from(GOOD) | changed_fields() | changed_bytes(), min_size=1, max_size=8))
def test_a_push_is_checked_as_each_of_its_rollouts_is(payloads: list[bytes]) -> None:
    for item, expected in zip(check_push(payloads), map(decoded, payloads), strict=True):
        if isinstance(item, WireError):
            assert (type(item), str(item)) == (type(expected), str(expected))
            continue
        assert not isinstance(expected, WireError), expected
        assert isinstance(item, RolloutDocument)
        assert (item.rollout_id, item.prompt_id, item.version) == (
            expected.rollout_id,
            expected.prompt_id,
            expected.version,
        )
        assert item.response_tokens == expected.response_tokens.astype("<i4").tobytes()


def test_the_largest_log_prob_is_the_float32_next_to_a_ten_thousandth() -> None:
    edge = np.float32(1e-4)
    good, bad = (
        encode_rollout(scored_rollout(4)).replace(
            scored_rollout(4).sampler_logprobs.tobytes(), np.full(4, value).tobytes()
        )
        for value in (edge, np.nextafter(edge, np.float32(1)))
    )
    first, second = check_push([good, bad])
    assert isinstance(first, RolloutDocument)
    assert "above 0" in str(second)
