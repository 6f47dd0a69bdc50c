"""The formats of a rollout (what a policy answered, with all data to train on it) and of a push of rollouts.

msgspec checks the structure of a rollout (fields, types, lengths, ranges) while it decodes. `_broken_rule` checks the
rules between fields. `_bad_numbers` checks the arrays of many rollouts at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Annotated, Literal, cast, get_args

import msgspec
import numpy as np
from msgspec import Meta, field
from numpy.typing import NDArray

from tba.errors import LimitError, MalformedError, WireError
from tba.fields import MAX_LINEAGE, MAX_NUMBER, MAX_SEED, MAX_STEP, Boundary, control_character_error, is_bounded
from tba.versions import PolicyVersion
from tba.wire.codec import Document, Name, NoSchema, pack, unpack
from tba.wire.sequences import (
    MAX_SEQUENCES,
    MAX_TEXT_CHARS,
    Edge,
    Episode,
    FinishReason,
    TokenBytes,
    TokenSequence,
    episode_problem,
    last_finish_reason,
    sequences_problem,
)

SCHEMA = 2
ID_BYTES = 16
MAX_REWARD_PARTS = 256
MAX_LOGPROB = np.float32(1e-4)
"""Largest accepted log-prob: float32 softmax may round to a little above 0."""

Lineage = Annotated[int, Meta(ge=0, le=MAX_LINEAGE)]
Step = Annotated[int, Meta(ge=0, le=MAX_STEP)]
RewardStatus = Literal["scored", "pending", "failed"]
RewardParts = Annotated[dict[str, float], Meta(min_length=1, max_length=MAX_REWARD_PARTS)]
_PART_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Names that a recipe may give to scorers."""
# the rollouts of a push carry few different versions
_version = lru_cache(maxsize=4096)(PolicyVersion)


class VersionSpan(Document, array_like=True, frozen=True):
    """Sampled tokens [start, end) are of `version`; a weight update during a response begins a new span."""

    lineage: Lineage
    step: Step
    start: Edge
    end: Edge

    @classmethod
    def of(cls, version: PolicyVersion, start: int, end: int) -> VersionSpan:
        """Return the span of the tokens [start, end) for a version."""
        return cls(version.lineage, version.step, start, end)

    @property
    def version(self) -> PolicyVersion:
        """The weights that sampled these tokens."""
        return _version(self.lineage, self.step)


class Sampling(Document, frozen=True):
    """Settings of the behaviour policy. `temperature` 0 means greedy; `top_p` 1 and `top_k` 0 mean off."""

    # no defaults: a rollout that does not say how it was sampled is refused
    temperature: float
    top_p: float
    top_k: Annotated[int, Meta(ge=0, le=10_000_000)]
    seed: Annotated[int, Meta(ge=-MAX_SEED, le=MAX_SEED)] | None
    stop: tuple[str, ...]

    @classmethod
    def of(
        cls,
        temperature: float,
        *,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: tuple[str, ...] = (),
    ) -> Sampling:
        """Return settings; each one that is not given is off."""
        return cls(float(temperature), float(top_p), top_k, seed, stop)


class RefLogprob(Document, array_like=True, frozen=True):
    """Sum of the ref log-probs of the response tokens, and the version of the reference that computed them."""

    value: float
    lineage: Lineage
    step: Step

    @classmethod
    def of(cls, value: float, version: PolicyVersion) -> RefLogprob:
        """Return the sum `value` for a version of the reference."""
        return cls(float(value), version.lineage, version.step)

    @property
    def version(self) -> PolicyVersion:
        """The version of the reference."""
        return _version(self.lineage, self.step)


