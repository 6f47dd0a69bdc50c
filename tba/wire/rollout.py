"""The rollout: one sampled completion with everything that training on it later needs (design.md, Semantics)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tba.errors import LimitError, MalformedError
from tba.versions import PolicyVersion
from tba.wire.codec import Reader, float32_bytes, int32_bytes, pack, unpack

SCHEMA = 1
MAX_TOKENS = 131_072
MAX_TEXT_CHARS = 1_000_000
MAX_ROLLOUTS_PER_PUSH = 512
MAX_STEP = 10**12

FINISH_REASONS = ("stop", "length", "abort")
REWARD_STATUSES = ("scored", "pending", "failed")


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
        """A copy that is scored."""
        return replace(
            self, reward=float(reward), reward_status="scored", reward_reason=None, reward_version=reward_version
        )


def encode_rollout(rollout: Rollout) -> bytes:
    """msgpack bytes of one rollout. Does not validate; `decode_rollout` does."""
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
    fields = Reader(unpack(data, what="rollout"), what="rollout")
    fields.schema(SCHEMA)
    rollout_id = fields.take("rollout_id", bytes)
    if len(rollout_id) != 16:
        raise MalformedError(f"rollout: field 'rollout_id' must be 16 bytes, got {len(rollout_id)}")
    fields.what = f"rollout {rollout_id.hex()}"
    text = fields.take("response_text", str)
    if len(text) > MAX_TEXT_CHARS:
        raise LimitError(f"{fields.what}: response_text has {len(text)} characters, the limit is {MAX_TEXT_CHARS}")
    reward_reason = fields.optional("reward_reason", str)
    rollout = Rollout(
        rollout_id=rollout_id,
        run=fields.name("run"),
        task=fields.name("task"),
        prompt_id=fields.name("prompt_id"),
        visit_id=fields.name("visit_id"),
        prompt_tokens=fields.int32_array("prompt_tokens", max_items=MAX_TOKENS),
        response_tokens=fields.int32_array("response_tokens", max_items=MAX_TOKENS),
        response_text=text,
        finish_reason=fields.choice("finish_reason", FINISH_REASONS),
        version_spans=_spans(fields.take("version_spans", list), fields.what),
        sampling=_sampling(Reader(fields.take("sampling", dict), what=f"{fields.what} sampling")),
        sampler_logprobs=fields.float32_array("sampler_logprobs", max_items=MAX_TOKENS),
        ref_logprob=_ref_logprob(fields.optional("ref_logprob", list), fields.what),
        reward=fields.optional_number("reward"),
        reward_status=fields.choice("reward_status", REWARD_STATUSES),
        reward_reason=reward_reason,
        reward_version=fields.optional("reward_version", str),
        searcher_id=fields.name("searcher_id"),
        started_at_s=fields.number("started_at_s"),
        finished_at_s=fields.number("finished_at_s"),
    )
    fields.done()
    check_rollout(rollout)
    return rollout


def check_rollout(rollout: Rollout) -> None:
    """The rules that tie fields together.

    Raises:
        MalformedError: naming the fields that disagree.
    """
    what = f"rollout {rollout.rollout_id.hex()}"
    num_response_tokens = len(rollout.response_tokens)
    if not len(rollout.prompt_tokens) or not num_response_tokens:
        raise MalformedError(f"{what}: prompt_tokens and response_tokens must not be empty")
    if rollout.prompt_tokens.min() < 0 or rollout.response_tokens.min() < 0:
        raise MalformedError(f"{what}: token ids must not be negative")
    if len(rollout.sampler_logprobs) != num_response_tokens:
        raise MalformedError(
            f"{what}: {len(rollout.sampler_logprobs)} sampler_logprobs for {num_response_tokens} response_tokens"
        )
    if rollout.sampler_logprobs.max() > 1e-4:
        raise MalformedError(f"{what}: a sampler log-prob is {rollout.sampler_logprobs.max():.4g}, above 0")
    edge = 0
    for span in rollout.version_spans:
        if span.start != edge or span.end <= span.start:
            raise MalformedError(f"{what}: version_spans must cover the response without gaps, got {span}")
        edge = span.end
    if edge != num_response_tokens:
        raise MalformedError(f"{what}: version_spans end at {edge}, the response has {num_response_tokens} tokens")
    if (rollout.reward is not None) != (rollout.reward_status == "scored"):
        raise MalformedError(
            f"{what}: reward is {rollout.reward} but reward_status is {rollout.reward_status!r}; "
            "a number goes with 'scored' and nothing else"
        )
    if rollout.reward_status == "failed" and not rollout.reward_reason:
        raise MalformedError(f"{what}: a failed reward needs a reward_reason")
    if rollout.reward_status == "scored" and not rollout.reward_version:
        raise MalformedError(f"{what}: a scored reward needs a reward_version")


def encode_push(payloads: Sequence[bytes]) -> bytes:
    """The body of one push: encoded rollouts, each kept as its own bytes so that the buffer stores what was sent."""
    return pack({"schema": SCHEMA, "rollouts": list(payloads)})


def decode_push(data: bytes, *, max_bytes: int) -> list[bytes]:
    """The encoded rollouts of one push; each still has to be decoded, so that one bad item cannot hide the others.

    Raises:
        MalformedError, SchemaVersionError, LimitError
    """
    fields = Reader(unpack(data, what="push", max_bytes=max_bytes), what="push")
    fields.schema(SCHEMA)
    payloads = fields.take("rollouts", list)
    fields.done()
    if not payloads or len(payloads) > MAX_ROLLOUTS_PER_PUSH:
        raise LimitError(f"push: {len(payloads)} rollouts; a push holds 1 to {MAX_ROLLOUTS_PER_PUSH}")
    for payload in payloads:
        if not isinstance(payload, bytes):
            raise MalformedError(f"push: each rollout must be bytes, got {type(payload).__name__}")
    return payloads


def _spans(raw: list[object], what: str) -> tuple[VersionSpan, ...]:
    if not raw:
        raise MalformedError(f"{what}: version_spans must not be empty")
    spans = []
    for item in raw:
        if not isinstance(item, list) or len(item) != 4 or not all(type(x) is int and 0 <= x <= MAX_STEP for x in item):
            raise MalformedError(f"{what}: a version span is [lineage, step, start, end], got {item!r}")
        spans.append(VersionSpan(version=PolicyVersion(item[0], item[1]), start=item[2], end=item[3]))
    return tuple(spans)


def _sampling(fields: Reader) -> Sampling:
    seed, stop = fields.optional("seed", int), fields.take("stop", list)
    if not all(isinstance(item, str) for item in stop):
        raise MalformedError(f"{fields.what}: stop must be a list of strings")
    sampling = Sampling(
        temperature=fields.number("temperature"),
        top_p=fields.number("top_p"),
        top_k=fields.integer("top_k", 0, 10_000_000),
        seed=seed,
        stop=tuple(stop),
    )
    fields.done()
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
        raise MalformedError(f"{fields.what}: temperature must be >= 0 and top_p in (0, 1], got {sampling}")
    return sampling


def _ref_logprob(raw: list[object] | None, what: str) -> RefLogprob | None:
    if raw is None:
        return None
    match raw:
        case [float() as value, int() as lineage, int() as step] if np.isfinite(value) and lineage >= 0 and step >= 0:
            return RefLogprob(value=value, version=PolicyVersion(lineage, step))
    raise MalformedError(f"{what}: ref_logprob is [value, lineage, step] or nil, got {raw!r}")
