"""Records the model calls of an agent that plays its episode itself, and makes the sequences of a rollout of them.

    call         the tokens before a reply, and the reply as it was sampled
    parent       the call with the most tokens that a prompt begins with, token for token
    sequence     the path to a call that no other has for a parent; what paths share is trained in the first alone

An agent may rewrite its history, go on from an earlier call, or ask again: a prompt that no call's tokens begin makes
a path of its own. A reply that its limit cut has no children: a prompt that repeats it shows it as plain text.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tba.environments import EpisodeError, Reply
from tba.wire.sequences import MAX_SEGMENTS, MAX_SEGMENTS_OF_ALL, MAX_SEQUENCES, Segment
from tba_searcher.conversations.chat import ChatRenderer, Messages, Rendering, Tools, checked, segments_of
from tba_searcher.engines.engine import Completion, Request
from tba_searcher.engines.tokenizer import TextCodec
from tba_searcher.episodes.conversation import Conversation, policy_segment, reply_message


class CallRefusedError(Exception):
    """A limit does not allow a reply."""


@dataclass(slots=True, eq=False)
class Call:
    """One model call that has been answered."""

    parent: Call | None
    tokens: NDArray[np.int32]
    """Of the prompt and the reply."""
    rendering: Rendering
    """What stands between the parent's tokens and the reply."""
    completion: Completion
    reply: Reply
    text: str
    history: list[dict[str, Any]] | None
    """All messages up to the reply; None: the agent rendered them itself."""
    tools: Tools
    new_messages: Messages
    num_segments: int
    """Of the path that ends with the reply."""
    is_lost: bool = False
    """Whether the agent never got the reply, or asked for another one instead."""

    @property
    def prompt(self) -> NDArray[np.int32]:
        """The tokens before the reply."""
        return self.tokens[: -len(self.completion.response_tokens)]


