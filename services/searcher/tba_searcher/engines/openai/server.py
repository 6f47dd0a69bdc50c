"""JSON calls to a server that generates (vllm_server.py)."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from pydantic import Field, ValidationError

from tba.clients.service_client import Reply, ServiceClient, message_of
from tba.errors import BadReplyError
from tba.fields import StrictModel

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
    completes_stop: bool
    """Whether the last token completed a stop string, in the text of this piece alone."""


class ServerClient(ServiceClient):
    """JSON calls to a server; thread-safe. Every call is safe to repeat."""

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
