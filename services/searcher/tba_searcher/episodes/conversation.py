"""The tokens of one episode while it is played, and what is left of it at its end.

Tokens are only ever appended. Where a turn cannot be appended, a new sequence begins with a rendering of the whole
history, and the replies in it are not trained again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tba.environments import Reply
from tba.environments.play import call_id
from tba.wire import Sampling, VersionSpan
from tba.wire.codec import int32_bytes
from tba.wire.sequences import (
    MAX_MESSAGES,
    MAX_SEGMENTS,
    MAX_SEGMENTS_OF_ALL,
    MAX_SEQUENCES,
    Episode,
    FinishReason,
    Message,
    Segment,
    TokenSequence,
)
from tba_searcher.conversations.chat import Rendering, role_of
from tba_searcher.engines.engine import Completion

MAX_SHOWN_CHARS = 8_000
"""Of one message that is kept for people, and a hundred times as many of all."""
_CUT = " [...]"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlayedEpisode:
    """An episode that has ended; the fields that a `Completion` has too mean the same, over all of its replies."""

    sequences: tuple[TokenSequence, ...]
    """Empty: nothing was sampled, so there is nothing to store."""
    response_tokens: NDArray[np.int32]
    sampler_logprobs: NDArray[np.float32]
    sampling: Sampling
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    started_at_s: float
    finished_at_s: float
    text: str
    """The last reply, as people and scorers read it."""
    episode: Episode
    failure: str | None
    """Why its reward is unknown: boundary, stage and detail."""
    is_hopeless: bool = False
    """Whether every attempt would fail like this one, so that the prompt is refused."""


@dataclass(slots=True)
class _OpenSequence:
    tokens: list[int]
    segments: list[Segment]
    num_kept: tuple[int, int] = (0, 0)
    """Tokens and segments up to the last reply: what comes behind it is not stored."""


@dataclass(slots=True)
class Conversation:
    """The sequences, replies and messages of an episode in progress."""

    history: list[dict[str, Any]]
    """All messages so far, as a template takes them."""
    tools: Sequence[Mapping[str, Any]]
    completions: list[Completion] = field(default_factory=list)
    """In the order of their tokens in the sequences."""
    last: Completion | None = None
    """The last reply."""
    turn_rewards: list[float | None] = field(default_factory=list)
    num_tool_calls: int = 0
    _sequences: list[_OpenSequence] = field(default_factory=list)
    _shown: list[Message] = field(default_factory=list)
    _num_shown_chars: int = 0

    @property
    def turn(self) -> int:
        """Number of the next reply."""
        return len(self.completions)

    @property
    def prompt(self) -> list[int]:
        """All tokens before the next reply."""
        return self._sequences[-1].tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(len(each.tokens) for each in self._sequences)

    @property
    def is_full(self) -> bool:
        """Whether a rollout has no room for another reply."""
        num_segments = [len(each.segments) for each in self._sequences]
        is_long = num_segments[-1] >= MAX_SEGMENTS or sum(num_segments) >= MAX_SEGMENTS_OF_ALL
        return is_long or len(self._sequences) > MAX_SEQUENCES

    @property
    def is_continued(self) -> bool:
        """Whether the prompt begins with the tokens of the last reply's."""
        return self._sequences[-1].num_kept[0] > 0

    def begin(self, rendering: Rendering) -> None:
        """Begin a sequence."""
        self._sequences.append(_OpenSequence(list(rendering.tokens), list(rendering.segments)))

    def append(self, rendering: Rendering) -> None:
        """Append the next turn up to the place where the policy replies."""
        self._sequences[-1].tokens += rendering.tokens
        self._sequences[-1].segments += rendering.segments

    def add_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Add messages of the environment to the history."""
        for message in messages:
            self.history.append(dict(message))
            self.show(message, max(self.turn - 1, 0))

    def add_reply(self, completion: Completion, reply: Reply, text: str) -> None:
        """Add a reply of the policy; `text`: all that it wrote."""
        sequence, turn = self._sequences[-1], self.turn
        sequence.tokens += completion.response_tokens.tolist()
        sequence.segments.append(policy_segment(completion, reply, turn, is_trained=True))
        sequence.num_kept = (len(sequence.tokens), len(sequence.segments))
        self.completions.append(completion)
        self.last = completion
        self.num_tool_calls += len(reply.tool_calls)
        self.history.append(reply_message(reply, turn))
        self.show({"role": "assistant", "content": text}, turn)

    def put(self, tokens: list[int], segments: list[Segment]) -> None:
        """Add a whole sequence, which ends with a reply."""
        self._sequences.append(_OpenSequence(tokens, segments, (len(tokens), len(segments))))

    def sequences(self) -> tuple[TokenSequence, ...]:
        """Return all sequences, each up to its last reply."""
        kept = [(each, *each.num_kept) for each in self._sequences if each.num_kept[0]]
        return tuple(
            TokenSequence(int32_bytes(each.tokens[:end]), tuple(each.segments[:num])) for each, end, num in kept
        )

    def played(
        self, sampling: Sampling, begun_s: float, text: str, *, failure: str | None, is_hopeless: bool, **ending: Any
    ) -> PlayedEpisode:
        """Return the episode, which ends now; `ending`: the fields of `Episode` that say what it was."""
        parts, spans, start = self.completions, list[VersionSpan](), 0
        for each in parts:
            for span in each.version_spans:
                if spans and spans[-1].version == span.version:
                    spans[-1] = VersionSpan.of(span.version, spans[-1].start, start + span.end)
                else:
                    spans.append(VersionSpan.of(span.version, start + span.start, start + span.end))
            start += len(each.response_tokens)
        none = np.empty(0)
        return PlayedEpisode(
            sequences=self.sequences(),
            response_tokens=np.concatenate([none.astype(np.int32), *(each.response_tokens for each in parts)]),
            sampler_logprobs=np.concatenate([none.astype(np.float32), *(each.sampler_logprobs for each in parts)]),
            sampling=parts[-1].sampling if parts else sampling,
            finish_reason="abort" if self.last is None else self.last.finish_reason,
            version_spans=tuple(spans),
            started_at_s=begun_s,
            finished_at_s=time.time(),
            text=text,
            episode=Episode(
                turn_rewards=tuple(self.turn_rewards[: len(parts)]),
                num_tool_calls=self.num_tool_calls,
                messages=tuple(self._shown),
                **ending,
            ),
            failure=failure,
            is_hopeless=is_hopeless,
        )

    def show(self, message: Mapping[str, Any], turn: int) -> None:
        """Keep a message for people."""
        content = str(message.get("content") or "")
        room = min(MAX_SHOWN_CHARS, 100 * MAX_SHOWN_CHARS - self._num_shown_chars)
        if room <= 0 or len(self._shown) == MAX_MESSAGES:
            return
        shown = content if len(content) <= room else content[:room] + _CUT
        self._num_shown_chars += len(shown)
        # half a character, as of bytes that are no text, cannot be stored
        shown = shown.encode(errors="replace").decode()
        self._shown.append(Message(role_of(message), shown, turn))


def policy_segment(completion: Completion, reply: Reply, turn: int, *, is_trained: bool) -> Segment:
    """Return the segment of a reply."""
    return Segment(
        "assistant",
        "policy",
        len(completion.response_tokens),
        turn=turn,
        is_trained=is_trained,
        finish_reason=completion.finish_reason,
        parse_status=reply.parse_status,
    )


def reply_message(reply: Reply, turn: int) -> dict[str, Any]:
    """Return a reply as a message; a call without arguments is no call."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    calls = [(number, call) for number, call in enumerate(reply.tool_calls) if call.arguments is not None]
    if calls:
        message["tool_calls"] = [
            {
                "id": call_id(turn, number),
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments or {})},
            }
            for number, call in calls
        ]
    return message


def with_truncated_reward(played: PlayedEpisode, reward: float) -> PlayedEpisode:
    """Return an episode that a limit ended, with the reward that its recipe gives it."""
    turn_rewards = [*played.episode.turn_rewards[:-1], (played.episode.turn_rewards[-1] or 0.0) + reward]
    episode = msgspec.structs.replace(played.episode, turn_rewards=tuple(turn_rewards))
    return replace(played, failure=None, episode=episode)
