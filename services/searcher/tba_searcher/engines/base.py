"""The engine protocol: what the searcher loop needs from whatever generates tokens.

An engine is synchronous and used by one thread at a time. The loop submits requests, calls `step` until completions
come out, and loads new weights between two steps; rows that are being decoded go on under the new weights.

What a response is, for every engine: the tokens up to and including the sampled end of sequence, or the token that
completed a stop string, or `max_response_tokens` of them. End of sequence and stop strings can come only after
`min_response_tokens` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tba.errors import TbaError
from tba.versions import PolicyVersion
from tba.wire import Manifest, Sampling, VersionSpan


class EngineError(TbaError, RuntimeError):
    """Unusable weights, or a request that does not fit or cannot be honoured. The engine goes on."""

    slug = "engine"


class EngineDiedError(EngineError):
    """The engine cannot go on: it crashed, is out of memory, or its logits are not finite."""

    slug = "engine-died"


class EngineCheckError(EngineError):
    """The engine failed while a weight version was checked; the version is not used."""

    slug = "engine-check"


class ReferenceRefusedError(EngineCheckError):
    """The starting model did not pass its checks as the reference; it is tried again, like any version."""

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
    """Token ids that end a response; the sampled one is part of it."""
    min_response_tokens: int = 0
    """While fewer tokens are there, eos ids have probability 0, and the token that comes next completes no stop."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One finished request.

    `sampler_logprobs[i]` is the log-prob of `response_tokens[i]` under the distribution that it was really drawn from:
    softmax(logits / temperature) over the tokens that min_response_tokens, top-k and top-p leave (in this order,
    renormalised each time). At temperature 0: log_softmax(logits), eos ids left out below min_response_tokens.
    """

    request_id: str
    response_tokens: NDArray[np.int32]
    """[R], R >= 1, the end-of-sequence token included when it was sampled."""
    sampler_logprobs: NDArray[np.float32]
    """[R]."""
    sampling: Sampling
    """Of the request."""
    finish_reason: str
    """`stop` (an eos id was sampled), `stop_string` (the last token completed one) or `length`."""
    version_spans: tuple[VersionSpan, ...]
    started_at_s: float
    finished_at_s: float


class RequestLimits(Protocol):
    """The settings of an engine that bound a request."""

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt."""
        ...

    @property
    def max_response_tokens(self) -> int:
        """Longest response."""
        ...


def check_request(request: Request, limits: RequestLimits, *, is_known: bool) -> None:
    """What every engine refuses.

    Args:
        is_known: whether a request of this id is being worked on.

    Raises:
        EngineError: prompt or response do not fit, or the request id is in use.
    """
    what = f"request {request.request_id}"
    num_prompt, num_response = len(request.prompt_tokens), request.max_response_tokens
    if not 1 <= num_prompt <= limits.max_prompt_tokens:
        raise EngineError(
            f"{what}: {num_prompt} prompt tokens; allowed are 1 to {limits.max_prompt_tokens} "
            "(searcher.max_prompt_tokens)"
        )
    if not 1 <= num_response <= limits.max_response_tokens:
        raise EngineError(
            f"{what}: {num_response} response tokens; allowed are 1 to {limits.max_response_tokens} "
            "(searcher.max_response_tokens)"
        )
    if not 0 <= request.min_response_tokens <= num_response:
        raise EngineError(
            f"{what}: at least {request.min_response_tokens} of at most {num_response} response tokens; lower "
            "min_response_tokens"
        )
    if is_known:
        raise EngineError(f"{what} is already being worked on")


class Engine(Protocol):
    """Continuous generation with weights that can be replaced in flight."""

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
        """Completions decoded at once."""
        ...

    @property
    def num_active(self) -> int:
        """Completions being decoded now."""
        ...

    @property
    def num_waiting(self) -> int:
        """Submitted requests that have no slot yet."""
        ...

    @property
    def num_free_slots(self) -> int:
        """Requests that could be submitted now and decoded in the next step; never below 0."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            EngineError: prompt and response do not fit, the request id is in use, or this engine cannot sample so.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Forget a request, wherever it is; unknown ids are ignored."""
        ...

    def step(self) -> list[Completion]:
        """Decode one token for every active row, refill free slots, and return what finished.

        Raises:
            EngineDiedError: the engine cannot go on; nothing more may be asked of it but `close`.
        """
        ...

    def load_weights(self, tensors_paths: Sequence[Path], version: PolicyVersion) -> None:
        """Replace all parameters by those of safetensors files; active rows go on under them in a new span.

        Raises:
            EngineError: names, shapes or dtypes differ from the model's. Which weights are then in use is not said:
                the caller loads the old ones again (`tba_searcher.pulling.swap`).
            EngineDiedError: the engine cannot go on.
        """
        ...

    def verify(self, manifest: Manifest) -> None:
        """Check that what is loaded is what was published (`tba_searcher.pulling.check_loaded`, or as strong).

        Raises:
            DigestError: naming the check, what was found and what was published.
        """
        ...

    def close(self) -> None:
        """Let go of everything; requests under way are forgotten. Calling it again changes nothing."""
        ...
