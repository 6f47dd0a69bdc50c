"""The rollout on the wire: its fields, and the rules between them.

msgspec checks the structure (fields, types, lengths, ranges) while it decodes; `_check_rules` checks the rest, and
`are_numbers_valid` the arrays of many rollouts at once. The plain document is read only to explain a refusal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Literal, get_args

import msgspec
import numpy as np
from msgspec import Meta

from tba.errors import MalformedError
from tba.fields import MAX_LINEAGE, MAX_NUMBER, MAX_SEED, MAX_STEP, control_character_error, is_bounded
from tba.versions import PolicyVersion
from tba.wire.codec import Document, Name, unpack
from tba.wire.validation_errors import shorten

SCHEMA = 1
ID_BYTES = 16
MAX_TOKENS = 131_072
MAX_TEXT_CHARS = 1_000_000
MAX_LOGPROB = np.float32(1e-4)
"""A log-prob is at most 0; float32 softmax may round a little above."""

Tokens = Annotated[bytes, Meta(max_length=4 * MAX_TOKENS)]
Lineage = Annotated[int, Meta(ge=0, le=MAX_LINEAGE)]
Step = Annotated[int, Meta(ge=0, le=MAX_STEP)]
Edge = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
FinishReason = Literal["stop", "stop_string", "length", "abort"]
RewardStatus = Literal["scored", "pending", "failed"]


class SamplingDocument(Document):
    """`sampling` of a rollout."""

    temperature: float
    top_p: float
    top_k: Annotated[int, Meta(ge=0, le=10_000_000)]
    seed: Annotated[int, Meta(ge=-MAX_SEED, le=MAX_SEED)] | None
    stop: list[str]


class RolloutDocument(Document):
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

    @property
    def version(self) -> PolicyVersion:
        """The oldest version that made a token of this rollout."""
        lineage, step, _, _ = min(self.version_spans)
        return _version(lineage, step)


_version = lru_cache(maxsize=4096)(PolicyVersion)
_DECODER = msgspec.msgpack.Decoder(RolloutDocument)
_CHOICES = {"finish_reason": get_args(FinishReason), "reward_status": get_args(RewardStatus)}


def read_document(data: bytes) -> RolloutDocument:
    """Decode one rollout and check everything except the values of its arrays.

    Raises:
        MalformedError, SchemaVersionError, LimitError: naming the field and the value.
    """
    document = unpack(data, _DECODER, what="rollout", schema=SCHEMA, choices=_CHOICES)
    _check_rules(document)
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
    if are_numbers_valid([document]):
        return
    what = f"rollout {document.rollout_id.hex()}"
    for name in ("prompt_tokens", "response_tokens"):
        lowest = np.frombuffer(getattr(document, name), "<i4").min()
        if lowest < 0:
            raise MalformedError(f"{what}: field {name!r} holds {lowest}; token ids must not be negative")
    logprobs = np.frombuffer(document.sampler_logprobs, "<f4")
    bad = logprobs[~(np.abs(logprobs) <= MAX_NUMBER)]
    if len(bad):
        raise MalformedError(f"{what}: field 'sampler_logprobs' holds {bad[0]}, {_unbounded(float(bad[0]))}")
    raise MalformedError(f"{what}: field 'sampler_logprobs' holds {logprobs.max():.4g}, above 0")


def _check_rules(document: RolloutDocument) -> None:
    # one expression for the good case, which is nearly every one; `_broken_rule` looks for the reason
    num_bytes = len(document.response_tokens)
    sampling, ref, reward, status = document.sampling, document.ref_logprob, document.reward, document.reward_status
    edge = 0
    for _, _, start, end in document.version_spans:
        if start != edge or end <= start:
            edge = -1
            break
        edge = end
    if (
        len(document.rollout_id) == ID_BYTES
        and edge * 4 == num_bytes > 0
        and len(document.sampler_logprobs) == num_bytes
        and document.prompt_tokens
        and not len(document.prompt_tokens) % 4
        and (document.searcher_id.isprintable() or control_character_error(document.searcher_id) is None)
        and sampling.temperature >= 0
        and 0 < sampling.top_p <= 1
        and (ref is None or is_bounded(ref[0]))
        and is_bounded(sampling.temperature)
        and is_bounded(document.started_at_s)
        and is_bounded(document.finished_at_s)
        and (
            (reward is not None and is_bounded(reward) and document.reward_version)
            if status == "scored"
            else (reward is None and (status == "pending" or document.reward_reason))
        )
    ):
        return
    raise _broken_rule(document)


def _broken_rule(document: RolloutDocument) -> MalformedError:
    if len(document.rollout_id) != ID_BYTES:
        return MalformedError(
            f"rollout: field 'rollout_id' must be {ID_BYTES} bytes, got {len(document.rollout_id)} "
            f"({shorten(document.rollout_id)})"
        )
    what = f"rollout {document.rollout_id.hex()}"
    if problem := control_character_error(document.searcher_id):
        return MalformedError(f"{what}: field 'searcher_id' {problem} (value {document.searcher_id!r})")
    sampling, ref, reward, status = document.sampling, document.ref_logprob, document.reward, document.reward_status
    numbers = {
        "sampling.temperature": sampling.temperature,
        "sampling.top_p": sampling.top_p,
        "ref_logprob": 0.0 if ref is None else ref[0],
        "reward": 0.0 if reward is None else reward,
        "started_at_s": document.started_at_s,
        "finished_at_s": document.finished_at_s,
    }
    for name, value in numbers.items():
        if not is_bounded(value):
            return MalformedError(f"{what}: field {name!r} is {value}, {_unbounded(value)}")
    for name in ("prompt_tokens", "response_tokens", "sampler_logprobs"):
        if len(getattr(document, name)) % 4:
            return MalformedError(
                f"{what}: field {name!r} has {len(getattr(document, name))} bytes, not a multiple of 4"
            )
    num_tokens, num_logprobs = len(document.response_tokens) // 4, len(document.sampler_logprobs) // 4
    if not document.prompt_tokens or not num_tokens:
        return MalformedError(f"{what}: prompt_tokens and response_tokens must not be empty")
    if num_logprobs != num_tokens:
        return MalformedError(f"{what}: {num_logprobs} sampler_logprobs for {num_tokens} response_tokens")
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
        return MalformedError(
            f"{what}: sampling.temperature must be >= 0 and sampling.top_p in (0, 1], "
            f"got {sampling.temperature} and {sampling.top_p}"
        )
    if (reward is not None) != (status == "scored"):
        return MalformedError(
            f"{what}: reward is {reward} but reward_status is {status!r}; a number goes with 'scored' and nothing else"
        )
    if status == "failed" and not document.reward_reason:
        return MalformedError(f"{what}: a failed reward needs a reward_reason, got {document.reward_reason!r}")
    if status == "scored" and not document.reward_version:
        return MalformedError(f"{what}: a scored reward needs a reward_version, got {document.reward_version!r}")
    return MalformedError(
        f"{what}: version_spans must cover the {num_tokens} response tokens in order and without gaps, "
        f"got {shorten(document.version_spans)}"
    )


def _unbounded(value: float) -> str:
    return f"beyond {MAX_NUMBER:g}" if math.isfinite(value) else "not a finite number"
