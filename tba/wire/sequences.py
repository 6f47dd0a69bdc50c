"""The tokens of a rollout: sequences of segments, each segment with one role and one origin.

    one turn         [user: environment][assistant: policy, trained]
    conversation     [user][assistant: trained][tool: environment][template][assistant: trained]
    another history  [user][assistant: trained] and [user][assistant: policy][user][assistant: trained]

Tokens are kept as they were sampled, and never rendered again. A history that was rewritten begins another sequence,
which repeats what it still shows. A reply is trained in one sequence alone, so each sampled token counts once. Text
that the environment or the template wrote is never trained: the later replies depend on it, the loss does not
(docs/adr/0057-conversations.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike, NDArray

from tba.fields import ParseStatus, control_character_error, is_bounded
from tba.wire.codec import Document, Name, int32_bytes

MAX_TOKENS = 131_072
"""Most tokens of a rollout, over all of its sequences."""
MAX_TEXT_CHARS = 1_000_000
MAX_SEQUENCES = 256
MAX_SEGMENTS = 4096
"""Most segments of a sequence, and most turns of a rollout."""
MAX_SEGMENTS_OF_ALL = 16_384
"""Most segments of a rollout."""
MAX_MESSAGES = 4096
MAX_ENVIRONMENT_SEED = 2**53 - 1
"""The largest whole number that JSON keeps in every reader."""

MAX_SEAT = 255

TokenBytes = Annotated[bytes, Meta(max_length=4 * MAX_TOKENS)]
"""Raw little-endian int32 token ids, or float32 log-probs."""
Edge = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Role = Literal["system", "user", "assistant", "tool"]
Origin = Literal["template", "environment", "policy"]
FinishReason = Literal["stop", "stop_string", "length", "abort"]


class Segment(Document, array_like=True, frozen=True):
    """A run of `num_tokens` tokens of a sequence.

    `turn` numbers the replies of the rollout from 0; what the environment writes has the turn of the reply it answers,
    or 0. `finish_reason` says how a reply of the policy ended, and `parse_status` what its tool calls were.
    """

    role: Role
    origin: Origin
    num_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    turn: Annotated[int, Meta(ge=0, le=MAX_SEGMENTS)] = 0
    is_trained: bool = False
    finish_reason: FinishReason | None = None
    parse_status: ParseStatus | None = None


class TokenSequence(Document, array_like=True, frozen=True, gc=True, dict=True):
    """The tokens of one path through a rollout's conversation; its segments cover every token, in order."""

    token_bytes: TokenBytes
    segments: Annotated[tuple[Segment, ...], Meta(min_length=1, max_length=MAX_SEGMENTS)]

    @cached_property
    def tokens(self) -> NDArray[np.int32]:
        """Token ids, int32 [L]."""
        return np.frombuffer(self.token_bytes, "<i4")

    @cached_property
    def trained_spans(self) -> list[tuple[int, int]]:
        """First token, and the token after the last one, of each trained segment, in order."""
        spans, start = [], 0
        for segment in self.segments:
            if segment.is_trained:
                spans.append((start, start + segment.num_tokens))
            start += segment.num_tokens
        return spans


