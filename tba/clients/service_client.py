"""HTTP calls with bounded retries; problem documents (RFC 9457) are raised as the errors of tba/errors.py.

`RewardClient` is the client of the reward service; the client of the buffer is in buffer.py.
"""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlencode

import stamina
import urllib3
from pydantic import ValidationError
from urllib3.util import parse_url

from tba.api import RewardInfo, RewardsReply, ScoreItem, ScoreReply, ScoreRequest
from tba.errors import (
    BadReplyError,
    BadRequestError,
    BrokenRewardError,
    BusyError,
    ConfigError,
    ConflictError,
    FencedError,
    NotFoundError,
    NotInstalledError,
    RollbackError,
    RunFailedError,
    RunOverError,
    ServiceError,
    TlsError,
    UnauthorizedError,
    UnavailableError,
    VoidBatchError,
)
from tba.fields import StrictModel, first_problem
from tba.tls import check_bare_url, check_ca_file, explain_tls_error
from tba.tokens import ClientToken

M = TypeVar("M", bound=StrictModel)
_SPECIAL: tuple[type[ServiceError], ...] = (
    BrokenRewardError,
    FencedError,
    NotInstalledError,
    RollbackError,
    RunFailedError,
    RunOverError,
    VoidBatchError,
)
_BY_SLUG = {kind.slug: kind for kind in _SPECIAL}
MAX_CONNECTIONS = 64
"""Most connections that are kept open for later calls; further ones are closed after use."""
CONNECT_TIMEOUT_S = 5.0
START_WAIT_S = 900.0
"""Seconds that a service waits at its start for the first answer of another service, which may be starting too."""
MAX_MESSAGE_CHARS = 300
"""Most characters of another server's message that an error quotes."""


class _TokenRefusedError(UnavailableError):
    """A service that accepted this client's token before now refuses it: tokens are being changed, so retry."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The HTTP reply of a service; header names are case-insensitive."""

    url: str
    status: int
    headers: Mapping[str, str]
    content: bytes


