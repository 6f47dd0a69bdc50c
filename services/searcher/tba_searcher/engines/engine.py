"""The engine protocol: the interface between the searcher and the code that generates tokens.

To add an engine, write a class that implements `Engine`, name it in the recipe (`searcher.engine`, docs/extending.md),
and run `tests/support/engine_contract.py` against it. It is called with the folder of the first version (config,
tokenizer, safetensors files), the version and `EngineSettings`. The caller verifies the weights.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tba.config.searcher import VLLM_MAX_TEMPERATURE, VLLM_MIN_TEMPERATURE
from tba.errors import TbaError
from tba.versions import PolicyVersion
from tba.wire import Manifest, Sampling, VersionSpan
from tba.wire.sequences import FinishReason

ENGINE_TIMEOUT_S = 600.0
"""An engine counts as dead when a weight load or a few decode steps take longer. The searcher then delivers finished
rollouts and ends with an error, to be started again. The limit is high because large models take minutes to load."""


class EngineError(TbaError, RuntimeError):
    """Unusable weights, or a request that does not fit or cannot be honoured. The engine still works."""

    slug = "engine"


class EngineDiedError(EngineError):
    """The engine cannot continue: it crashed, is out of memory, or its logits are not finite."""

    slug = "engine-died"


class EngineCheckError(EngineError):
    """The engine failed while a weight version was checked; the version is not used."""

    slug = "engine-check"


class ReferenceRefusedError(EngineCheckError):
    """The starting model failed its checks as the reference; the searcher tries it again after a pause."""

    slug = "reference-refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One completion to sample."""

    request_id: str
    prompt_tokens: tuple[int, ...]
    """[P], P >= 1."""
    sampling: Sampling
    """Temperature (0 is greedy), top-p, top-k, seed (none: the engine's own random stream) and stop strings."""
    max_response_tokens: int
    eos_ids: tuple[int, ...]
    """Token ids that end a response. The one that was sampled stays in the response."""
    min_response_tokens: int = 0
    """While the response has fewer tokens, eos ids have probability 0, and stop strings do not end the response."""
    continues: str | None = None
    """Id of the request whose tokens this prompt begins with, in a conversation; an engine may use its keys and values
    again."""
    may_continue: bool = False
    """Whether another request may continue this one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One finished request.

    `sampler_logprobs[i]` is the log-prob of `response_tokens[i]` under the distribution that it was really drawn from.
    That is softmax(logits / temperature), restricted by min_response_tokens, top-k and top-p in this order, and
    renormalised each time. At temperature 0 it is log_softmax(logits), without eos ids below min_response_tokens.
    """

    request_id: str
    response_tokens: NDArray[np.int32]
    """[R], R >= 1, the end-of-sequence token included when it was sampled."""
    sampler_logprobs: NDArray[np.float32]
    """[R]."""
    sampling: Sampling
    """The sampling settings of the request."""
    finish_reason: FinishReason
    """`stop` (an eos id was sampled), `stop_string` (the last token completed one) or `length`."""
    version_spans: tuple[VersionSpan, ...]
    """The version that sampled each token; the spans cover [0, R) without gaps, and none is empty."""
    started_at_s: float
    finished_at_s: float


VersionMarks = list[tuple[PolicyVersion, int]]
"""For one response: each version that was in use, and how many response tokens there were when it was loaded."""


def spans_of(marks: VersionMarks, num_tokens: int) -> tuple[VersionSpan, ...]:
    """Return the version spans of a response of `num_tokens` tokens, none of them empty."""
    spans: list[VersionSpan] = []
    ends = [start for _, start in marks[1:]]
    for (version, start), end in zip(marks, [*ends, num_tokens], strict=True):
        if start == end:  # another version came before the next token
            continue
        if spans and spans[-1].version == version:
            start = spans.pop().start
        spans.append(VersionSpan.of(version, start, end))
    return tuple(spans)


def make_completion(
    request: Request,
    tokens: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    finish_reason: str,
    *,
    marks: VersionMarks,
    started_at_s: float,
) -> Completion:
    """Return the completion of a request that ends now."""
    return Completion(
        request_id=request.request_id,
        response_tokens=tokens,
        sampler_logprobs=logprobs,
        sampling=request.sampling,
        finish_reason=cast("FinishReason", finish_reason),
        version_spans=spans_of(marks, len(tokens)),
        started_at_s=started_at_s,
        finished_at_s=time.time(),
    )


