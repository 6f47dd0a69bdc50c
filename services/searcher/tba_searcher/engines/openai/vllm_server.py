"""A client of `vllm serve`. It calls these routes:

    /v1/completions                                token ids in; token ids and log-probs out
    /abort_requests                                ends requests at once; they return their tokens so far
    /collective_rpc {"method": "reload_weights"}   loads all weights from a folder
    /reset_prefix_cache                            drops the keys and values of the previous weights
    /weight_info, /update_weight_version           reads and sets the label of the weights

All but the first are vLLM's routes for training, which it offers with VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from tba.clients.service_client import ServiceClient, message_of
from tba.config.searcher import OpenAiSection
from tba.errors import BadReplyError, ConfigError, NotFoundError, UnavailableError
from tba.fields import StrictModel
from tba_searcher.engines.engine import Request

LOWEST_LOGPROB = -9999.0
"""For a log-prob of minus infinity, servers write this value, a lower one or none."""
M = TypeVar("M", bound=StrictModel)
REQUEST_TIMEOUT_S = 1800.0
"""Deadline of a response, or of its part since the last weight update."""
CONTROL_TIMEOUT_S = 30.0
"""Deadline of a call that does not generate."""
_RESET_S = 10.0
"""Deadline for dropping the key-value cache. The server may still be moving parts of it after the last request."""
_START_HINT = (
    "start it as docs/searcher.md says: VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs "
    "--generation-config vllm"
)
_PROBE_TOKENS = 16
_PROBE_ATOL = 1e-3
_TIES_NATS = np.log([1.0, 2.0, 3.0, 4.0])
"""-log(1 / n) for n = 1 to 4: minus the log-prob of each of n tokens that share the highest logit. Top-k 1 keeps all of
them, and in 16 bits there may be several."""
_PROBE_MIN_NATS = 1.0
"""Smallest difference of log-probs, summed over the probe tokens, that counts; rounding causes less."""


class _ServedModel(StrictModel):
    """One entry of /v1/models."""

    owned_by: str = ""
    """The kind of server: "vllm", for example."""
    max_model_len: int | None = None


class _Models(StrictModel):
    data: list[_ServedModel] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens that one call returned; a response may need several calls."""

    tokens: list[int]
    logprobs: list[float]
    completes_stop: bool
    """Whether the last token completed a stop string, in the text of this piece alone."""
    num_cached_tokens: int = 0
    """Prompt tokens from the server's prefix cache; 0 if it does not say (`--enable-prompt-tokens-details`)."""


class _Logprobs(StrictModel):
    token_logprobs: list[float]


class _PromptLogprob(StrictModel):
    logprob: float


class _Choice(StrictModel):
    token_ids: list[int]
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[str, _PromptLogprob] | None] | None = None


class _PromptDetails(StrictModel):
    cached_tokens: int | None = None


class _Usage(StrictModel):
    prompt_tokens_details: _PromptDetails | None = None


class _Completions(StrictModel):
    choices: list[_Choice] = Field(min_length=1, max_length=1)
    usage: _Usage | None = None


class _WorldSize(StrictModel):
    world_size: int


class _WeightInfo(StrictModel):
    weight_version: str


class _Reset(StrictModel):
    success: bool


def connect(section: OpenAiSection, *, num_tokens: int, retry_s: float, ca_file: str | None) -> VllmServer:
    """Connect to the server that the settings name, check that it can be an engine, and return the client.

    Args:
        num_tokens: tokens of the longest prompt and response together.

    Raises:
        ConfigError: the server cannot be an engine (the message says what to do), or its token is not set.
        ServiceError: the server does not answer, or refuses this client.
    """
    name = section.token_env
    token = None if name is None else os.environ.get(name)
    if name is not None and not token:
        raise ConfigError(
            f"searcher.openai.token_env: the environment variable {name} is not set; put the token for "
            f"{section.url} there"
        )
    server = VllmServer(section.url or "", token=token, retry_s=retry_s, timeout_s=CONTROL_TIMEOUT_S, ca_file=ca_file)
    try:
        server.check(num_tokens)
    except BaseException:
        server.close()
        raise
    return server


