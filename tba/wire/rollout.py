"""The rollout (one sampled completion with everything that training on it needs), and a push of them.

msgspec checks the structure of a rollout (fields, types, lengths, ranges) while it decodes; `_broken_rule` checks the
rules between fields, and `are_numbers_valid` the arrays of many rollouts at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from tba.errors import LimitError, MalformedError, WireError
from tba.fields import MAX_LINEAGE, MAX_NUMBER, MAX_SEED, MAX_STEP, control_character_error, is_bounded
from tba.versions import PolicyVersion
from tba.wire.codec import Document, Name, float32_bytes, int32_bytes, pack, unpack

T = TypeVar("T", bound=np.generic)
SCHEMA = 1
ID_BYTES = 16
MAX_TOKENS = 131_072
MAX_TEXT_CHARS = 1_000_000
MAX_REWARD_PARTS = 256
MAX_LOGPROB = np.float32(1e-4)
"""A log-prob is at most 0; float32 softmax may round a little above."""

Tokens = Annotated[bytes, Meta(max_length=4 * MAX_TOKENS)]
Lineage = Annotated[int, Meta(ge=0, le=MAX_LINEAGE)]
Step = Annotated[int, Meta(ge=0, le=MAX_STEP)]
Edge = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
FinishReason = Literal["stop", "stop_string", "length", "abort"]
RewardStatus = Literal["scored", "pending", "failed"]
RewardParts = Annotated[dict[str, float], Meta(min_length=1, max_length=MAX_REWARD_PARTS)]
_PART_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""The names that a recipe can give to scorers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Response tokens [start, end) were sampled by `version`; a weight update in flight begins a new span."""

    version: PolicyVersion
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The behaviour policy's settings. `temperature` 0 means greedy; `top_p` 1 and `top_k` 0 mean off."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RefLogprob:
    """Sum of the reference's log-probs over the response, and the reference version it was computed under."""

    value: float
    version: PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One sampled completion.

    `prompt_tokens` is int32 [P], `response_tokens` int32 [R] with R >= 1 and the end-of-sequence token included when
    the policy sampled it, `sampler_logprobs` float32 [R]: log-probs of the behaviour policy, at the sampling
    temperature. `reward` is a number exactly when `reward_status` is `scored`: a failed score is unknown, never 0.
    `reward_parts` are the known scores that make up the reward, by scorer name, before weights; None: not known, or the
    reward itself (`storable_parts`). Times are Unix seconds.
    """

    rollout_id: bytes
    run: str
    task: str
    prompt_id: str
    visit_id: str
    prompt_tokens: NDArray[np.int32]
    response_tokens: NDArray[np.int32]
    response_text: str
    finish_reason: str
    version_spans: tuple[VersionSpan, ...]
    sampling: Sampling
    sampler_logprobs: NDArray[np.float32]
    ref_logprob: RefLogprob | None
    reward: float | None
    reward_status: str
    reward_reason: str | None
    reward_version: str | None
    searcher_id: str
    started_at_s: float
    finished_at_s: float
    reward_parts: dict[str, float] | None = None

    @property
    def version(self) -> PolicyVersion:
        """The oldest version that made a token of this rollout: the one that policy age is measured from."""
        return min(span.version for span in self.version_spans)

    def with_reward(self, reward: float, reward_version: str, reward_parts: dict[str, float] | None = None) -> Rollout:
        """Return a copy that is scored."""
        return replace(
            self,
            reward=float(reward),
            reward_status="scored",
            reward_reason=None,
            reward_version=reward_version,
            reward_parts=reward_parts,
        )

    def with_failure(self, reason: str) -> Rollout:
        """Return a copy whose score failed, which means unknown and never 0; `reward_version` stays that of the last
        known reward."""
        return replace(self, reward=None, reward_status="failed", reward_reason=reason, reward_parts=None)


class SamplingDocument(Document):
    """`sampling` of a rollout."""

    temperature: float
    top_p: float
    top_k: Annotated[int, Meta(ge=0, le=10_000_000)]
    seed: Annotated[int, Meta(ge=-MAX_SEED, le=MAX_SEED)] | None
    stop: list[str]


class RolloutDocument(Document, omit_defaults=True):
    """One rollout; tokens and log-probs are raw little-endian bytes (int32, float32)."""

    schema: Literal[1]
    rollout_id: bytes
    run: Name
    task: Name
    prompt_id: Name
    visit_id: Name
    prompt_tokens: Tokens
    response_tokens: Tokens
    response_text: Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
    finish_reason: FinishReason
    version_spans: Annotated[list[tuple[Lineage, Step, Edge, Edge]], Meta(min_length=1)]
    sampling: SamplingDocument
    sampler_logprobs: Tokens
    ref_logprob: tuple[float, Lineage, Step] | None
    reward: float | None
    reward_status: RewardStatus
    reward_reason: str | None
    reward_version: str | None
    searcher_id: Name
    started_at_s: float
    finished_at_s: float
    reward_parts: RewardParts | None = None

    @property
    def version(self) -> PolicyVersion:
        """The oldest version that made a token of this rollout."""
        lineage, step, _, _ = min(self.version_spans)
        return _version(lineage, step)


# all rollouts of a push carry few different versions, and this is called for each of them
_version = lru_cache(maxsize=4096)(PolicyVersion)
_DECODER = msgspec.msgpack.Decoder(RolloutDocument)


def read_document(data: bytes) -> RolloutDocument:
    """Decode one rollout and check everything except the values of its arrays.

    Raises:
        MalformedError, SchemaVersionError, LimitError: naming the field and the value.
    """
    document = unpack(data, _DECODER, what="rollout", schema=SCHEMA)
    if (problem := _broken_rule(document)) is not None:
        raise MalformedError(f"rollout {document.rollout_id[:ID_BYTES].hex()}: {problem}")
    return document


def are_numbers_valid(documents: Sequence[RolloutDocument]) -> bool:
    """Return whether every token id is at least 0 and every log-prob is bounded and not above 0."""
    tokens = np.frombuffer(b"".join([part for d in documents for part in (d.prompt_tokens, d.response_tokens)]), "<i4")
    logprobs = np.frombuffer(b"".join([d.sampler_logprobs for d in documents]), "<f4")
    # max() is NaN if any log-prob is NaN, and the comparison then fails
    return bool(tokens.min() >= 0 and logprobs.max() <= MAX_LOGPROB and logprobs.min() >= -MAX_NUMBER)


def check_numbers(document: RolloutDocument) -> None:
    """Check the values of the arrays.

    Raises:
        MalformedError: naming the array and the value.
    """
    # the good case needs one pass; the loops below only find what to say
    if are_numbers_valid([document]):
        return
    what = f"rollout {document.rollout_id.hex()}"
    for name in ("prompt_tokens", "response_tokens"):
        lowest = np.frombuffer(getattr(document, name), "<i4").min()
        if lowest < 0:
            raise MalformedError(f"{what}: field {name!r} holds {lowest}; token ids must not be negative")
    logprobs = np.frombuffer(document.sampler_logprobs, "<f4")
    # negated, so that NaN, which compares as false, is bad too
    bad = logprobs[~(np.abs(logprobs) <= MAX_NUMBER)]
    if len(bad):
        raise MalformedError(f"{what}: field 'sampler_logprobs' holds {bad[0]}, {_unbounded(float(bad[0]))}")
    raise MalformedError(f"{what}: field 'sampler_logprobs' holds {logprobs.max():.4g}, above 0")


def _broken_rule(document: RolloutDocument) -> str | None:
    """Return which rule between fields is broken, or None."""
    sampling, ref, reward, status = document.sampling, document.ref_logprob, document.reward, document.reward_status
    num_bytes = len(document.response_tokens)
    if len(document.rollout_id) != ID_BYTES:
        return f"field 'rollout_id' must be {ID_BYTES} bytes, got {len(document.rollout_id)}"
    # the id goes into logs and terminals, where a control character could forge lines; isprintable is the cheap test
    if not document.searcher_id.isprintable() and (problem := control_character_error(document.searcher_id)):
        return f"field 'searcher_id' {problem} (value {document.searcher_id!r})"
    if not num_bytes or num_bytes % 4 or not document.prompt_tokens or len(document.prompt_tokens) % 4:
        return (
            f"prompt_tokens have {len(document.prompt_tokens)} bytes and response_tokens {num_bytes}; they must not be "
            "empty, and have 4 bytes for each token"
        )
    if len(document.sampler_logprobs) != num_bytes:
        return f"sampler_logprobs have {len(document.sampler_logprobs)} bytes and response_tokens {num_bytes}"
    # every token of the response belongs to exactly one span: policy age is measured from the oldest of them
    edge = 0
    for _, _, start, end in document.version_spans:
        if start != edge or end <= start:
            edge = -1
            break
        edge = end
    if edge * 4 != num_bytes:
        return (
            f"version_spans must cover the {num_bytes // 4} response tokens in order and without gaps, got "
            f"{document.version_spans[:4]}"
        )
    if not (0 <= sampling.temperature <= MAX_NUMBER and 0 < sampling.top_p <= 1):
        return (
            f"sampling.temperature must be from 0 to {MAX_NUMBER:g} and sampling.top_p in (0, 1], got "
            f"{sampling.temperature} and {sampling.top_p}"
        )
    if not (is_bounded(document.started_at_s) and is_bounded(document.finished_at_s)):
        return f"started_at_s {document.started_at_s} or finished_at_s {document.finished_at_s} is no time"
    if ref is not None and not is_bounded(ref[0]):
        return f"field 'ref_logprob' is {ref[0]}, {_unbounded(ref[0])}"
    # a failed score must never look like a number, not even like 0
    if (reward is not None) != (status == "scored"):
        return f"reward is {reward} but reward_status is {status!r}; only 'scored' takes a number"
    if reward is not None and not is_bounded(reward):
        return f"field 'reward' is {reward}, {_unbounded(reward)}"
    if status == "scored" and not document.reward_version:
        return f"a scored reward needs a reward_version, got {document.reward_version!r}"
    if status == "failed" and not document.reward_reason:
        return f"a failed reward needs a reward_reason, got {document.reward_reason!r}"
    if document.reward_parts is not None:
        if status != "scored":
            return f"it has reward_parts but reward_status is {status!r}; only 'scored' takes them"
        if problem := bad_part(document.reward_parts):
            return f"field 'reward_parts' {problem}"
    return None


def bad_part(parts: Mapping[str, float]) -> str | None:
    """Return what is wrong with the name or the score of a part; None if nothing is."""
    for name, score in parts.items():
        if not _PART_NAME.fullmatch(name):
            return f"has the part {name[:64]!r}, a name that no recipe can give to a scorer"
        if not is_bounded(score):
            return f"has {score} for the part {name!r}, {_unbounded(score)}"
    return None


def storable_parts(parts: Mapping[str, float] | None, reward: float, *, is_composite: bool) -> dict[str, float] | None:
    """Return the parts of a reward as a rollout stores them; None: there are none, or they cannot be stored.

    Args:
        is_composite: whether the task has several scorers. Of a single one the score is left out where it is the
            reward: it says nothing, and most runs have one. Of several it says that a gate has decided.
    """
    if not parts or len(parts) > MAX_REWARD_PARTS or bad_part(parts):
        return None
    return None if not is_composite and list(parts.values()) == [reward] else dict(parts)


def _unbounded(value: float) -> str:
    return f"beyond {MAX_NUMBER:g}" if math.isfinite(value) else "not a finite number"


def encode_rollout(rollout: Rollout) -> bytes:
    """Encode one rollout as msgpack, without validation; `decode_rollout` validates."""
    ref, sampling, parts = rollout.ref_logprob, rollout.sampling, rollout.reward_parts
    return pack(
        {
            "schema": SCHEMA,
            "rollout_id": rollout.rollout_id,
            "run": rollout.run,
            "task": rollout.task,
            "prompt_id": rollout.prompt_id,
            "visit_id": rollout.visit_id,
            "prompt_tokens": int32_bytes(rollout.prompt_tokens),
            "response_tokens": int32_bytes(rollout.response_tokens),
            "response_text": rollout.response_text,
            "finish_reason": rollout.finish_reason,
            "version_spans": [[s.version.lineage, s.version.step, s.start, s.end] for s in rollout.version_spans],
            "sampling": {
                "temperature": float(sampling.temperature),
                "top_p": float(sampling.top_p),
                "top_k": sampling.top_k,
                "seed": sampling.seed,
                "stop": list(sampling.stop),
            },
            "sampler_logprobs": float32_bytes(rollout.sampler_logprobs),
            "ref_logprob": None if ref is None else [float(ref.value), ref.version.lineage, ref.version.step],
            "reward": None if rollout.reward is None else float(rollout.reward),
            "reward_status": rollout.reward_status,
            "reward_reason": rollout.reward_reason,
            "reward_version": rollout.reward_version,
            "searcher_id": rollout.searcher_id,
            "started_at_s": float(rollout.started_at_s),
            "finished_at_s": float(rollout.finished_at_s),
            **({} if parts is None else {"reward_parts": {name: float(score) for name, score in parts.items()}}),
        }
    )


def decode_rollout(data: bytes) -> Rollout:
    """Decode and validate one rollout.

    Raises:
        MalformedError, SchemaVersionError, LimitError: naming the field and the value.
    """
    document = read_document(data)
    check_numbers(document)
    return rollout_of(document)


def rollout_of(document: RolloutDocument) -> Rollout:
    """Convert a document whose numbers are checked."""
    s, ref = document.sampling, document.ref_logprob
    fields = msgspec.structs.asdict(document)
    del fields["schema"]
    return Rollout(
        **fields
        | {
            "prompt_tokens": _array(document.prompt_tokens, "<i4", np.int32),
            "response_tokens": _array(document.response_tokens, "<i4", np.int32),
            "version_spans": tuple(
                VersionSpan(version=PolicyVersion(lineage, step), start=start, end=end)
                for lineage, step, start, end in document.version_spans
            ),
            "sampling": Sampling(
                temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, seed=s.seed, stop=tuple(s.stop)
            ),
            "sampler_logprobs": _array(document.sampler_logprobs, "<f4", np.float32),
            "ref_logprob": None if ref is None else RefLogprob(value=ref[0], version=PolicyVersion(ref[1], ref[2])),
        }
    )


def _array(raw: bytes, wire_dtype: str, dtype: type[T]) -> NDArray[T]:
    # the wire is little-endian on every machine; on most machines this copies nothing
    return np.frombuffer(raw, dtype=wire_dtype).astype(dtype, copy=False)


PUSH_SCHEMA = 1
MAX_ROLLOUTS_PER_PUSH = 512


class _PushDocument(Document):
    schema: Literal[1]
    rollouts: Annotated[list[bytes], Meta(max_length=MAX_ROLLOUTS_PER_PUSH)]


_PUSH_DECODER = msgspec.msgpack.Decoder(_PushDocument)


def encode_push(payloads: Sequence[bytes]) -> bytes:
    """Encode the body of one push."""
    return pack({"schema": PUSH_SCHEMA, "rollouts": list(payloads)})


def decode_push(data: bytes, *, max_bytes: int) -> list[bytes]:
    """Decode the payloads of one push, unchecked, so that one bad rollout cannot hide the others.

    Raises:
        MalformedError, SchemaVersionError, LimitError
    """
    payloads = unpack(data, _PUSH_DECODER, what="push", schema=PUSH_SCHEMA, max_bytes=max_bytes).rollouts
    if not payloads:
        raise LimitError(f"push: 0 rollouts; a push holds 1 to {MAX_ROLLOUTS_PER_PUSH}")
    return payloads


def check_push(payloads: Sequence[bytes]) -> list[RolloutDocument | WireError]:
    """Return the rollout of each payload, or why it is refused; accepts what `decode_rollout` accepts, without building
    arrays."""
    items: list[RolloutDocument | WireError] = []
    for payload in payloads:
        try:
            items.append(read_document(payload))
        except WireError as error:
            items.append(error)
    documents = [item for item in items if isinstance(item, RolloutDocument)]
    # all arrays at once, because a check per rollout would cost more than its decoding; only a bad push is searched
    if documents and not are_numbers_valid(documents):
        for at, item in enumerate(items):
            if isinstance(item, RolloutDocument):
                try:
                    check_numbers(item)
                except WireError as error:
                    items[at] = error
    return items
