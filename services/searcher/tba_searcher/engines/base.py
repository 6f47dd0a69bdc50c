"""The engine protocol: what the searcher loop needs from whatever generates tokens.

An engine is synchronous and used by one thread at a time. The loop submits requests, calls `step` until completions
come out, and loads new weights between two steps; rows that are being decoded go on under the new weights.
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
from tba.wire import VersionSpan


class EngineError(TbaError, RuntimeError):
    """Unusable weights, a request that does not fit, or logits that are not finite."""

    slug = "engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One completion to sample."""

    request_id: str
    prompt_tokens: tuple[int, ...]
    """[P], P >= 1."""
    temperature: float
    """Sampling temperature; 0 is greedy."""
    max_response_tokens: int
    eos_ids: tuple[int, ...]
    """Token ids that end a response; the sampled one is part of it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One finished request.

    `sampler_logprobs[i]` is the log-prob of `response_tokens[i]` under the distribution it was drawn from:
    log_softmax(logits / temperature), and log_softmax(logits) where the temperature is 0.
    """

    request_id: str
    response_tokens: NDArray[np.int32]
    """[R], R >= 1, the end-of-sequence token included when it was sampled."""
    sampler_logprobs: NDArray[np.float32]
    """[R]."""
    finish_reason: str
    """`stop` (an eos id was sampled) or `length`."""
    version_spans: tuple[VersionSpan, ...]
    started_at_s: float
    finished_at_s: float


class Engine(Protocol):
    """Continuous generation with weights that can be replaced in flight."""

    @property
    def version(self) -> PolicyVersion:
        """The version of the weights in use."""
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
            EngineError: prompt and response do not fit, or the request id is in use.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Forget a request, wherever it is; unknown ids are ignored."""
        ...

    def step(self) -> list[Completion]:
        """Decode one token for every active row, refill free slots, and return what finished.

        Raises:
            EngineError: the logits are not finite.
        """
        ...

    def load_weights(self, tensors_paths: Sequence[Path], version: PolicyVersion) -> None:
        """Replace all parameters by those of safetensors files; active rows go on under them in a new span.

        Raises:
            EngineError: names, shapes or dtypes differ from the model's; the weights in use are then unchanged.
        """
        ...

    def params_sha256(self) -> str:
        """`tba.wire.manifest.params_digest` over the parameters the engine holds."""
        ...

    def canary_logprobs(self, prompt_tokens: Sequence[int], response_tokens: Sequence[int]) -> NDArray[np.float32]:
        """Log-probs [R] at temperature 1 of a given response, computed without sampling."""
        ...
