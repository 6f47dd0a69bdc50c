"""Control characters in what clients send: ids are refused, reasons cleaned."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tba.api import LeaseRequest, LineageRequest, RunCommand, ScaleRequest, SettingsRequest
from tba.config import LiveSettings
from tba.errors import MalformedError
from tba.fields import control_character_error, escape_controls, one_line
from tba.wire import Wait, decode_heartbeat, decode_rollout, encode_heartbeat, encode_rollout
from tests.support.buffer import make_heartbeat
from tests.support.rollout_values import replace
from tests.support.wire_values import pending_rollout

BAD = ["a\nb", "a\x1b[2Jb", "a\x9b2Jb", "a\x7fb", "a\u2028b", "a\u202eb"]
GOOD = ["searcher-1", "Zoë's é\u00a0run", "👩\u200d🔬"]


@pytest.mark.parametrize("text", BAD)
def test_what_is_found_is_named_replaced_and_shown(text: str) -> None:
    assert control_character_error(text) == f"holds the control character U+{ord(text[1]):04X}; leave it out"
    assert one_line(f"\r\n{text}\n") == f"a {text[2:]}"
    assert control_character_error(escape_controls(text)) is None
    assert escape_controls(text).startswith("a\\")


@pytest.mark.parametrize("text", GOOD)
def test_other_text_is_left_alone(text: str) -> None:
    assert (control_character_error(text), one_line(text), escape_controls(text)) == (None, text, text)


@pytest.mark.parametrize("text", BAD)
def test_ids_are_refused_and_reasons_cleaned(text: str) -> None:
    for make in (
        lambda: LeaseRequest(searcher_id=text, max_leases=1),
        lambda: LineageRequest(trainer_id=text, parent="0-0"),
        lambda: RunCommand(token=text),
    ):
        with pytest.raises(ValidationError, match=f"holds the control character U\\+{ord(text[1]):04X}"):
            make()
    for made in (
        RunCommand(reason=text),
        ScaleRequest(num_searchers=1, reason=text),
        SettingsRequest(settings=LiveSettings(eval_every_steps=2), reason=text),
    ):
        assert made.reason == f"a {text[2:]}"


@pytest.mark.parametrize("field", ["component_id", "state", "wait.name", "gauges"])
def test_a_heartbeat_is_refused(field: str) -> None:
    text = "a\x1b[2J"
    wait = Wait(name=text if field == "wait.name" else "lease", for_s=1.0, deadline_in_s=1.0)
    own = {field: text} if field in ("component_id", "state") else {}
    beat = make_heartbeat(**own, wait=wait, gauges={text if field == "gauges" else "step": 1.0})
    with pytest.raises(MalformedError, match=rf"field '{field}' holds the control character U\+001B; leave it out"):
        decode_heartbeat(encode_heartbeat(beat))


def test_a_rollout_is_refused() -> None:
    with pytest.raises(MalformedError, match=r"field 'searcher_id' holds the control character U\+000A"):
        decode_rollout(encode_rollout(replace(pending_rollout(), searcher_id="s\n1")))
