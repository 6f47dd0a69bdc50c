"""The bodies of REST."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tba.api import CheckpointRequest, Lease, LeaseReply, LeaseRequest, LineageRequest, Prompt
from tba.api.prompts import MAX_DATA_LEVELS
from tba.fields import MAX_DIGITS, control_character_error

TOO_LONG = 10**MAX_DIGITS


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), "\ud800", ["\ud800"], {"x": float("nan")}, TOO_LONG, [{"x": -TOO_LONG}]]
)
def test_prompt_data_is_plain_json(value: object):
    with pytest.raises(ValidationError):
        Prompt(prompt_id="p", task="exact", text="t", data={"answer": value})


def read_back(prompt: Prompt) -> Prompt:
    """Return the prompt after the catalog stored it and a searcher got it."""
    stored = Prompt.model_validate_json(json.dumps(prompt.model_dump(), sort_keys=True, ensure_ascii=False).encode())
    lease = Lease(
        lease_id="l", kind="train", visit_id="v", prompt=stored, num_rollouts=1, temperature=1.0, expires_in_s=1.0
    )
    reply = LeaseReply(leases=[lease], latest_version=None, run_state="running")
    return LeaseReply.model_validate_json(reply.model_dump_json().encode()).leases[0].prompt


@pytest.mark.parametrize("levels", [1, MAX_DATA_LEVELS - 1, MAX_DATA_LEVELS, MAX_DATA_LEVELS + 1, 198, 5000])
def test_prompt_data_may_be_nested_so_deep_that_every_reader_reads_it(levels: int):
    data: dict[str, Any] = {}
    for _ in range(levels - 1):
        data = {"x": data}
    if levels <= MAX_DATA_LEVELS:
        prompt = Prompt(prompt_id="p", task="exact", text="t", data=data)
        assert read_back(prompt) == prompt
    else:
        with pytest.raises(ValidationError, match="nested deeper than 32 levels; flatten it"):
            Prompt(prompt_id="p", task="exact", text="t", data=data)


texts = st.text(st.characters(codec="utf-8"), max_size=8)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(1 - 10**MAX_DIGITS, 10**MAX_DIGITS - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


names = texts.filter(lambda text: text != "" and control_character_error(text) is None)


@given(st.dictionaries(texts, values, max_size=4), names, texts.filter(len))
def test_whatever_is_accepted_is_read_back_as_it_was(data: dict[str, Any], name: str, text: str):
    prompt = Prompt(prompt_id=name, task=name, text=text, data=data)
    assert read_back(prompt) == prompt


@pytest.mark.parametrize(
    ("kind", "fields"),
    [(LeaseRequest, {"searcher_id": "s", "max_leases": 1}), (LineageRequest, {"trainer_id": "t", "parent": "0-0"})],
)
def test_every_lease_request_and_trainer_start_has_an_id_of_its_own_that_travels_with_it(kind, fields):
    first, second = (kind(**fields) for _ in range(2))
    assert first.request_id != second.request_id
    if kind is LineageRequest:
        assert len(bytes.fromhex(first.request_id)) * 8 == 128, "that of a start is unguessable"
    assert kind.model_validate_json(first.model_dump_json()).request_id == first.request_id


@pytest.mark.parametrize(
    "key", ["../x", "runs/../../x", "/etc/x", "runs//x", "runs/x/", "runs/.x", "a\nb", "x" * 901, ""]
)
def test_a_checkpoint_is_registered_under_a_key_that_a_store_can_hold(key: str) -> None:
    assert CheckpointRequest(version="1-1", token="t", key="runs/demo/checkpoints/1-1").key
    with pytest.raises(ValidationError):
        CheckpointRequest(version="1-1", token="t", key=key)
    with pytest.raises(ValidationError):
        LineageRequest(trainer_id="t", parent="1-1", checkpoint_key=key)
