"""Parses replies with the tool calls that most chat templates ask for (Hermes).

    <think>reasoning</think>content<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>

The parser is strict: what it cannot read is a failed call with a status, and never a call that was not made.
"""

from __future__ import annotations

import json
from collections.abc import Set
from typing import Any

from tba.environments.protocol import Reply, ToolCall

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"


def parse_reply(text: str, *, names: Set[str], is_thinking: bool) -> Reply:
    """Parse the text of a reply, without the token that ended it.

    Args:
        names: the tools that there are.
        is_thinking: whether the prompt has opened the reasoning already.
    """
    reasoning = None
    if is_thinking or text.lstrip().startswith(THINK):
        reasoning, closed, text = text.lstrip().removeprefix(THINK).partition(THINK_END)
        reasoning = reasoning.strip()
        if not closed:  # a call that was only thought of is none
            return Reply("", reasoning, ())
    content, *blocks = text.split(CALL)
    contents, calls = [content], [_stray(content)]
    for block in blocks:
        body, closed, behind = block.partition(CALL_END)
        if closed:
            calls += [_call(body, names), _stray(behind)]
            contents.append(behind)
        else:
            calls.append(ToolCall(body, "unclosed_block"))
    return Reply("".join(contents).strip(), reasoning, tuple(call for call in calls if call is not None))


def _stray(text: str) -> ToolCall | None:
    """Return the failed call of a text with an end of a call that has not begun."""
    return ToolCall(text, "malformed_structure") if CALL_END in text else None


def _call(body: str, names: Set[str]) -> ToolCall:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return ToolCall(body, "invalid_json")
    if not isinstance(value, dict):
        return ToolCall(body, "malformed_structure")
    if not value.keys() <= {"name", "arguments"}:
        return ToolCall(body, "malformed_structure")
    return checked_call(body, value.get("name"), value.get("arguments"), names)


def checked_call(raw: str, name: Any, arguments: Any, names: Set[str]) -> ToolCall:
    """Return a call with its status, whatever a model wrote as name and arguments."""
    try:
        json.dumps([name, arguments], allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):  # NaN, 1e999, a number of thousands of digits
        return ToolCall(raw, "invalid_json")
    if not isinstance(name, str) or not name:
        return ToolCall(raw, "missing_name")
    if not isinstance(arguments, dict):
        return ToolCall(raw, "malformed_structure", name)
    return ToolCall(raw, "ok" if name in names else "unknown_tool", name, arguments)
