"""Renders by the package `renderers` where it knows the family of a model.

The package knows families by the names of their models, and a run has only a folder. So a family is taken where its
rendering of several chats, with tools and calls, has the tokens of the model's own template.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from typing import Any

from pydantic import TypeAdapter

from tba.environments.protocol import Reply, ToolCall
from tba.fields import ParseStatus
from tba.logs import get_logger
from tba.wire.sequences import Origin, Role
from tba_searcher.conversations.chat import (
    ChatRenderer,
    Messages,
    RenderError,
    Rendering,
    Tools,
    checked,
    role_of,
    segments_of,
    tool_names,
)
from tba_searcher.conversations.prefix_proof import KINDS, TOOL
from tba_searcher.conversations.replies import checked_call
from tba_searcher.conversations.template import TemplateRenderer

_ASKED = {"role": "user", "content": "What is 1 + 2?"}
_CALL = {"name": "add", "arguments": {"a": 1}}
OPENINGS: tuple[Messages, ...] = ([_ASKED], [{"role": "system", "content": "Be brief."}, _ASKED])
CHATS: tuple[Messages, ...] = (
    *OPENINGS,
    [_ASKED, {"role": "assistant", "content": "3"}, {"role": "user", "content": "And 2 + 2?"}],
    [
        _ASKED,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": _CALL}]},
        {"role": "tool", "name": "add", "content": "3"},
    ],
)
REFUSED = frozenset({"gpt-oss"})
"""Families whose renderer encodes by a tokenizer of its own, which it fetches from the network."""
log = get_logger("chat")


def open_renderer(tokenizer: Any, template_kwargs: Mapping[str, Any], end_ids: Collection[int] = ()) -> ChatRenderer:
    """Return the renderer of the package for a family that it knows, else one for the chat template.

    Args:
        tokenizer: one of transformers.
        template_kwargs: arguments of the chat template.
        end_ids: more tokens that end a reply, as generation_config.json names them.

    Raises:
        RenderError: the tokenizer has no chat template.
    """
    if tokenizer.chat_template is None and "chat_template" not in template_kwargs:
        raise RenderError("prompts are messages, and the tokenizer has no chat template; give prompts as text")
    own = TemplateRenderer(tokenizer, template_kwargs, end_ids)
    return _known_renderer(tokenizer, own, template_kwargs, end_ids) or own


def _known_renderer(
    tokenizer: Any, own: TemplateRenderer, template_kwargs: Mapping[str, Any], end_ids: Collection[int]
) -> FamilyRenderer | None:
    """Return a renderer of the package for the family of a tokenizer.

    Args:
        own: renders by the tokenizer's chat template with `template_kwargs`.

    Returns:
        None if the package is not installed, or knows no family with this template and these arguments.
    """
    try:
        package = import_module("renderers")
    except ImportError:
        return None
    plain = own if not template_kwargs else TemplateRenderer(tokenizer, {}, end_ids)
    config = TypeAdapter[Any](package.RendererConfig)
    for name in sorted({*import_module("renderers.base").MODEL_RENDERER_MAP.values()} - REFUSED):
        try:
            family = package.create_renderer(plain.tokenizer, config.validate_python({"name": name}))
            if not _agree(family, plain, CHATS):
                continue
            if template_kwargs:
                named = config.validate_python({"name": name, **template_kwargs})
                family = package.create_renderer(own.tokenizer, named)
                # a family may keep in old replies what the template drops there, so that tokens stay as sampled
                if not _agree(family, own, OPENINGS):
                    continue
        except Exception:  # it lacks tokens of the family, or takes other arguments
            continue
        log.info("chats are rendered by the package renderers", family=name)
        return FamilyRenderer(family, name, own)
    return None


def _agree(family: Any, own: TemplateRenderer, chats: Sequence[Messages]) -> bool:
    for chat in chats:
        for tools in ((), (TOOL,)):
            found = family.render_ids(list(chat), tools=list(tools) or None, add_generation_prompt=True)
            if tuple(found) != own.render(chat, tools=tools).tokens:
                return False
    return True


class FamilyRenderer:
    """Implements `ChatRenderer` with a renderer of the package; `own` renders the same tokens for openings."""

    def __init__(self, family: Any, name: str, own: TemplateRenderer) -> None:
        self._family, self._name, self._tokenizer = family, name, own.tokenizer
        self.stop_ids: frozenset[int] = own.stop_ids | set(family.get_stop_token_ids())
        self._logged: set[tuple[str, ...]] = set()
        self._reason = f"the renderer {name} keeps other tokens of earlier turns, as without their reasoning"

    def render(self, messages: Messages, *, tools: Tools = ()) -> Rendering:
        """Return the prompt for a reply (see `ChatRenderer.render`)."""
        marked = self._marked(messages, tools)
        try:
            rendered = self._family.render(**marked, add_generation_prompt=True)
        except Exception as error:  # as a template, it can raise anything
            raise RenderError(f"the renderer {self._name} cannot render the messages: {error}") from None
        return _rendering(rendered.token_ids, rendered.message_indices, messages, first="system")

    def parse(self, prompt: Sequence[int], reply: Sequence[int], *, tools: Tools = ()) -> Reply:
        """Parse a reply in the form of the family (see `ChatRenderer.parse`)."""
        try:
            parsed = self._family.parse_response(list(reply), tools=list(tools) or None, prompt_ids=list(prompt))
        except Exception:  # a model may write what no parser expects: it is a failed call
            text = self._tokenizer.decode(list(reply), skip_special_tokens=True)
            return Reply(text, None, (ToolCall(text, "invalid_json"),))
        names, calls = tool_names(tools), list[ToolCall]()
        is_cut = not reply or reply[-1] not in self.stop_ids
        for number, call in enumerate(parsed.tool_calls, start=1):
            status: ParseStatus = call.status.value
            if status == "ok":
                is_last = number == len(parsed.tool_calls)
                behind = call.token_span is not None and call.token_span[1] < len(reply)
                checked_one = checked_call(call.raw, call.name, call.arguments, names)
                # some families end a call with the end of the reply alone
                is_open = is_cut and is_last and not behind and checked_one.status in ("ok", "unknown_tool")
                calls.append(ToolCall(call.raw, "unclosed_block") if is_open else checked_one)
                continue
            calls.append(ToolCall(call.raw, status))
        return Reply(parsed.content, parsed.reasoning_content, tuple(calls))

    def bridge(
        self, prompt: Sequence[int], reply: Sequence[int], messages: Messages, *, tools: Tools = (), turn: int = 0
    ) -> Rendering | None:
        """Return the tokens of the next turn (see `ChatRenderer.bridge`)."""
        old, reason = [*prompt, *reply], self._reason
        try:
            marked = self._marked(messages, tools)
            rendered = self._family.bridge_to_next_turn(
                list(prompt), list(reply), marked["messages"], tools=marked["tools"]
            )
        except Exception as error:  # messages that it does not take
            rendered, reason = None, str(error)
        if rendered is not None and rendered.token_ids[: len(old)] == old:
            at = len(old)
            return _rendering(rendered.token_ids[at:], rendered.message_indices[at:], messages, turn=turn)
        roles = tuple(str(message.get("role")) for message in messages)
        if roles not in self._logged:
            self._logged.add(roles)
            log.warning("a new turn begins a new sequence", roles=roles, reason=reason)
        return None

    def prove(self, tools: Tools = ()) -> dict[tuple[str, ...], str]:
        """Return the reason for each kind of turn that cannot be appended (see `ChatRenderer.prove`)."""
        prompt, found = self.render([_ASKED], tools=tools).tokens, dict[tuple[str, ...], str]()
        reply = self._tokenizer.encode("3", add_special_tokens=False)
        for kind in KINDS:
            new = [{"role": role, "content": "Then?"} for role in kind]
            if self.bridge(prompt, reply, new, tools=tools) is None:
                found[kind] = self._reason
        return found

    def _marked(self, messages: Messages, tools: Tools) -> dict[str, Any]:
        given = self._tokenizer.marked(list(tools)) or None
        return {"messages": self._tokenizer.marked_messages(checked(messages)), "tools": given}


def _rendering(
    ids: Sequence[int], owners: Sequence[int], messages: Messages, *, first: Role = "assistant", turn: int = 0
) -> Rendering:
    """Return a rendering.

    Args:
        owners: for each token the number of its message; -1: of none.
        first: role of the first tokens that are of none.
    """
    runs = list[tuple[Role, Origin, int]]()
    for at, owner in enumerate(owners):
        if at and owner == owners[at - 1]:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        elif owner >= 0:
            runs.append((role_of(messages[owner]), "environment", 1))
        else:  # tools before the first message, the end of a reply that was cut, or the place of the next
            runs.append((first if not at else "assistant", "template", 1))
    return Rendering(tuple(ids), segments_of(runs, turn))