class ServiceClient:
    """Base class of the clients of services.

    Args:
        base_url: for example http://127.0.0.1:8700.
        token: bearer token of this client's role, if the service needs one; a `ClientToken` follows its file.
        retry_s: seconds to retry failed connections, 408 and 5xx, with jitter. Every call is safe to repeat: all
            attempts share the ids that make pushes, leases, lineages, acks, publications and uploads idempotent.
        timeout_s: deadline of one attempt.
        ca_file: PEM file of the trusted certificate authorities for an https URL (`tls.ca_file`); none: the system's.

    Raises:
        ConfigError: the URL has a user, password, options or unknown scheme; or it is https, and `ca_file` is unusable.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | ClientToken | None = None,
        retry_s: float = 30.0,
        timeout_s: float = 30.0,
        ca_file: str | None = None,
    ):
        check_bare_url(base_url, "the address of the service")
        self.base_url = base_url.rstrip("/")
        self._retry_s = retry_s
        self._token = token
        self._accepted: str | None = None
        """The token that the service accepted last."""
        self._timeout_s = timeout_s
        self._ca_file = ca_file
        self._has_answered = False
        try:
            parts = parse_url(self.base_url)
        except urllib3.exceptions.LocationParseError:
            parts = None
        if parts is None or parts.host is None or parts.scheme not in (None, "http", "https"):
            raise ConfigError(f"{self.base_url!r} is not the address of a service, such as http://127.0.0.1:8700")
        self._path = parts.path or ""
        trust = tls_options(self.base_url, ca_file)
        # urllib3 must not retry: it would repeat refused calls, and know nothing of the deadline of all attempts
        self._http = urllib3.connection_from_url(self.base_url, maxsize=MAX_CONNECTIONS, retries=False, **trust)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def not_ready(self, *, timeout_s: float | None = None) -> ServiceError | None:
        """Ask GET /readyz once; return None if the service is ready, else its error.

        Raises:
            TlsError: the service never answered, and its TLS does not match the settings.
            UnavailableError: the service does not answer.
        """
        reply = self.ask("/readyz", timeout_s=timeout_s)
        return None if reply.status == 200 else error_of(reply)

    def ask(self, path: str, *, timeout_s: float | None = None) -> Reply:
        """GET a path once, without retries; return the reply with any status.

        Raises:
            TlsError: the service never answered, and its TLS does not match the settings.
            UnavailableError: the service does not answer.
        """
        read_s = timeout_s or self._timeout_s
        timeout = urllib3.Timeout(connect=min(CONNECT_TIMEOUT_S, read_s), read=read_s)
        return self._attempt("GET", f"{self._path}{path}", path, body=None, headers={}, timeout=timeout)

    def relay(
        self, method: str, target: str, body: bytes, headers: Mapping[str, str]
    ) -> urllib3.response.BaseHTTPResponse:
        """Send a request of somebody else once; return the reply with any status, whose body is not read yet."""
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=self._timeout_s)
        target = self._path + target
        return self._open(method, target, body=body, headers=headers, timeout=timeout, preload_content=False)

    def _call(
        self,
        method: str,
        path: str,
        *,
        json: bytes | None = None,
        msgpack: bytes | None = None,
        params: dict[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Reply:
        """Send one request, with retries; return a reply of status 2xx.

        Raises:
            ServiceError: one of its subclasses; UnavailableError when retries have failed for `retry_s`.
        """
        kind = "application/msgpack" if msgpack is not None else "application/json"
        sent = {"content-type": kind, **(headers or {})}
        body = msgpack if msgpack is not None else json
        target = self._path + path + (f"?{urlencode(params)}" if params else "")
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=timeout_s or self._timeout_s)
        attempts = stamina.retry_context(
            on=UnavailableError,
            # stamina warns about a timeout of 0, so that "no retry" is one attempt
            attempts=None if self._retry_s > 0 else 1,
            timeout=max(self._retry_s, 0.001),
            wait_initial=0.1,
            wait_max=3.0,
        )
        try:
            for attempt in attempts:
                with attempt:
                    reply = self._attempt(method, target, path, body=body, headers=sent, timeout=timeout)
                    if 200 <= reply.status < 300:
                        return reply
                    raise error_of(reply)
        # retried as if the service was away; after the deadline the person needs the real reason
        except _TokenRefusedError as error:
            raise UnauthorizedError(str(error)) from None
        raise AssertionError("retry_context either returns or raises")

    def _attempt(
        self,
        method: str,
        target: str,
        path: str,
        *,
        body: bytes | None,
        headers: dict[str, str],
        timeout: urllib3.Timeout,
    ) -> Reply:
        """Send one request once; return the reply with any status."""
        answer = self._open(method, target, body=body, headers=headers, timeout=timeout)
        reply = Reply(self.base_url + path, answer.status, answer.headers, answer.data)
        if reply.status == 401 and isinstance(self._token, ClientToken) and self._accepted is not None:
            raise _TokenRefusedError(
                f"{error_of(reply)}; it accepted this client's token before, so the tokens are being changed"
            )
        return reply

    def _open(
        self,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str],
        timeout: urllib3.Timeout,
        body: bytes | None = None,
        preload_content: bool = True,
    ) -> urllib3.response.BaseHTTPResponse:
        """Send one request; if the reply is 401, send it again with the next token of this client."""
        answer: urllib3.response.BaseHTTPResponse | None = None
        # while tokens change, one of two services may have read the new file later than the other
        tokens = self._token.value if isinstance(self._token, ClientToken) else (self._token,)
        for token in sorted(tokens, key=lambda token: token != self._accepted):  # what worked last comes first
            if answer is not None:
                answer.close()  # its body is never read, and the connection would stay in use
            sent = {**headers, **({} if token is None else {"authorization": f"Bearer {token}"})}
            options: dict[str, Any] = {"redirect": False, "timeout": timeout, "preload_content": preload_content}
            try:
                answer = self._http.urlopen(method, target, body=body, headers=sent, **options)
            except urllib3.exceptions.HTTPError as error:
                raise self._connection_error(error) from None
            self._has_answered = True
            if answer.status != 401:  # any other answer shows that the token was accepted
                self._accepted = token
                break
        assert answer is not None
        return answer

    @contextmanager
    def _stream(self, path: str, *, silence_s: float) -> Iterator[urllib3.response.BaseHTTPResponse]:
        """GET a path without retries; yield the reply. The caller reads its body inside the `with` block.

        Args:
            silence_s: longest wait for the next byte, in seconds.

        Raises:
            ServiceError: one of its subclasses. A connection that breaks while the caller reads raises one too.
        """
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=silence_s)
        answer = self._open("GET", self._path + path, headers={}, timeout=timeout, preload_content=False)
        try:
            if answer.status != 200:
                raise error_of(Reply(self.base_url + path, answer.status, answer.headers, answer.read()))
            yield answer
        except urllib3.exceptions.HTTPError as error:
            raise self._connection_error(error) from None
        finally:
            answer.close()

    def _connection_error(self, error: urllib3.exceptions.HTTPError) -> ServiceError:
        """Return the error to raise for a call that got no answer: TlsError if a person must fix it."""
        problem = explain_tls_error(error, where=self.base_url, ca_file=self._ca_file)
        if problem is None:
            problem = f"{self.base_url} does not answer ({type(error).__name__}); is the service running there?"
            if not self._has_answered and isinstance(error, urllib3.exceptions.ProtocolError):
                problem += " If it speaks TLS, its address begins with https://"
            return UnavailableError(problem)
        # a service that answered before may be getting a new certificate, which passes; else a person must fix it
        return UnavailableError(problem) if self._has_answered else TlsError(problem)


def tls_options(url: str, ca_file: str | None) -> dict[str, Any]:
    """Return urllib3's options to verify the certificate of an https URL; no options for other URLs."""
    if not url.startswith("https://"):
        return {}
    check_ca_file(ca_file)
    return {"cert_reqs": "CERT_REQUIRED", **({} if ca_file is None else {"ca_certs": ca_file})}