def single_turn(prompt: ArrayLike, response: ArrayLike, finish_reason: FinishReason) -> tuple[TokenSequence]:
    """Return the sequences of one prompt and the policy's response to it."""
    prompt_bytes, response_bytes = int32_bytes(prompt), int32_bytes(response)
    segments = (
        Segment("user", "environment", len(prompt_bytes) // 4),
        Segment("assistant", "policy", len(response_bytes) // 4, is_trained=True, finish_reason=finish_reason),
    )
    return (TokenSequence(prompt_bytes + response_bytes, segments),)


def last_finish_reason(sequences: Sequence[TokenSequence]) -> FinishReason:
    """Return how the trained reply with the highest turn ended."""
    last = last_reply(sequences)
    return "abort" if last is None or last.finish_reason is None else last.finish_reason


def last_reply(sequences: Sequence[TokenSequence]) -> Segment | None:
    """Return the trained reply with the highest turn; None: nothing is trained."""
    replies = [each for sequence in sequences for each in sequence.segments if each.is_trained]
    return max(replies, key=lambda each: each.turn, default=None)


class Message(Document, frozen=True, omit_defaults=True):
    """A message of a conversation, for people; nothing trains on its text."""

    role: Role
    content: Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
    turn: Annotated[int, Meta(ge=0, le=MAX_SEGMENTS)] = 0


class Episode(Document, frozen=True, kw_only=True, omit_defaults=True, gc=True):
    """One play of an environment, from its reset to its end, as one seat saw it.

    Rollouts of one group have the same prompt, `seed` and `seat`: with equal replies they get equal answers.
    """

    episode_id: Name
    environment: Name
    environment_version: Name
    seed: Annotated[int, Meta(ge=0, le=MAX_ENVIRONMENT_SEED)]
    seat: Annotated[int, Meta(ge=0, le=MAX_SEAT)] = 0
    stop_condition: Name
    """What ended it: the environment, or the limit that it reached."""
    is_truncated: bool = False
    """Whether a limit ended it, and not the environment or the policy."""
    turn_rewards: Annotated[tuple[float | None, ...], Meta(max_length=MAX_SEGMENTS)] = ()
    """What the environment paid for each turn; None: nothing yet. The reward of the rollout is its own field."""
    num_tool_calls: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    messages: Annotated[tuple[Message, ...], Meta(max_length=MAX_MESSAGES)] = ()

    @property
    def paid(self) -> float | None:
        """What the environment has paid in all; None: nothing is known."""
        known = [reward for reward in self.turn_rewards if reward is not None]
        return sum(known) if known else None


def sequences_problem(sequences: Sequence[TokenSequence], num_logprobs: int, *, is_episode: bool) -> str | None:
    """Return a sentence about a broken rule of the sequences of a rollout; None if none is broken.

    Args:
        num_logprobs: how many sampler log-probs the rollout has.
        is_episode: whether it is a conversation; if not, it has one sequence with one reply, at its end.
    """
    # nearly all rollouts are a prompt and its response: one look at them costs a third of the loop
    if len(sequences) == 1 and len(sequences[0].segments) == 2:
        prompt, reply = sequences[0].segments
        if (
            prompt.origin != "policy"
            and prompt.finish_reason is None
            and not prompt.is_trained
            and prompt.parse_status is None
            and reply.origin == "policy"
            and reply.role == "assistant"
            and reply.finish_reason is not None
            and reply.is_trained
            and reply.num_tokens == num_logprobs
            and 4 * (prompt.num_tokens + num_logprobs) == len(sequences[0].token_bytes)
        ):
            return None
    num_tokens, num_trained, num_segments, turns = 0, 0, 0, set[int]()
    for at, sequence in enumerate(sequences):
        start, num_before, last_turn = num_tokens, num_trained, -1
        num_segments += len(sequence.segments)
        for segment in sequence.segments:
            is_policy = segment.origin == "policy"
            if is_policy != (segment.finish_reason is not None) or (is_policy and segment.role != "assistant"):
                return (
                    f"a segment of sequence {at} has role {segment.role!r}, origin {segment.origin!r} and "
                    f"finish_reason {segment.finish_reason!r}; replies of the policy, and no others, are of role "
                    "'assistant' and say how they ended"
                )
            if segment.is_trained:
                # the first token of a sequence has nothing that predicts it
                if not is_policy or num_tokens == start:
                    return (
                        f"sequence {at} trains a segment of origin {segment.origin!r} that begins at token "
                        f"{num_tokens - start}"
                    )
                if segment.turn in turns:
                    return f"the reply of turn {segment.turn} is trained twice; a sampled token counts once"
                if segment.turn < last_turn:
                    return f"sequence {at} has turn {segment.turn} after turn {last_turn}; turns of a sequence ascend"
                last_turn = segment.turn
                turns.add(segment.turn)
                num_trained += segment.num_tokens
            elif segment.parse_status is not None and not is_policy:
                return f"a segment of origin {segment.origin!r} has parse_status {segment.parse_status!r}"
            num_tokens += segment.num_tokens
        if (num_tokens - start) * 4 != len(sequence.token_bytes):
            size = len(sequence.token_bytes)
            return (
                f"the segments of sequence {at} have {num_tokens - start} tokens, its tokens {size} bytes (4 for each)"
            )
        if num_trained == num_before:
            return f"sequence {at} of {len(sequences)} trains nothing; leave it out"
    if num_tokens > MAX_TOKENS:
        return f"its sequences have {num_tokens} tokens, more than {MAX_TOKENS}"
    if num_segments > MAX_SEGMENTS_OF_ALL:
        return f"its sequences have {num_segments} segments, more than {MAX_SEGMENTS_OF_ALL}"
    if num_trained != num_logprobs:
        return f"it has {num_logprobs} sampler_logprobs for {num_trained} trained tokens"
    if not is_episode and (len(sequences) > 1 or len(turns) > 1 or not sequences[0].segments[-1].is_trained):
        return (
            f"it has no episode, but {len(sequences)} sequences with {len(turns)} replies; one that ends it is allowed"
        )
    return None


def episode_problem(episode: Episode, sequences: Sequence[TokenSequence]) -> str | None:
    """Return a sentence about a broken rule of an episode of valid sequences; None if none is broken."""
    for name in ("episode_id", "environment", "environment_version", "stop_condition"):
        # they go into logs, terminals and labels of metrics
        if problem := control_character_error(getattr(episode, name)):
            return f"field 'episode.{name}' {problem} (value {getattr(episode, name)!r})"
    last = last_reply(sequences)
    if last is not None and len(episode.turn_rewards) > last.turn + 1:
        return f"episode.turn_rewards have {len(episode.turn_rewards)} rewards, and the last turn is {last.turn}"
    for reward in episode.turn_rewards:
        if reward is not None and not is_bounded(reward):
            return f"episode.turn_rewards hold {reward}, which is no bounded number"
    num_chars = sum(len(message.content) for message in episode.messages)
    if num_chars > MAX_TEXT_CHARS:
        return f"episode.messages have {num_chars} characters, more than {MAX_TEXT_CHARS}"
    return None