@runtime_checkable
class Engine(Protocol):
    """Continuous generation with weights that can be replaced in flight.

    An engine is synchronous, and one thread at a time uses it. The caller submits requests and calls `step` until no
    request is active or waiting:

        submit -> waiting -> (a slot is free) active -> `step` returns the Completion
                  `abort` forgets a request in either state, and it never completes

    An engine's *slot* (not the slot of a group in a batch) holds one active request; an engine has `num_slots` of them.
    `step` first fills free slots, and then decodes one token (or a few) for every active request.

    A response ends with the sampled end-of-sequence token, with the token that completes a stop string, or after
    `max_response_tokens`. End of sequence and stop strings can come only after `min_response_tokens` tokens.

    `load_weights` is called between two steps. Active requests keep their tokens and continue under the new weights,
    and the next token begins a new version span. Keys and values of the old weights must not be used again. After each
    load the caller calls `verify`; when either fails, it loads the old weights again (`weight_check.swap_weights`).

    Errors: `EngineError` (or any `TbaError`) refuses one request or one version. After `EngineDiedError` the caller
    calls only `close`; the searcher delivers finished rollouts and ends. An unexpected exception from `step` has the
    same effect, and so has a call that takes longer than `ENGINE_TIMEOUT_S`.

    Shared parts: `check_request` for `submit`, and `check_loaded` (weight_check.py) for `verify` when
    the engine is a `CheckableModel`.
    """

    @property
    def version(self) -> PolicyVersion:
        """The version of the weights in use."""
        ...

    @property
    def default_eos_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids that the model's own files name; may be empty."""
        ...

    @property
    def num_slots(self) -> int:
        """Largest number of requests that can be active at once."""
        ...

    @property
    def num_active(self) -> int:
        """Number of requests that are being decoded now."""
        ...

    @property
    def num_waiting(self) -> int:
        """Number of submitted requests that have no slot yet."""
        ...

    @property
    def num_prefilled_tokens(self) -> int:
        """Number of prompt tokens whose keys and values were computed since the engine began; tokens taken from a cache
        are not counted."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            EngineError: the prompt or response is too long, the id is in use, or the engine cannot sample like this.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Forget a request, active or waiting; ignore unknown ids."""
        ...

    def step(self) -> list[Completion]:
        """Fill free slots, decode one token for every active request, and return the requests that ended.

        Raises:
            EngineDiedError: the engine cannot continue.
        """
        ...

    def load_weights(self, tensors_paths: Sequence[Path], version: PolicyVersion) -> None:
        """Replace all parameters with the tensors of safetensors files.

        Raises:
            EngineError: names, shapes or dtypes differ from the model's. The weights in use are then undefined.
            EngineDiedError: the engine cannot continue.
        """
        ...

    def verify(self, manifest: Manifest) -> None:
        """Check that the loaded weights are the published ones, at least as strictly as `check_loaded` does.

        Raises:
            DigestError: a check failed; the message names the check, the value found and the published value.
        """
        ...

    def close(self) -> None:
        """Free everything and forget all requests. A second call changes nothing."""
        ...


@runtime_checkable
class StagingEngine(Engine, Protocol):
    """An engine that can prepare the next weights while it generates, so that `load_weights` takes less time."""

    def stage_weights(self, tensors_paths: Sequence[Path]) -> None:
        """Prepare a later `load_weights` of these files; may take as much memory as the model.

        The caller makes one call at a time, in another thread than `step`. A call drops weights that were staged
        before, and leaves the weights in use alone. `load_weights` must still work for other files and during a call.

        Raises:
            EngineError: names, shapes or dtypes differ from the model's.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings that every engine with a model gets."""

    num_slots: int
    max_prompt_tokens: int
    max_response_tokens: int
    seed: int
    """Seeds the engine's own random stream; each start of a searcher has another (`tba_searcher.service`)."""
    dtype: str = "float32"
    """Dtype of the weights."""
    device: str = "cpu"
    trust_remote_code: bool = False


def check_request(request: Request, settings: EngineSettings, *, is_known: bool, vocab_size: int | None = None) -> None:
    """Check a request against the limits that all engines share.

    Args:
        is_known: whether the request id is in use.
        vocab_size: number of token ids of the model; None: token ids are not checked.

    Raises:
        EngineError: the length of the prompt or response is not allowed, a token id is too high, or `is_known`.
    """
    name = f"request {request.request_id}"
    num_prompt, num_response = len(request.prompt_tokens), request.max_response_tokens
    # without a prompt there is no position whose logits give the first token
    if not 1 <= num_prompt <= settings.max_prompt_tokens:
        raise EngineError(
            f"{name}: {num_prompt} prompt tokens; allowed are 1 to {settings.max_prompt_tokens} "
            "(searcher.max_prompt_tokens)"
        )
    if vocab_size is not None and max(request.prompt_tokens) >= vocab_size:
        raise EngineError(
            f"{name}: token id {max(request.prompt_tokens)}; the model has {vocab_size} ids, so its tokenizer is "
            "another model's, or the embedding was not resized"
        )
    if not 1 <= num_response <= settings.max_response_tokens:
        raise EngineError(
            f"{name}: {num_response} response tokens; allowed are 1 to {settings.max_response_tokens} "
            "(searcher.max_response_tokens)"
        )
    if not 0 <= request.min_response_tokens <= num_response:
        raise EngineError(
            f"{name}: at least {request.min_response_tokens} of at most {num_response} response tokens; lower "
            "min_response_tokens"
        )
    if is_known:
        raise EngineError(f"{name} is already being worked on")


def check_vllm_request(request: Request, vllm_ends: Collection[int | None]) -> None:
    """Raise EngineError if vLLM would sample otherwise than asked; `vllm_ends`: the eos ids of the model's files."""
    temperature = request.sampling.temperature
    if temperature != 0 and not VLLM_MIN_TEMPERATURE <= temperature <= VLLM_MAX_TEMPERATURE:
        raise EngineError(
            f"request {request.request_id}: temperature {temperature:g}; vLLM samples at 0 or at "
            f"{VLLM_MIN_TEMPERATURE:g} to {VLLM_MAX_TEMPERATURE:g}"
        )
    others = {each for each in vllm_ends if each is not None}.difference(request.eos_ids)
    if request.min_response_tokens and others:
        raise EngineError(
            f"request {request.request_id}: with min_response_tokens vLLM also bans {sorted(others)}, which its "
            "files call end of sequence and the request does not; add them to eos_ids"
        )


def as_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return an `eos_token_id` of a config (one id, several or None) as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