def parse_reply(response: Reply, reply: type[M]) -> M:
    """Parse the body of a reply.

    Raises:
        BadReplyError: the body is not a valid `reply`; the two sides may run different releases.
    """
    try:
        # a newer release may say more; while an upgrade rolls, the two sides differ
        return reply.model_validate_json(response.content, extra="ignore")
    except ValidationError as error:
        raise BadReplyError(
            f"{response.url} sent an answer that is not a {reply.__name__}: {first_problem(error, whole='body')}; "
            "run the same tba release on every service"
        ) from None


def error_of(response: Reply) -> ServiceError:
    """Return the error for a reply whose status is not 2xx."""
    try:
        # a proxy answers with HTML or nothing: then the status has to do
        problem = jsonlib.loads(response.content)
        detail = str(problem["detail"])
        slug = str(problem["type"]).rsplit(":", 1)[-1]
    except (ValueError, KeyError, TypeError):
        problem, detail, slug = {}, f"{response.url} answered {response.status}{message_of(response)}", ""
    # the type of a problem document is stable; its status is shared by several errors
    if slug in _BY_SLUG:
        return _BY_SLUG[slug](detail)
    match response.status:
        case 429:
            # another release, or a proxy in between, may send neither
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


def message_of(response: Reply) -> str:
    """Return ": " and the error message in the reply of an OpenAI-compatible server; "" if it has none."""
    try:
        document = jsonlib.loads(response.content)
        error = document.get("error", document)
        return f": {error if isinstance(error, str) else error['message']}"[:MAX_MESSAGE_CHARS]
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


class RewardClient(ServiceClient):
    """Client of the reward service."""

    def score(self, items: Sequence[ScoreItem]) -> ScoreReply:
        """Score completions; each result of the reply holds a reward or an error, never both.

        Raises:
            BadReplyError: the results do not belong to the items, one by one.
            ServiceError: the request as a whole failed.
        """
        body = ScoreRequest(items=list(items)).model_dump_json(exclude_none=True).encode()  # keeps null within data
        reply = parse_reply(self._call("POST", "/v1/score", json=body), ScoreReply)
        if [result.item_id for result in reply.results] != [item.item_id for item in items]:
            raise BadReplyError(
                f"{self.base_url}/v1/score answered {len(reply.results)} results for {len(items)} items, or in another "
                "order; the scores are not used"
            )
        return reply

    def rewards(self) -> list[RewardInfo]:
        """Return the tasks that the service scores."""
        return parse_reply(self._call("GET", "/v1/rewards"), RewardsReply).rewards
