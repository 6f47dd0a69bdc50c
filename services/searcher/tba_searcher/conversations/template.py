"""Renders messages by the chat template of a tokenizer, and appends the next turn without rendering the old ones.

The text of a next turn is what the template writes after a reply of its own making:

    template of:  user, assistant DUMMY, tool    <|im_start|>...DUMMY<|im_end|>\\n<|im_start|>tool\\n5<|im_end|>\\n...
    appended                                                    ^ from here, if the reply was cut
                                                                          ^ from here, if it ended itself

`prefix_proof` shows when the tokens are then those that a whole rendering has.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from tba.environments.protocol import Reply
from tba.logs import get_logger
from tba.wire.sequences import Origin, Role
from tba_searcher.conversations.chat import (
    Messages,
    RenderError,
    Rendering,
    Tools,
    checked,
    role_of,
    segments_of,
    tool_names,
)
from tba_searcher.conversations.content_text import ESCAPED_MARK, ContentTokenizer
from tba_searcher.conversations.prefix_proof import KINDS, Ways, unstable_reason
from tba_searcher.conversations.replies import THINK, parse_reply

DUMMY = "Understood"
"""The reply that stands for the one which is never rendered: a word, which no template changes."""
_EARLIER = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": DUMMY})
_NUM_LAST = 16
"""Tokens of a prompt that may hold the beginning of a reasoning."""
Bounds = list[tuple[int, Role, Origin]]
"""For each run of text: the character after its end, its role and its origin."""
log = get_logger("chat")


class TemplateRenderer:
    """Implements `ChatRenderer` for any tokenizer of transformers with a chat template.

    Args:
        template_kwargs: arguments of the template.
        end_ids: more tokens that end a reply, as generation_config.json names them.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any], end_ids: Collection[int] = ()) -> None:
        self.tokenizer, self._kwargs = ContentTokenizer(tokenizer), dict(template_kwargs)
        bos = tokenizer.bos_token
        # a bos in the text would be doubled where the tokenizer itself puts one before every text
        has_own = bos is not None and tokenizer("1")["input_ids"][:1] == [tokenizer.bos_token_id]
        self._own_bos = str(bos) if has_own else ""
        self._turn_end = self._find_turn_end()
        ends = {tokenizer.eos_token_id, self._turn_end, *end_ids} - {None}
        self.stop_ids: frozenset[int] = frozenset(ends)
        self._reasons: dict[tuple[tuple[str, ...], bool], str | None] = {}

    def render(self, messages: Messages, *, tools: Tools = ()) -> Rendering:
        """Return the prompt for a reply (see `ChatRenderer.render`)."""
        text, bounds = self._laid_out((), checked(messages), tools)
        return self._rendering(text, bounds, begins=True)

    def parse(self, prompt: Sequence[int], reply: Sequence[int], *, tools: Tools = ()) -> Reply:
        """Parse a reply in the Hermes form (see `ChatRenderer.parse`)."""
        ids = list(reply[:-1] if reply and reply[-1] in self.stop_ids else reply)
        end = self._decoded(prompt[-_NUM_LAST:]).rstrip()
        return parse_reply(self._decoded(ids), names=tool_names(tools), is_thinking=end.endswith(THINK))

    def bridge(
        self, prompt: Sequence[int], reply: Sequence[int], messages: Messages, *, tools: Tools = (), turn: int = 0
    ) -> Rendering | None:
        """Return the tokens of the next turn (see `ChatRenderer.bridge`)."""
        kind = tuple(str(message.get("role")) for message in messages)
        try:
            messages = checked(messages)
            if self._reason_against(kind, has_tools=bool(tools)) is not None:
                return None
            return self._after_reply(messages, tools, reply[-1] if reply else None, turn)
        except RenderError as error:
            log.warning("a new turn begins a new sequence", roles=kind, reason=str(error))
            return None

    def prove(self, tools: Tools = ()) -> dict[tuple[str, ...], str]:
        """Return the reason for each kind of turn that cannot be appended (see `ChatRenderer.prove`)."""
        found = {kind: self._reason_against(kind, has_tools=bool(tools)) for kind in KINDS}
        return {kind: reason for kind, reason in found.items() if reason is not None}

    def _reason_against(self, roles: tuple[str, ...], *, has_tools: bool) -> str | None:
        """Return why new messages of these roles need a new sequence, and log it once; None: they can be appended."""
        # one message for several of a role in a row: environments may send any number
        kind = tuple(role for role, before in zip(roles, (None, *roles), strict=False) if role != before)
        if (kind, has_tools) not in self._reasons:
            reason = unstable_reason(self._ways(), kind, has_tools=has_tools)
            self._reasons[kind, has_tools] = reason
            if reason is not None:
                log.warning("a new turn begins a new sequence", roles=kind, has_tools=has_tools, reason=reason)
        return self._reasons[kind, has_tools]

    def _text(self, messages: Messages, tools: Tools, opens: bool, *, is_marked: bool = True) -> str:
        """Return what the template writes, with marks; `opens`: up to the place where the policy replies."""
        marked, given = list(messages), list(tools)
        if is_marked:
            marked, given = self.tokenizer.marked_messages(messages), self.tokenizer.marked(given)
        arguments = {**self._kwargs, **({"tools": given} if given else {})}
        try:
            text = self.tokenizer.apply_chat_template(marked, **arguments, tokenize=False, add_generation_prompt=opens)
        except Exception as error:  # a template can raise anything
            said = (str(error).splitlines() or [""])[0]
            raise RenderError(f"the chat template cannot render the messages: {type(error).__name__}: {said}") from None
        is_escaped = is_marked and ESCAPED_MARK in text
        if is_escaped and ESCAPED_MARK not in json.dumps([*messages, *tools], ensure_ascii=False):
            raise RenderError("the chat template escapes contents, so special tokens in them cannot stay text")
        return text

    def _whole(self, text: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a whole chat, and the character that each begins with."""
        bare = text.removeprefix(self._own_bos)
        ids, starts = self.tokenizer.encoded(bare, add_special_tokens=True)
        return ids, [start + len(text) - len(bare) for start in starts]

    def _after_reply(self, messages: Messages, tools: Tools, ended_by: int | None = None, turn: int = 0) -> Rendering:
        """Return what follows a reply.

        Args:
            ended_by: its last token; one that is no end of a reply was cut.
        """
        text, bounds = self._laid_out(_EARLIER, messages, tools)
        until_end, _ = self._around_end(tools)
        start = len(until_end)
        if not text.startswith(until_end):
            raise RenderError("the chat template writes a reply otherwise once a message follows")
        text, bounds = text[start:], _shifted(bounds, start)
        first = self.tokenizer.first_added(text)
        if first is None or first[0] not in {self._turn_end, ended_by}:
            return self._rendering(text, bounds, turn=turn)
        if ended_by not in self.stop_ids:  # the template ends it, and nobody has sampled that
            return self._rendering(text, [(first[1], "assistant", "template"), *bounds], turn=turn)
        # it has ended: the template's end of a turn would be a second one
        return self._rendering(text[first[1] :], _shifted(bounds, first[1]), turn=turn)

    def _laid_out(self, earlier: Messages, messages: Messages, tools: Tools) -> tuple[str, Bounds]:
        """Return the text of all messages up to the next reply, and where each of `messages` ends in it."""
        text, bounds, is_open = self._text([*earlier, *messages], tools, True), Bounds(), False
        for number, message in enumerate(messages, start=1):
            try:
                part = self._text([*earlier, *messages[:number]], tools, False)
            except RenderError:  # it takes them together alone: they share a segment
                part = None
            is_open = part is not None and text.startswith(part)
            if part is not None and is_open:
                bounds.append((len(part), role_of(message), "environment"))
        if is_open:
            bounds.append((len(text), "assistant", "template"))
        else:
            bounds.append((len(text), role_of(messages[-1]), "environment"))
        return text, bounds

    def _rendering(self, text: str, bounds: Bounds, *, begins: bool = False, turn: int = 0) -> Rendering:
        ids, starts = self._whole(text) if begins else self.tokenizer.encoded(text)
        runs, at = list[tuple[Role, Origin, int]](), 0
        for end, role, origin in bounds:
            # a token that two of them share is in the first
            until = max(at, len(ids) if end == len(text) else bisect_left(starts, end))
            runs.append((role, origin, until - at))
            at = until
        return Rendering(tuple(ids), segments_of(runs, turn))

    def _find_turn_end(self) -> int | None:
        """Return the token that the template ends a reply with; None if it writes text there, or nothing."""
        try:
            first = self.tokenizer.first_added(self._around_end(())[1])
        except RenderError:
            return None
        return None if first is None else first[0]

    def _around_end(self, tools: Tools) -> tuple[str, str]:
        """Return the text up to the last word of a reply, and the text behind it."""
        before, found, behind = self._text(_EARLIER, tools, False).rpartition(DUMMY)
        if not found:
            raise RenderError("the chat template leaves out replies")
        return before + found, behind

    def _ways(self) -> Ways:
        return Ways(
            text=partial(self._text, is_marked=False),
            whole=lambda text: self._whole(text)[0],
            appended=self._appended,
            decode=self._decoded,
        )

    def _appended(self, new: Messages, tools: Tools) -> list[tuple[int, ...]]:
        cut, ended = (self._after_reply(new, tools, end).tokens for end in (None, self._turn_end))
        if self._turn_end is not None and cut == ended:
            raise RenderError("the chat template ends a reply with another token once a message follows")
        return [cut, ended]

    def _decoded(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _shifted(bounds: Bounds, by: int) -> Bounds:
    return [(max(end - by, 0), role, origin) for end, role, origin in bounds]
