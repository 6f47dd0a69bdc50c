"""What every chat renderer does, and the values that it takes and gives.

    render     messages, tools          -> tokens of the prompt, up to the place where the policy replies
    parse      tokens of a reply        -> content, reasoning, tool calls
    bridge     tokens so far, messages  -> tokens to append: the end of a cut reply, the messages, the next turn

`bridge` gives only what comes behind the tokens so far, so these can never be rendered again. None of the tokens of
`render` and `bridge` was sampled: no segment here has the origin `policy`. What a template writes around a content
(the role, the end of the turn) is in the message's segment, since text and template may share a token. Segments of the
template hold what belongs to no message: the place where the policy replies, and the end of a reply that was cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tba.api.prompts import checked_messages
from tba.environments.protocol import Reply
from tba.errors import ConfigError
from tba.wire.sequences import Origin, Role, Segment

Messages = Sequence[Mapping[str, Any]]
"""In the format of OpenAI: `role`, `content`, and for some `tool_calls`, `name`, `tool_call_id`."""
Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of functions: {"type": "function", "function": {"name", "description", "parameters"}}."""
_HALF = re.compile("[\ud800-\udfff]")
_ROLES: dict[str, Role] = {"developer": "system", "function": "tool"}
_ROLES |= {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class RenderError(ConfigError):
    """The chat template cannot render these messages."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """Tokens that nobody sampled, and the segments that cover them."""

    tokens: tuple[int, ...]
    segments: tuple[Segment, ...]


class ChatRenderer(Protocol):
    """Maps between messages and the tokens of one model."""

    stop_ids: frozenset[int]
    """Token ids that end a reply."""

    def render(self, messages: Messages, *, tools: Tools = ()) -> Rendering:
        """Return the prompt for a reply to `messages`; raise RenderError if they cannot be rendered."""
        ...

    def parse(self, prompt: Sequence[int], reply: Sequence[int], *, tools: Tools = ()) -> Reply:
        """Parse the tokens of a reply to the tokens `prompt`. A call that was cut is never `ok`."""
        ...

    def bridge(
        self, prompt: Sequence[int], reply: Sequence[int], messages: Messages, *, tools: Tools = (), turn: int = 0
    ) -> Rendering | None:
        """Return what to append to `prompt` and `reply`, so that the policy replies to `messages` next.

        Args:
            prompt: all tokens before the last reply.
            reply: the tokens of the last reply, as they were sampled.
            tools: those of the whole conversation.
            turn: number of the last reply.

        Returns:
            None if the tokens would not be those of a whole rendering. Its reason is logged once. The caller then
            begins a new sequence with `render`.
        """
        ...

    def prove(self, tools: Tools = ()) -> dict[tuple[str, ...], str]:
        """Try the turns [user], [tool] and [tool, user]; return the reason for those that `bridge` cannot append."""
        ...


def checked(messages: Messages) -> list[dict[str, Any]]:
    """Return messages with the arguments of their calls as objects, as templates take them.

    Raises:
        RenderError: they are no messages, or a call has no object as arguments.
    """
    try:
        # tools may answer with bytes that are no text: half a character becomes the sign for one
        text = _HALF.sub("\ufffd", json.dumps(list(messages), ensure_ascii=False))
        found: list[dict[str, Any]] = checked_messages(json.loads(text))
        for message in found:
            # OpenAI's format has arguments as a JSON text, which a template would quote once more
            if calls := message.get("tool_calls"):
                message["tool_calls"] = [_with_object(call) for call in calls]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise RenderError(f"these messages cannot be rendered: {error}") from None
    return found


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    inner = call.get("function", call)
    arguments = inner.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {inner.get('name')!r} are no object")
    changed = {**inner, "arguments": arguments}
    return {**call, "function": changed} if "function" in call else changed


def role_of(message: Mapping[str, Any]) -> Role:
    """Return the role of a message's segment."""
    return _ROLES[message["role"]]


def segments_of(runs: Iterable[tuple[Role, Origin, int]], turn: int = 0) -> tuple[Segment, ...]:
    """Return a segment for each run of tokens (role, origin, number of tokens) that is not empty."""
    return tuple(Segment(role, origin, num, turn=turn) for role, origin, num in runs if num)


def tool_names(tools: Tools) -> frozenset[str]:
    """Return the names of tools."""
    functions = [tool.get("function", tool) for tool in tools]
    return frozenset(str(each.get("name")) for each in functions if isinstance(each, Mapping))