class Rollout(
    Document,
    frozen=True,
    kw_only=True,
    eq=False,
    gc=True,
    dict=True,
    omit_defaults=True,
    tag_field="schema",
    tag=SCHEMA,
):
    """One sampled completion, or one conversation; these fields are the format on the wire and in Redis.

    Its replies have N >= 1 tokens, including the end-of-sequence tokens that the policy sampled. `sampler_logprobs` are
    log-probs of the behaviour policy, at the sampling temperature. `reward` is a number exactly when `reward_status` is
    `scored`: a failed score is unknown, never 0. `reward_parts`: scorer name -> known score, before weights; None: not
    known, or there is only one score, which is the reward (`storable_parts`). Times are Unix seconds.
    """

    rollout_id: bytes
    run: Name
    task: Name
    prompt_id: Name
    visit_id: Name
    sequences: Annotated[tuple[TokenSequence, ...], Meta(min_length=1, max_length=MAX_SEQUENCES)]
    response_text: Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
    """Text of the last reply."""
    version_spans: Annotated[tuple[VersionSpan, ...], Meta(min_length=1)]
    sampling: Sampling
    logprob_bytes: TokenBytes = field(name="sampler_logprobs")
    """Raw little-endian float32 [N]."""
    ref_logprob: RefLogprob | None
    reward: float | None
    reward_status: RewardStatus
    reward_reason: str | None
    reward_version: str | None
    searcher_id: Name
    started_at_s: float
    finished_at_s: float
    reward_parts: RewardParts | None = None
    episode: Episode | None = None
    """The play of an environment that this is; None: one response to a prompt."""

    @cached_property
    def prompt_tokens(self) -> NDArray[np.int32]:
        """Tokens before the first trained reply, int32 [P], P >= 1."""
        first = self.sequences[0]
        return first.tokens[: first.trained_spans[0][0]]

    @cached_property
    def response_tokens(self) -> NDArray[np.int32]:
        """Tokens that the policy sampled, reply after reply: those that are trained, int32 [N]."""
        parts = [each.tokens[start:end] for each in self.sequences for start, end in each.trained_spans]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @cached_property
    def sampler_logprobs(self) -> NDArray[np.float32]:
        """Log-probs of `response_tokens` under the behaviour policy, float32 [N]."""
        return np.frombuffer(self.logprob_bytes, "<f4")

    @property
    def num_sampled(self) -> int:
        """N, the number of tokens that the policy sampled."""
        return len(self.logprob_bytes) // 4

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return sum(len(each.token_bytes) for each in self.sequences) // 4

    @property
    def finish_reason(self) -> FinishReason:
        """How the last trained reply ended."""
        return last_finish_reason(self.sequences)

    @property
    def num_replies(self) -> int:
        """Number of trained replies: the turns of a conversation."""
        return sum(len(each.trained_spans) for each in self.sequences)

    @property
    def is_truncated(self) -> bool:
        """Whether a limit ended it: that of the response, or one of the episode."""
        return self.finish_reason == "length" if self.episode is None else self.episode.is_truncated

    @property
    def version(self) -> PolicyVersion:
        """The oldest version that sampled a token of this rollout; policy age is measured from this version."""
        return min([span.version for span in self.version_spans])

    def with_reward(self, reward: float, reward_version: str, reward_parts: dict[str, float] | None = None) -> Rollout:
        """Return a copy with a reward and the status `scored`."""
        return msgspec.structs.replace(
            self,
            reward=float(reward),
            reward_status="scored",
            reward_reason=None,
            reward_version=reward_version,
            reward_parts=reward_parts,
        )

    def with_failure(self, reason: str) -> Rollout:
        """Return a copy with status `failed` and no reward; `reward_version` stays that of the last known reward."""
        return msgspec.structs.replace(
            self, reward=None, reward_status="failed", reward_reason=reason, reward_parts=None
        )


def failure_boundary(reward_reason: str | None) -> Boundary | None:
    """Return the part that an episode failed in, by the reason of its unknown reward; None: it has not failed."""
    # the runner writes BOUNDARY STAGE: DETAIL; reasons of scorers are one word before the colon
    word, _, rest = (reward_reason or "").partition(" ")
    return cast("Boundary", word) if rest and word in get_args(Boundary) else None


_DECODER = msgspec.msgpack.Decoder(Rollout | NoSchema)


def encode_rollout(rollout: Rollout) -> bytes:
    """Encode one rollout as msgpack, without validation (`decode_rollout` validates)."""
    return pack(rollout)