class VllmServer(ServiceClient):
    """A client of one vLLM server; thread-safe. Every call is safe to repeat."""

    def without_retries(self) -> Self:
        """Return a client of the same server, over the same connections, that makes each call once."""
        twin = copy.copy(self)
        twin._retry_s = 0.0
        return twin

    def check(self, num_tokens: int) -> None:
        """Check server kind, context length, weight routes, one model copy, exact log-probs (errors: see `connect`)."""
        model = self._read(_Models, "GET", "/v1/models").data[0]
        if model.owned_by != "vllm":
            raise ConfigError(
                f"{self.base_url} says that {model.owned_by or 'nobody'} owns its models (/v1/models). Only vLLM is "
                "known to give exact log-probs and to take weights. Give the address of such a server itself, not of "
                "a router before it"
            )
        if model.max_model_len is not None and model.max_model_len < num_tokens:
            raise ConfigError(
                f"{self.base_url} has a context of {model.max_model_len} tokens, and max_prompt_tokens + "
                f"max_response_tokens of [searcher] need {num_tokens}; start it with --max-model-len {num_tokens}, or "
                "lower them"
            )
        try:
            self.label()
            self.abort(["nobody"])
            sizes = [
                self._read(_WorldSize, "GET", "/get_world_size", params={"include_dp": include}).world_size
                for include in ("true", "false")
            ]
        except NotFoundError as error:
            raise ConfigError(
                f"{self.base_url} offers no weight updates ({error}), so its answers would come from old weights under "
                f"the name of newer ones; give the address of a server itself and not of a router, and {_START_HINT}"
            ) from None
        if sizes[0] != sizes[1]:
            # the canary would check the copy that happens to answer
            raise ConfigError(
                f"{self.base_url} holds {sizes[0] // sizes[1]} copies of the model (data parallelism), and a check "
                "reaches one of them; start one server for each, and a searcher for each"
            )
        prompt = [1, 2, 3]
        try:
            only = self._complete(prompt=prompt, temperature=2.0, top_k=1, max_tokens=_PROBE_TOKENS)
            if not only.tokens:
                raise UnavailableError(f"{self.base_url} answered a request without a token")
            found = np.array(only.logprobs)
            # of one possible token the log-prob is 0
            is_processed = np.abs(found[:, None] + _TIES_NATS).min(axis=1).max() < _PROBE_ATOL
            if is_processed and (found - self.prompt_logprobs(prompt, only.tokens)).sum() < _PROBE_MIN_NATS:
                # it is here in any case: the model is certain. Then temperature makes a difference
                hot = self._complete(prompt=prompt, temperature=2.0, max_tokens=_PROBE_TOKENS)
                gap = np.abs(hot.logprobs - self.prompt_logprobs(prompt, hot.tokens)).sum()
                is_processed = gap > _PROBE_MIN_NATS
        except BadReplyError as error:
            raise ConfigError(str(error)) from None
        if not is_processed:
            raise ConfigError(
                f"{self.base_url} gives log-probs before temperature and top-k, not those of the distribution that "
                f"it draws from, so training on them would be wrong; {_START_HINT}"
            )

    def complete(self, sent_id: str, request: Request, before: Sequence[int], *, seed: int | None, label: str) -> Piece:
        """Generate the rest of the response to a request; return it, or the part before an abort.

        Args:
            sent_id: names this call for `abort`.
            before: the response tokens so far.
            label: label of the weights; the server reuses only keys and values that it cached under it.
        """
        sampling = request.sampling
        return self._complete(
            timeout_s=REQUEST_TIMEOUT_S,
            request_id=sent_id,
            cache_salt=label,
            prompt=[*request.prompt_tokens, *before],
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
            stop=list(sampling.stop),
            stop_token_ids=list(request.eos_ids),
            max_tokens=request.max_response_tokens - len(before),
            min_tokens=max(0, request.min_response_tokens - len(before)),
        )

    def abort(self, sent_ids: Sequence[str]) -> None:
        """Make calls of `complete` return their tokens so far at once; ignore unknown ids."""
        ids = [f"cmpl-{sent_id}-0" for sent_id in sent_ids]  # vLLM's own names for them
        self._post("/abort_requests", {"request_ids": ids})

    def prompt_logprobs(self, prompt_tokens: Sequence[int], response_tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the log-probs [R] at temperature 1 of a given response."""
        tokens = [*prompt_tokens, *response_tokens]
        # one token must be sampled, and is not looked at
        choice = self._answer(prompt=tokens, temperature=0, max_tokens=1, prompt_logprobs=0).choices[0]
        rows = (choice.prompt_logprobs or [])[len(prompt_tokens) :]
        if len(rows) != len(response_tokens):
            raise BadReplyError(f"{self.base_url} gives no log-probs of prompts (prompt_logprobs)")
        found = zip(rows, response_tokens, strict=True)
        return np.array([row[str(token)].logprob if row else np.nan for row, token in found], np.float32)

    def label(self) -> str:
        """Return the label of the last `load_weights`; `default` if the server has had none since it started."""
        return self._read(_WeightInfo, "GET", "/weight_info").weight_version

    def load_weights(self, folder: Path, label: str, *, timeout_s: float) -> None:
        """Load all weights from a folder of the server, drop its key-value cache, label them. No request may be active.

        Raises:
            ServiceError: the load failed; the server's weights may be a mixture.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._post("/collective_rpc", body, timeout_s=timeout_s)
        # keys and values of the old weights go; external: those that the server has moved elsewhere
        params = {"reset_running_requests": "true", "reset_external": "true"}
        until = time.monotonic() + _RESET_S
        while True:
            try:
                if self._read(_Reset, "POST", "/reset_prefix_cache", params=params).success:
                    break
                problem = "they are in use"
            except UnavailableError as error:  # vLLM answers so while it moves some
                problem = str(error)
            if time.monotonic() > until:
                raise UnavailableError(f"{self.base_url} keeps keys and values of the weights before: {problem}")
            time.sleep(0.05)
        self._post("/update_weight_version", {"new_version": label})

    def _complete(self, *, timeout_s: float = CONTROL_TIMEOUT_S, **body: Any) -> Piece:
        answer = self._answer(timeout_s=timeout_s, **body)
        choice = answer.choices[0]
        logprobs = [] if choice.logprobs is None else choice.logprobs.token_logprobs
        if len(logprobs) != len(choice.token_ids):
            raise BadReplyError(
                f"{self.base_url} gives {len(logprobs)} log-probs of {len(choice.token_ids)} tokens (logprobs)"
            )
        completes_stop = choice.finish_reason == "stop" and isinstance(choice.stop_reason, str)
        details = answer.usage and answer.usage.prompt_tokens_details
        return Piece(choice.token_ids, logprobs, completes_stop, (details and details.cached_tokens) or 0)

    def _answer(self, *, timeout_s: float = CONTROL_TIMEOUT_S, **body: Any) -> _Completions:
        # whatever the server's own defaults are, nothing but the body may shape the distribution
        fixed = {
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "ignore_eos": True,  # ignores only the model's own ids; those of the request are in stop_token_ids
            "skip_special_tokens": False,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
        }
        body = {**fixed, "top_p": 1.0, "top_k": 0, **body}
        return self._read(_Completions, "POST", "/v1/completions", body, timeout_s=timeout_s)

    def _post(self, path: str, body: dict[str, Any], *, timeout_s: float | None = None) -> None:
        self._call("POST", path, json=json.dumps(body).encode(), timeout_s=timeout_s)

    def _read(
        self,
        kind: type[M],
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        params: dict[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> M:
        encoded = None if body is None else json.dumps(body).encode()
        reply = self._call(method, path, json=encoded, params=params, timeout_s=timeout_s)
        try:
            return kind.model_validate_json(reply.content, extra="ignore")
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "body"
            raise BadReplyError(
                f"{reply.url} sent an answer without what is needed: {where}: {first['msg']}{message_of(reply)}"
            ) from None
