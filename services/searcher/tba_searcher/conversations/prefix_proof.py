"""Proves for a chat template that appended turns have the tokens of a whole rendering.

A template may write earlier messages otherwise once others follow: it drops reasoning, or moves the tools to the last
question. Chats of probes show that. Each is rendered as a whole, and as prompt, reply and appended turn. The proof is
about what the template writes around contents, so a few probes are enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

from tba_searcher.conversations.chat import Messages, RenderError, Tools

REPLIES = ("Yes.", "<think>\nSo it is.\n</think>\n\nYes.")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
    },
}
KINDS = (("user",), ("tool",), ("tool", "user"))
"""Roles of the turns that environments take."""


@dataclass(frozen=True, slots=True)
class Ways:
    """How a renderer makes text and tokens."""

    text: Callable[[Messages, Tools, bool], str]
    """Text of messages; True: up to the place where the policy replies."""
    whole: Callable[[str], list[int]]
    """Tokens of the text of a whole chat."""
    appended: Callable[[Messages, Tools], list[tuple[int, ...]]]
    """Tokens of new messages after a reply that was cut, and after one that has ended itself."""
    decode: Callable[[list[int]], str]


def unstable_reason(ways: Ways, roles: tuple[str, ...], *, has_tools: bool) -> str | None:
    """Return why new messages of these roles cannot be appended to a reply; None if they can."""
    if "assistant" in roles:
        return "the new messages hold a reply, and replies are sampled, never rendered"
    tools, new = (TOOL,) if has_tools else (), [{"role": role, "content": "Then?"} for role in roles]
    for reply, is_later in product(REPLIES, (False, True)):
        said = {"role": "assistant", "content": reply}
        prompt: list[dict[str, Any]] = [{"role": "user", "content": "Is it so?"}, *([said, *new] if is_later else [])]
        try:
            reason = _difference(ways, prompt, reply, [*prompt, said, *new], tools, len(new))
        except RenderError as error:
            reason = str(error)
        if reason is not None:
            return reason
    return None


def _difference(ways: Ways, prompt: Messages, reply: str, chat: Messages, tools: Tools, num_new: int) -> str | None:
    before, whole = ways.text(prompt, tools, True), ways.text(chat, tools, True)
    if not whole.startswith(before + reply):
        return "the chat template writes earlier messages or replies otherwise once others follow"
    ids, first, ends = ways.whole(whole), ways.whole(before), ways.appended(chat[-num_new:], tools)
    if ids[: len(first)] != first or any(ids[-len(end) :] != list(end) for end in ends):
        return "the tokens of earlier messages, or of the new ones, depend on what stands beside them"
    if ways.decode(ids[len(first) : len(ids) - len(ends[0])]).strip() != reply:
        return "the chat template writes something between a reply and the next message that no turn has"
    return None