def decode_rollout(data: bytes) -> Rollout:
    """Decode and validate one rollout.

    Raises:
        MalformedError, SchemaVersionError, LimitError: the message names the field and the value.
    """
    (item,) = decode_rollouts([data])
    if isinstance(item, WireError):
        raise item
    return item


def decode_rollouts(payloads: Sequence[bytes]) -> list[Rollout | WireError]:
    """Decode and validate many rollouts; return for each payload its rollout, or the error that refuses it."""
    items: list[Rollout | WireError] = []
    for payload in payloads:
        try:
            rollout = unpack(payload, _DECODER, what="rollout", schema=SCHEMA)
        except WireError as error:
            items.append(error)
            continue
        problem = _broken_rule(rollout)
        items.append(rollout if problem is None else _refusal(rollout, problem))
    rollouts = [item for item in items if isinstance(item, Rollout)]
    # all arrays at once, because a check per rollout would cost more than its decoding; only a bad push is searched
    if rollouts and _bad_numbers(rollouts):
        for at, item in enumerate(items):
            if isinstance(item, Rollout) and (problem := _bad_numbers([item])):
                items[at] = _refusal(item, problem)
    return items


def _refusal(rollout: Rollout, problem: str) -> WireError:
    return MalformedError(f"rollout {rollout.rollout_id[:ID_BYTES].hex()}: {problem}")


def _bad_numbers(rollouts: Sequence[Rollout]) -> str | None:
    """Return a sentence about a value of the arrays that is no token id or no log-prob; None if all are valid."""
    parts = [each.token_bytes for rollout in rollouts for each in rollout.sequences]
    lowest = np.frombuffer(b"".join(parts), "<i4").min()
    if lowest < 0:
        return f"field 'sequences' holds {lowest}; token ids must not be negative"
    logprobs = np.frombuffer(b"".join([rollout.logprob_bytes for rollout in rollouts]), "<f4")
    lowest, highest = logprobs.min(), logprobs.max()
    # both are NaN if any log-prob is, and NaN compares as false
    if not (lowest >= -MAX_NUMBER and highest <= MAX_NUMBER):
        bad = float(highest if lowest >= -MAX_NUMBER else lowest)
        return f"field 'sampler_logprobs' holds {bad}, {_unbounded(bad)}"
    if highest > MAX_LOGPROB:
        return f"field 'sampler_logprobs' holds {highest:.4g}, above 0"
    return None


def _broken_rule(rollout: Rollout) -> str | None:
    """Return a sentence about a broken rule between fields; None if none is broken."""
    sampling, ref, reward, status = rollout.sampling, rollout.ref_logprob, rollout.reward, rollout.reward_status
    if len(rollout.rollout_id) != ID_BYTES:
        return f"field 'rollout_id' must be {ID_BYTES} bytes, got {len(rollout.rollout_id)}"
    # the id goes into logs and terminals, where a control character could forge lines; isprintable is the cheap test
    if not rollout.searcher_id.isprintable() and (problem := control_character_error(rollout.searcher_id)):
        return f"field 'searcher_id' {problem} (value {rollout.searcher_id!r})"
    num_sampled, rest = divmod(len(rollout.logprob_bytes), 4)
    if rest:
        return f"sampler_logprobs have {len(rollout.logprob_bytes)} bytes; each has 4"
    if problem := sequences_problem(rollout.sequences, num_sampled, is_episode=rollout.episode is not None):
        return problem
    # every sampled token belongs to exactly one span: policy age is measured from the oldest of them
    edge = 0
    for span in rollout.version_spans:
        if span.start != edge or span.end <= edge:
            edge = -1
            break
        edge = span.end
    if edge != num_sampled:
        return (
            f"version_spans must cover the {num_sampled} trained tokens in order and without gaps, got "
            f"{rollout.version_spans[:4]}"
        )
    if not (0 <= sampling.temperature <= MAX_NUMBER and 0 < sampling.top_p <= 1):
        return (
            f"sampling.temperature must be from 0 to {MAX_NUMBER:g} and sampling.top_p in (0, 1], got "
            f"{sampling.temperature} and {sampling.top_p}"
        )
    if not (is_bounded(rollout.started_at_s) and is_bounded(rollout.finished_at_s)):
        return f"started_at_s {rollout.started_at_s} or finished_at_s {rollout.finished_at_s} is no time"
    if ref is not None and not is_bounded(ref.value):
        return f"field 'ref_logprob' is {ref.value}, {_unbounded(ref.value)}"
    # a failed score must never look like a number, not even like 0
    if (reward is not None) != (status == "scored"):
        return f"reward is {reward} but reward_status is {status!r}; only 'scored' takes a number"
    if reward is not None and not is_bounded(reward):
        return f"field 'reward' is {reward}, {_unbounded(reward)}"
    if status == "scored" and not rollout.reward_version:
        return f"a scored reward needs a reward_version, got {rollout.reward_version!r}"
    if status == "failed" and not rollout.reward_reason:
        return f"a failed reward needs a reward_reason, got {rollout.reward_reason!r}"
    if rollout.reward_parts is not None:
        if status != "scored":
            return f"it has reward_parts but reward_status is {status!r}; only 'scored' takes them"
        if problem := bad_part(rollout.reward_parts):
            return f"field 'reward_parts' {problem}"
    return None if rollout.episode is None else episode_problem(rollout.episode, rollout.sequences)


