"""The rollout: one sampled completion with everything that training on it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from tba.errors import LimitError, WireError
from tba.versions import PolicyVersion
from tba.wire.codec import Document, float32_bytes, int32_bytes, pack, unpack
from tba.wire.rollout_struct import SCHEMA, RolloutDocument, are_numbers_valid, check_numbers, read_document

T = TypeVar("T", bound=np.generic)


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
    Times are Unix seconds.
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

    @property
    def version(self) -> PolicyVersion:
        """The oldest version that made a token of this rollout: the one that policy age is measured from."""
        return min(span.version for span in self.version_spans)

    def with_reward(self, reward: float, reward_version: str) -> Rollout:
        """Return a copy that is scored."""
        return replace(
            self, reward=float(reward), reward_status="scored", reward_reason=None, reward_version=reward_version
        )

    def with_failure(self, reason: str) -> Rollout:
        """Return a copy whose score failed, which means unknown and never 0; `reward_version` stays that of the last
        known reward."""
        return replace(self, reward=None, reward_status="failed", reward_reason=reason)


def encode_rollout(rollout: Rollout) -> bytes:
    """Encode one rollout as msgpack, without validation; `decode_rollout` validates."""
    ref, sampling = rollout.ref_logprob, rollout.sampling
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
    sampling, ref = document.sampling, document.ref_logprob
    return Rollout(
        rollout_id=document.rollout_id,
        run=document.run,
        task=document.task,
        prompt_id=document.prompt_id,
        visit_id=document.visit_id,
        prompt_tokens=_array(document.prompt_tokens, "<i4", np.int32),
        response_tokens=_array(document.response_tokens, "<i4", np.int32),
        response_text=document.response_text,
        finish_reason=document.finish_reason,
        version_spans=tuple(
            VersionSpan(version=PolicyVersion(lineage, step), start=start, end=end)
            for lineage, step, start, end in document.version_spans
        ),
        sampling=Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            stop=tuple(sampling.stop),
        ),
        sampler_logprobs=_array(document.sampler_logprobs, "<f4", np.float32),
        ref_logprob=None if ref is None else RefLogprob(value=ref[0], version=PolicyVersion(ref[1], ref[2])),
        reward=document.reward,
        reward_status=document.reward_status,
        reward_reason=document.reward_reason,
        reward_version=document.reward_version,
        searcher_id=document.searcher_id,
        started_at_s=document.started_at_s,
        finished_at_s=document.finished_at_s,
    )


def _array(raw: bytes, wire_dtype: str, dtype: type[T]) -> NDArray[T]:
    return np.frombuffer(raw, dtype=wire_dtype).astype(dtype, copy=False)


PUSH_SCHEMA = 1
MAX_ROLLOUTS_PER_PUSH = 512


class _PushDocument(Document):
    schema: Literal[1]
    rollouts: Annotated[list[bytes], Meta(max_length=MAX_ROLLOUTS_PER_PUSH)]


_DECODER = msgspec.msgpack.Decoder(_PushDocument)


def encode_push(payloads: Sequence[bytes]) -> bytes:
    """Encode the body of one push."""
    return pack({"schema": PUSH_SCHEMA, "rollouts": list(payloads)})


def decode_push(data: bytes, *, max_bytes: int) -> list[bytes]:
    """Decode the payloads of one push, unchecked, so that one bad rollout cannot hide the others.

    Raises:
        MalformedError, SchemaVersionError, LimitError
    """
    payloads = unpack(data, _DECODER, what="push", schema=PUSH_SCHEMA, max_bytes=max_bytes).rollouts
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
    if documents and not are_numbers_valid(documents):
        for at, item in enumerate(items):
            if isinstance(item, RolloutDocument):
                try:
                    check_numbers(item)
                except WireError as error:
                    items[at] = error
    return items
