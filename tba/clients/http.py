"""One HTTP call with bounded retries; problem documents come back as the errors of tba/errors.py."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlencode

import stamina
import urllib3
from pydantic import ValidationError
from urllib3.util import parse_url

from tba.config.base import StrictModel
from tba.errors import (
    BadReplyError,
    BadRequestError,
    BusyError,
    ConflictError,
    FencedError,
    NotFoundError,
    RunOverError,
    ServiceError,
    UnauthorizedError,
    UnavailableError,
    VoidBatchError,
)

M = TypeVar("M", bound=StrictModel)
_BY_SLUG: dict[str, type[ServiceError]] = {kind.slug: kind for kind in (FencedError, RunOverError, VoidBatchError)}


MAX_CONNECTIONS = 64
"""Kept open for later calls; more at once are opened and closed again."""
CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Reply:
    """What a service answered; names of headers are case-insensitive."""

    url: str
    status: int
    headers: Mapping[str, str]
    content: bytes


class ServiceClient:
    """Base of the clients.

    Args:
        base_url: for example http://127.0.0.1:8700.
        token: bearer token of this client's role, if the service wants one.
        retry_s: no connection and 5xx are retried with jitter for this long. Every call is safe to repeat: pushes,
            leases, lineages, acks, marks and uploads are idempotent by ids that all attempts of a call share.
        timeout_s: deadline of one attempt.
    """

    def __init__(self, base_url: str, *, token: str | None = None, retry_s: float = 30.0, timeout_s: float = 30.0):
        self.base_url = base_url.rstrip("/")
        self._retry_s = retry_s
        self._token_header = {} if token is None else {"authorization": f"Bearer {token}"}
        self._timeout_s = timeout_s
        self._path = parse_url(self.base_url).path or ""
        self._http = urllib3.connection_from_url(self.base_url, maxsize=MAX_CONNECTIONS, retries=False)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _call(
        self,
        method: str,
        path: str,
        *,
        json: bytes | None = None,
        msgpack: bytes | None = None,
        params: dict[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Reply:
        """Send one request.

        Raises:
            ServiceError: one of its subclasses; UnavailableError once `retry_s` is over.
        """
        kind = "application/msgpack" if msgpack is not None else "application/json"
        headers = {"content-type": kind, **self._token_header}
        target = self._path + path + (f"?{urlencode(params)}" if params else "")
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=timeout_s or self._timeout_s)
        for attempt in stamina.retry_context(
            on=UnavailableError,
            attempts=None if self._retry_s > 0 else 1,
            timeout=max(self._retry_s, 0.001),
            wait_initial=0.1,
            wait_max=3.0,
        ):
            with attempt:
                try:
                    response = self._http.urlopen(
                        method,
                        target,
                        body=msgpack if msgpack is not None else json,
                        headers=headers,
                        redirect=False,
                        timeout=timeout,
                    )
                except urllib3.exceptions.HTTPError as error:
                    raise UnavailableError(
                        f"{self.base_url} does not answer ({type(error).__name__}); is the service running there?"
                    ) from None
                reply = Reply(self.base_url + path, response.status, response.headers, response.data)
                if 200 <= reply.status < 300:
                    return reply
                raise _error_of(reply)
        raise AssertionError("retry_context either returns or raises")


def parse_reply(response: Reply, reply: type[M]) -> M:
    """The body of a reply.

    Raises:
        BadReplyError: it is not what this client expects; the two sides may run different releases.
    """
    try:
        return reply.model_validate_json(response.content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise BadReplyError(
            f"{response.url} answered something that is not a {reply.__name__}: {where}: {first['msg']}; "
            "run the same tba release on every service"
        ) from None


def _error_of(response: Reply) -> ServiceError:
    try:
        problem = jsonlib.loads(response.content)
        detail = str(problem["detail"])
        slug = str(problem["type"]).rsplit(":", 1)[-1]
    except (ValueError, KeyError, TypeError):
        problem, detail, slug = {}, f"{response.url} answered {response.status}", ""
    if slug in _BY_SLUG:
        return _BY_SLUG[slug](detail)
    match response.status:
        case 429:
            retry_after_s, wait = problem.get("retry_after_s"), problem.get("wait")
            return BusyError(detail, retry_after_s=float(retry_after_s or 1.0), wait=str(wait or "busy"))
        case 401 | 403:
            return UnauthorizedError(detail)
        case 404:
            return NotFoundError(detail)
        case 409:
            return ConflictError(detail)
        case status if status >= 500 or status == 408:  # 408: the network was too slow for the body
            return UnavailableError(detail)
    return BadRequestError(detail)
