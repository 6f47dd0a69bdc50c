"""What the engine needs of a server that generates; one subclass for each kind of server, and nothing else knows them.

    check, problem_with               at the start: it can be an engine; for each request: it samples as asked
    complete, abort                   token ids in, token ids and log-probs out; at once with those that are there
    prompt_logprobs                   log-probs of a given response
    load_weights, label               all weights from a folder, and a label; a server that starts again has lost it

Which kind a server is: `dialects.connect`.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from tba.clients.service_client import Reply, ServiceClient, message_of
from tba.errors import BadReplyError, ConfigError
from tba.fields import StrictModel
from tba_searcher.engines.engine import Request

LOWEST_LOGPROB = -9999.0
"""Servers write this, something below it or nothing for minus infinity."""
M = TypeVar("M", bound=StrictModel)


class ServedModel(StrictModel):
    """What a server says of its model."""

    owned_by: str = ""
    """The kind of server."""
    max_model_len: int | None = None


class _Models(StrictModel):
    data: list[ServedModel] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens that one request to the server has made; a response may need several."""

    tokens: list[int]
    logprobs: list[float]
    completes_stop: bool | None = None
    """Whether the last token completed a stop string; None: the server does not say exactly."""


class ServerClient(ServiceClient):
    """JSON calls to a server of any kind."""

    def with_patience(self, *, retry_s: float, timeout_s: float) -> Self:
        """Return a client of the same server that waits as long as given (see `ServiceClient`)."""
        twin = copy.copy(self)  # it shares the connections, and what was found out of the server
        twin._retry_s, twin._timeout_s = retry_s, timeout_s
        return twin

    def model(self) -> ServedModel:
        """Return what the server says of its model."""
        return self._read(_Models, "GET", "/v1/models").data[0]

    def _post(self, path: str, body: dict[str, Any], *, timeout_s: float | None = None) -> Reply:
        return self._call("POST", path, json=json.dumps(body).encode(), timeout_s=timeout_s)

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


class GenerationServer(ServerClient, ABC):
    """One server; thread-safe. Every call is safe to repeat."""

    name: ClassVar[str]
    """Of the software, for messages."""
    start_hint: ClassVar[str]
    """How it must be started, for messages."""

    def check(self, *, num_tokens: int, vocab_size: int) -> None:
        """Check once that the server can be an engine.

        Args:
            num_tokens: of the longest prompt and response together.
            vocab_size: of the model.

        Raises:
            ConfigError: it cannot; with what to do.
            ServiceError: it does not answer, or refuses this client.
        """
        self._vocab_size = vocab_size
        self._check_context(num_tokens)
        self._check_updates()
        self._check_logprobs()

    @abstractmethod
    def problem_with(self, request: Request) -> str | None:
        """Return why a server that has passed `check` cannot sample as a request asks; None where it can."""

    @abstractmethod
    def complete(self, sent_id: str, request: Request, before: Sequence[int], *, seed: int | None, label: str) -> Piece:
        """Continue the response to a request.

        Args:
            sent_id: names this call for `abort`.
            before: the response tokens that are there.
            label: of the weights; keys and values that are cached under another one are not used.

        Raises:
            BadReplyError: the answer has no token ids or log-probs.
            ServiceError: it did not answer, or refuses the request.
        """

    @abstractmethod
    def abort(self, sent_ids: Sequence[str]) -> None:
        """Let calls of `complete` come back with the tokens that they have; unknown ids are ignored."""

    def abort_all(self, sent_ids: Sequence[str]) -> None:
        """Let all calls of `complete` come back: those of these ids, and there are no others."""
        self.abort(sent_ids)

    @abstractmethod
    def prompt_logprobs(self, prompt_tokens: Sequence[int], response_tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the log-probs [R] at temperature 1 of a given response."""

    @abstractmethod
    def label(self) -> str:
        """Return the label that `load_weights` gave the weights; `default` since the server has started."""

    @abstractmethod
    def load_weights(self, folder: Path, label: str, *, timeout_s: float) -> None:
        """Replace all weights by those of a folder, as the server sees it, and label them. No request may be active.

        Raises:
            ServiceError: the server could not; its weights may be a mixture.
        """

    @abstractmethod
    def _check_context(self, num_tokens: int) -> None:
        """Check that prompt and response fit (see `check`)."""

    @abstractmethod
    def _check_updates(self) -> None:
        """Check that weights can be replaced, and that the canary then reaches all of them (see `check`)."""

    @abstractmethod
    def _check_logprobs(self) -> None:
        """Check that log-probs are those of the distribution that is really drawn from (see `check`)."""

    def _check_length(self, limit: int | None, num_tokens: int, option: str) -> None:
        """Refuse a context that is too short; `option` of its command line makes it long enough."""
        if limit is not None and limit < num_tokens:
            raise ConfigError(
                f"{self.base_url} has a context of {limit} tokens, and max_prompt_tokens + max_response_tokens of "
                f"[searcher] need {num_tokens}; start it with {option}, or lower them"
            )

    def _without_updates(self, cause: Exception | str) -> ConfigError:
        return ConfigError(
            f"{self.base_url} offers no weight updates ({cause}), so it would answer with the weights that it "
            f"began with under the name of newer ones; give the address of a server itself and not of a router, and "
            f"{self.start_hint}"
        )

    def _copies(self, num_copies: int) -> ConfigError:
        # the canary would check the copy that happens to answer
        return ConfigError(
            f"{self.base_url} holds {num_copies} copies of the model (data parallelism), and a check reaches one of "
            "them; start one server for each, and a searcher for each"
        )

    def _other_logprobs(self) -> ConfigError:
        return ConfigError(
            f"{self.base_url} gives log-probs before temperature and top-k, not those of the distribution that it "
            f"draws from, so training on them would be wrong; {self.start_hint}"
        )