def bad_part(parts: Mapping[str, float]) -> str | None:
    """Return a sentence about the first part with an invalid name or score; None if all parts are valid."""
    for name, score in parts.items():
        if not _PART_NAME.fullmatch(name):
            return f"has the part {name[:64]!r}, a name that no recipe can give to a scorer"
        if not is_bounded(score):
            return f"has {score} for the part {name!r}, {_unbounded(score)}"
    return None


def with_paid(
    score: float, parts: Mapping[str, float] | None, episode: Episode | None, *, is_composite: bool
) -> tuple[float, dict[str, float] | None]:
    """Return reward and storable parts of a rollout: its score, and what its environment paid."""
    paid = None if episode is None else episode.paid
    if paid is None:
        return score, storable_parts(parts, score, is_composite=is_composite)
    return score + paid, storable_parts({**(parts or {}), "environment": paid}, score + paid, is_composite=True)


def storable_parts(parts: Mapping[str, float] | None, reward: float, *, is_composite: bool) -> dict[str, float] | None:
    """Return the parts of a reward as a rollout stores them; None: there is nothing to store, or a part is invalid.

    Args:
        is_composite: whether the task has several scorers. If it has one, a score that equals the reward is not stored,
            because it says nothing new. If it has several, a single score means that a gate decided, and is stored.
    """
    if not parts or len(parts) > MAX_REWARD_PARTS or bad_part(parts):
        return None
    return None if not is_composite and list(parts.values()) == [reward] else dict(parts)


def _unbounded(value: float) -> str:
    return f"beyond {MAX_NUMBER:g}" if math.isfinite(value) else "not a finite number"


PUSH_SCHEMA = 1
MAX_ROLLOUTS_PER_PUSH = 512


class _PushDocument(Document, frozen=True):
    schema: Literal[1]
    rollouts: Annotated[list[bytes], Meta(max_length=MAX_ROLLOUTS_PER_PUSH)]


_PUSH_DECODER = msgspec.msgpack.Decoder(_PushDocument)


def encode_push(payloads: Sequence[bytes]) -> bytes:
    """Encode the body of one push from encoded rollouts."""
    return pack({"schema": PUSH_SCHEMA, "rollouts": list(payloads)})


def decode_push(data: bytes, *, max_bytes: int) -> list[bytes]:
    """Decode one push into its encoded rollouts. They are not validated here, so a bad one does not affect the others.

    Raises:
        MalformedError, SchemaVersionError, LimitError
    """
    payloads = unpack(data, _PUSH_DECODER, what="push", schema=PUSH_SCHEMA, max_bytes=max_bytes).rollouts
    if not payloads:
        raise LimitError(f"push: 0 rollouts; a push holds 1 to {MAX_ROLLOUTS_PER_PUSH}")
    return payloads