class Recorder:
    """Samples the replies of one episode within the limits of its recipe, and keeps each with its tokens.

    Args:
        sample: returns the engine's reply to a request.
        request: the settings of every reply; its id begins their ids.
        limits: most tokens before a reply, of a reply, and of a rollout; and most replies.
    """

    def __init__(
        self,
        sample: Callable[[Request], Awaitable[Completion]],
        request: Request,
        *,
        renderer: ChatRenderer,
        codec: TextCodec,
        limits: tuple[int, int, int, int],
    ) -> None:
        self._sample, self._request, self._renderer, self._codec = sample, request, renderer, codec
        self._limits = limits
        self._sessions: defaultdict[str, list[Call]] = defaultdict(list)
        self._num_tokens: defaultdict[str, int] = defaultdict(int)
        self._num_begun: defaultdict[str, int] = defaultdict(int)
        self._num_paths: defaultdict[str, int] = defaultdict(int)
        self._num_segments: defaultdict[str, int] = defaultdict(int)
        self._continued: set[int] = set()
        """Ids of the calls that another one goes on from, even if it has no reply yet."""
        self._num_calls, self._num_open = 0, 0
        self._idle_since_s, self._idle_s = time.monotonic(), 0.0
        self.truncated: dict[str, str] = {}
        """The limit that each session has reached."""
        self.failure: EpisodeError | None = None
        """Of the engine."""

    @property
    def idle_s(self) -> tuple[float, float]:
        """Seconds that the agent has asked for nothing: since its last call, and in all."""
        now_s = 0.0 if self._num_open else time.monotonic() - self._idle_since_s
        return now_s, self._idle_s + now_s

    @property
    def num_answered(self) -> int:
        """Number of all calls that got a reply."""
        return sum(map(len, self._sessions.values()))

    @property
    def only_session(self) -> str | None:
        """The session of all calls; None: there are several, or none."""
        return next(iter(self._sessions)) if len(self._sessions) == 1 else None

    def num_calls(self, session: str) -> int:
        """Return how many calls of a session got a reply."""
        return len(self._sessions[session])

    async def reply_to_tokens(self, session: str, prompt: Sequence[int], max_tokens: int | None) -> Call:
        """Return the reply to tokens that the agent rendered; raise CallRefusedError if a limit forbids one."""
        tokens = np.array(prompt, np.int32)
        parent = self._parent(session, tokens)
        gap = tokens[0 if parent is None else len(parent.tokens) :]
        rendering = Rendering(tuple(gap.tolist()), segments_of([("user", "environment", len(gap))]))
        shown = [{"role": "user", "content": text} for text in self._codec.decode([gap.tolist()]) if text]
        return await self._reply(session, parent, rendering, None, (), shown, max_tokens)

    async def reply_to_messages(self, session: str, messages: Messages, tools: Tools, max_tokens: int | None) -> Call:
        """Return the reply to a whole history, whose earlier replies keep the tokens that were sampled.

        Raises:
            CallRefusedError: a limit forbids a reply.
            RenderError: the messages cannot be rendered.
        """
        history = checked(messages)
        parent, rendering, num_known = None, None, 0
        for call in self._sessions[session]:
            known = call.history or ()
            new = history[len(known) :]
            is_open = call.completion.finish_reason != "length" and call.tools == tools
            is_last = max(num_known, 1) <= len(known) and new and all(each["role"] != "assistant" for each in new)
            if is_open and is_last and _same(known, history):  # the slowest comes last
                prompt, reply = call.prompt.tolist(), call.completion.response_tokens.tolist()
                bridge = self._renderer.bridge(prompt, reply, new, tools=tools)
                if bridge is not None:
                    parent, rendering, num_known = call, bridge, len(known)
        if rendering is None:
            rendering = self._renderer.render(history, tools=tools)
        return await self._reply(session, parent, rendering, history, tools, history[num_known:], max_tokens)

    def conversation(self, session: str | None) -> Conversation:
        """Return the calls of a session (None: the first with any) as the sequences of a rollout."""
        talk = Conversation([], ())
        session = next((name for name, calls in self._sessions.items() if calls), "") if session is None else session
        parents = self._parents(session)
        calls = [each for each in self._sessions[session] if not each.is_lost or id(each) in parents]
        turns = {id(call): turn for turn, call in enumerate(calls)}
        trained: set[int] = set()
        for leaf in calls:
            if id(leaf) in parents:
                continue
            path: list[Call] = []
            at: Call | None = leaf
            while at is not None:
                path.append(at)
                at = at.parent
            path.reverse()
            segments: list[Segment] = []
            for call in path:
                turn, is_new = turns[id(call)], id(call) not in trained
                before = 0 if call.parent is None else turns[id(call.parent)]
                segments += [_with_turn(each, before) for each in call.rendering.segments]
                segments.append(policy_segment(call.completion, call.reply, turn, is_trained=is_new))
                if is_new:
                    trained.add(id(call))
                    talk.completions.append(call.completion)
            talk.put(leaf.tokens.tolist(), segments)
        for call in calls:
            before = 0 if call.parent is None else turns[id(call.parent)]
            for message in call.new_messages:
                talk.show(message, before)
            talk.show({"role": "assistant", "content": call.text}, turns[id(call)])
            talk.num_tool_calls += len(call.reply.tool_calls)
            talk.turn_rewards.append(None)
            talk.last = call.completion
        return talk

    def _parents(self, session: str) -> set[int]:
        """Return the ids of the calls that the agent went on from."""
        found: set[int] = set()
        for call in reversed(self._sessions[session]):  # children come after their parents
            if call.parent is not None and (not call.is_lost or id(call) in found):
                found.add(id(call.parent))
        return found

    def _parent(self, session: str, prompt: NDArray[np.int32]) -> Call | None:
        """Return the answered call with the most tokens that a prompt begins with."""
        found = None
        for call in self._sessions[session]:
            size = len(call.tokens)
            if (
                call.completion.finish_reason != "length"
                and size <= len(prompt)
                and (found is None or size >= len(found.tokens))
                and np.array_equal(call.tokens, prompt[:size])
            ):
                found = call
        return found

    async def _reply(
        self,
        session: str,
        parent: Call | None,
        rendering: Rendering,
        history: list[dict[str, Any]] | None,
        tools: Tools,
        shown: Messages,
        max_tokens: int | None,
    ) -> Call:
        max_prompt, max_reply, max_rollout, max_turns = self._limits
        start = np.empty(0, np.int32) if parent is None else parent.tokens
        prompt = np.concatenate([start, np.array(rendering.tokens, np.int32)])
        calls, num_begun = self._sessions[session], self._num_begun[session]
        # a path of its own repeats what stands before
        is_next = parent is not None and id(parent) not in self._continued
        num_new = len(rendering.tokens) if is_next else len(prompt)
        room = min(max_reply, max_rollout - self._num_tokens[session] - num_new)
        num_in_path = (0 if parent is None else parent.num_segments) + len(rendering.segments) + 1
        num_segments = self._num_segments[session] + (len(rendering.segments) + 1 if is_next else num_in_path)
        num_paths = self._num_paths[session] + (not is_next)
        limit = None
        if len(prompt) > max_prompt:
            limit = "max_prompt_tokens"
        elif room < max(1, self._request.min_response_tokens):
            limit = "max_tokens"
        elif num_begun >= max_turns:
            limit = "max_turns"
        elif num_paths > MAX_SEQUENCES or num_in_path > MAX_SEGMENTS or num_segments > MAX_SEGMENTS_OF_ALL:
            limit = "max_segments"
        if limit is not None:
            self.truncated.setdefault(session, limit)
            raise CallRefusedError(f"no reply: the episode has reached {limit} of its recipe")
        asked = room if max_tokens is None else max(1, min(room, max_tokens))
        number, used, was_long = self._num_calls, 0, self.truncated.get(session) == "max_prompt_tokens"
        self._num_calls += 1
        self._num_begun[session] += 1
        self._num_paths[session], self._num_segments[session] = num_paths, num_segments
        self._continued.add(id(parent))
        self._num_tokens[session] += num_new + asked
        if not self._num_open:
            self._idle_s += time.monotonic() - self._idle_since_s
        self._num_open += 1
        repeated = [each for each in calls if np.array_equal(each.prompt, prompt)]
        try:
            completion = await self._sample(
                replace(
                    self._request,
                    request_id=f"{self._request.request_id}.{number}",
                    prompt_tokens=tuple(prompt.tolist()),
                    max_response_tokens=asked,
                    min_response_tokens=min(asked, self._request.min_response_tokens),
                    # an engine may still hold the keys and values of the call before
                    continues=None if parent is None else parent.completion.request_id,
                    may_continue=num_begun + 1 < max_turns,
                )
            )
            used = num_new + len(completion.response_tokens)
        except EpisodeError as error:
            self.failure = error
            raise
        finally:
            self._num_tokens[session] += used - num_new - asked
            self._num_open -= 1
            self._idle_since_s = time.monotonic()
        ids = completion.response_tokens.tolist()
        if was_long:
            self.truncated.pop(session, None)  # the agent has shortened its history
        if completion.finish_reason == "length" and asked == room:
            self.truncated.setdefault(session, "max_response_tokens" if room == max_reply else "max_tokens")
        reply = self._renderer.parse(prompt.tolist(), ids, tools=tools)
        if history is None:  # only the agent knows the tools
            reply = replace(
                reply,
                tool_calls=tuple(
                    replace(each, status="ok") if each.status == "unknown_tool" else each for each in reply.tool_calls
                ),
            )
        (text,) = self._codec.decode_responses([completion])
        call = Call(
            parent=parent,
            tokens=np.concatenate([prompt, completion.response_tokens]),
            rendering=rendering,
            completion=completion,
            reply=reply,
            text=text,
            history=None if history is None else [*history, _message(completion, reply, text, len(calls))],
            tools=tools,
            new_messages=shown,
            num_segments=num_in_path,
        )
        for each in repeated:  # asked again: the agent did not take the first reply
            each.is_lost = True
        calls.append(call)
        return call


def _with_turn(segment: Segment, turn: int) -> Segment:
    """Return a segment of a template or an environment with the turn that it answers."""
    return Segment(segment.role, segment.origin, segment.num_tokens, turn=turn)


def _message(completion: Completion, reply: Reply, text: str, turn: int) -> dict[str, Any]:
    """Return a reply as the agent gets it: with its calls, or as plain text if it was cut or a call is broken."""
    if completion.finish_reason == "length" or any(each.status != "ok" for each in reply.tool_calls):
        return {"role": "assistant", "content": text}
    return reply_message(reply, turn)


def _same(known: Sequence[Mapping[str, Any]], history: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a history begins with known messages; clients leave out reasoning, and empty fields."""
    return all(map(lambda a, b: _plain(a) == _plain(b), known, history))


def _plain(message: Mapping[str, Any]) -> str:
    calls = [
        (each.get("function", each).get("name"), each.get("function", each).get("arguments"))
        for each in (message.get("tool_calls") or ())
    ]
    return json.dumps(
        [message["role"], message.get("content") or "", calls, message.get("tool_call_id")], sort_keys=True
    )
