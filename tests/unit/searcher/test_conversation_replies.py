"""Replies: content, reasoning and tool calls; a call that cannot be read, or was cut, is never `ok`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tba_searcher.conversations.known_families import FamilyRenderer
from tba_searcher.conversations.prefix_proof import TOOL
from tba_searcher.conversations.replies import parse_reply
from tba_searcher.conversations.template import TemplateRenderer

from tests.support.chat_tokenizers import make_chat_tokenizer

GOOD = '{"name": "add", "arguments": {"a": 1}}'
NAMES = frozenset({"add"})


def called(*bodies: str) -> str:
    return "".join(f"<tool_call>\n{body}\n</tool_call>\n" for body in bodies)


@pytest.mark.parametrize(
    ("text", "statuses"),
    [
        ("Yes.", []),
        (called(GOOD), ["ok"]),
        (called(GOOD, '{"name": "add", "arguments": {}}'), ["ok", "ok"]),
        (called('{"name": "add", "arguments": {"a": 1}'), ["invalid_json"]),
        (called('{"name": "add", "arguments": {"a": NaN}}'), ["invalid_json"]),
        (called("[" * 100_000), ["invalid_json"]),
        (called(""), ["invalid_json"]),
        (called("[1]"), ["malformed_structure"]),
        (called('{"name": "add", "arguments": "{}"}'), ["malformed_structure"]),
        (called('{"name": "add"}'), ["malformed_structure"]),
        (called('{"name": "add", "arguments": {}, "b": 1}'), ["malformed_structure"]),
        (called('{"arguments": {}}'), ["missing_name"]),
        (called('{"name": 7, "arguments": {}}'), ["missing_name"]),
        (called('{"name": "sub", "arguments": {}}'), ["unknown_tool"]),
        (f"<tool_call>{GOOD}", ["unclosed_block"]),
        (f"{GOOD}</tool_call>", ["malformed_structure"]),
        (
            f"<tool_call>{GOOD}<tool_call>{GOOD}</tool_call></tool_call>",
            ["unclosed_block", "ok", "malformed_structure"],
        ),
        (f"<think>{called(GOOD)}</think>No.", []),
        (f"<think>{called(GOOD)}", []),
    ],
)
def test_each_call_that_is_tried_has_a_status(text, statuses):
    found = parse_reply(text, names=NAMES, is_thinking=False)
    assert [call.status for call in found.tool_calls] == statuses
    failed = [status for status in statuses if status != "ok"]
    assert found.parse_status == (failed[0] if failed else statuses[0] if statuses else None)
    for call in found.tool_calls:
        if call.status == "ok":
            assert (call.name, call.arguments in ({"a": 1}, {})) == ("add", True)


def test_content_and_reasoning_are_what_stands_around_calls():
    found = parse_reply(f"<think>\nHm.\n</think>\n\nNow: {called(GOOD)} done", names=NAMES, is_thinking=False)
    assert (found.reasoning, found.content) == ("Hm.", "Now: \n done")
    assert parse_reply("Hm.</think>Yes.", names=NAMES, is_thinking=True).reasoning == "Hm."
    cut = parse_reply("Hm, so", names=NAMES, is_thinking=True)
    assert (cut.reasoning, cut.content, cut.parse_status) == ("Hm, so", "", None)


@given(st.integers(0, len(called(GOOD)) - len("\n</tool_call>\n") + len("\n</tool_call>") - 1))
def test_bug_22_a_call_that_was_cut_anywhere_is_never_ok(length):
    found = parse_reply(called(GOOD)[:length], names=NAMES, is_thinking=False)
    assert found.parse_status in (None, "unclosed_block")


@given(st.text(max_size=40), st.text('<>/tool_cal{}"name:', max_size=40))
def test_no_text_is_an_error(text, other):
    parse_reply(text + other, names=NAMES, is_thinking=False)
    parse_reply(called(other) + text, names=NAMES, is_thinking=True)


def test_a_prompt_that_has_opened_the_reasoning_is_seen_in_its_tokens():
    tokenizer = make_chat_tokenizer()
    renderer = TemplateRenderer(tokenizer, {})
    reply = tokenizer("Hm.</think>Yes.<|im_end|>")["input_ids"]
    assert renderer.parse(tokenizer("assistant\n<think>\n")["input_ids"], reply).reasoning == "Hm."
    assert renderer.parse(tokenizer("assistant\n")["input_ids"], reply).content == "Hm.</think>Yes."
    call = tokenizer(called(GOOD) + "<|im_end|>")["input_ids"]
    assert renderer.parse([5], call, tools=[TOOL]).parse_status == "ok"
    assert renderer.parse([5], call).parse_status == "unknown_tool", "there are no tools"


def test_calls_of_a_known_family_are_as_strict():
    def parsed(**values):
        call = {"raw": "r", "name": "add", "arguments": {}, "token_span": (0, 3), **values}
        status = SimpleNamespace(value=call.pop("status", "ok"))
        found = SimpleNamespace(content="", reasoning_content=None, tool_calls=[SimpleNamespace(**call, status=status)])
        family = SimpleNamespace(parse_response=lambda *_, **__: found, get_stop_token_ids=lambda: [2])
        renderer = FamilyRenderer(family, "odd", TemplateRenderer(make_chat_tokenizer(), {}))
        return [renderer.parse([9], reply, tools=[TOOL]).parse_status for reply in ([7, 7, 7, 2], [7, 7, 7])]

    assert parsed() == ["ok", "unclosed_block"], "a reply that was cut"
    assert parsed(token_span=(0, 2)) == ["ok", "ok"], "tokens behind the call"
    assert parsed(token_span=None) == ["ok", "unclosed_block"]
    assert parsed(name="sub", token_span=(0, 2)) == ["unknown_tool"] * 2
    assert parsed(arguments="{}") == ["malformed_structure"] * 2
    assert parsed(status="invalid_json") == ["invalid_json"] * 2
    # what a model may write, and a parser takes
    assert parsed(name=["add"], token_span=(0, 2)) == ["missing_name"] * 2
    for number in (float("nan"), float("inf"), 10**5000):
        assert parsed(arguments={"a": number}, token_span=(0, 2)) == ["invalid_json"] * 2


def test_bug_32_a_parser_that_fails_is_a_failed_call():
    def fails(*_, **__):
        raise RecursionError("too deep")

    family = SimpleNamespace(parse_response=fails, get_stop_token_ids=lambda: [2])
    renderer = FamilyRenderer(family, "odd", TemplateRenderer(make_chat_tokenizer(), {}))
    assert renderer.parse([9], [7, 2], tools=[TOOL]).parse_status == "invalid_json"
