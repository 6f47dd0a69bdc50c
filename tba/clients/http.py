"""One HTTP call with bounded retries; problem documents come back as the errors of tba/errors.py."""

from __future__ import annotations

from typing import Any, TypeVar

import httpx2
import stamina
from pydantic import ValidationError

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


class ServiceClient:
    """Base of the clients.

    Args:
        base_url: for example http://127.0.0.1:8700.
        token: bearer token of this client's role, if the service wants one.
        retry_s: no connection and 5xx are retried with jitter for this long. Every call is safe to repeat: pushes,
            acks, marks and uploads are idempotent by id; a repeated lease or lineage request costs a lease that
            expires, or a lineage number that nobody uses.
        timeout_s: deadline of one attempt.
    """

    def __init__(self, base_url: str, *, token: str | None = None, retry_s: float = 30.0, timeout_s: float = 30.0):
        self.base_url = base_url.rstrip("/")
        self._retry_s = retry_s
        self._http = httpx2.Client(
            base_url=self.base_url,
            timeout=httpx2.Timeout(timeout_s, connect=5.0),
            headers={} if token is None else {"authorization": f"Bearer {token}"},
            trust_env=False,
        )

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
    ) -> httpx2.Response:
        """Send one request.

        Raises:
            ServiceError: one of its subclasses; UnavailableError once `retry_s` is over.
        """
        headers = {"content-type": "application/msgpack" if msgpack is not None else "application/json"}
        body = msgpack if msgpack is not None else json
        extra: dict[str, Any] = {} if timeout_s is None else {"timeout": timeout_s}
        for attempt in stamina.retry_context(
            on=UnavailableError,
            attempts=None if self._retry_s > 0 else 1,
            timeout=max(self._retry_s, 0.001),
            wait_initial=0.1,
            wait_max=3.0,
        ):
            with attempt:
                try:
                    response = self._http.request(method, path, content=body, params=params, headers=headers, **extra)
                except httpx2.TransportError as error:
                    raise UnavailableError(
                        f"{self.base_url} does not answer ({type(error).__name__}); is the service running there?"
                    ) from None
                if response.is_success:
                    return response
                raise _error_of(response)
        raise AssertionError("retry_context either returns or raises")


def parse_reply(response: httpx2.Response, reply: type[M]) -> M:
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
            f"{response.request.url} answered something that is not a {reply.__name__}: {where}: {first['msg']}; "
            "run the same tba release on every service"
        ) from None


def _error_of(response: httpx2.Response) -> ServiceError:
    try:
        problem = response.json()
        detail = str(problem["detail"])
        slug = str(problem["type"]).rsplit(":", 1)[-1]
    except (ValueError, KeyError, TypeError):
        problem, detail, slug = {}, f"{response.request.url} answered {response.status_code}", ""
    if slug in _BY_SLUG:
        return _BY_SLUG[slug](detail)
    match response.status_code:
        case 429:
            retry_after_s, wait = problem.get("retry_after_s"), problem.get("wait")
            return BusyError(detail, retry_after_s=float(retry_after_s or 1.0), wait=str(wait or "busy"))
        case 401 | 403:
            return UnauthorizedError(detail)
        case 404:
            return NotFoundError(detail)
        case 409:
            return ConflictError(detail)
        case status if status >= 500:
            return UnavailableError(detail)
    return BadRequestError(detail)
