"""HTTP calls with bounded retries; problem documents come back as the errors of tba/errors.py.

`RewardClient` is the whole client of the reward service; that of the buffer is in buffer.py.
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
"""Connections that are kept open for later calls; further ones are closed after use."""
CONNECT_TIMEOUT_S = 5.0
START_WAIT_S = 900.0
"""How long a service that starts waits for the first answer of another one, which may be late itself."""
MAX_MESSAGE_CHARS = 300
"""Most of another server's own words in an error."""


class _TokenRefusedError(UnavailableError):
    """A service that accepted this client before refuses its tokens: one side has a newer tokens file, so retry."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of a service; header names are case-insensitive."""

    url: str
    status: int
    headers: Mapping[str, str]
    content: bytes


class ServiceClient:
    """Base of the clients.

    Args:
        base_url: for example http://127.0.0.1:8700.
        token: bearer token of this client's role, if the service asks for one; a `ClientToken` follows its file.
        retry_s: missing connections and 5xx are retried with jitter for this long. Every call is safe to repeat: all
            attempts share the ids that make pushes, leases, lineages, acks, publications and uploads idempotent.
        timeout_s: deadline of one attempt.
        ca_file: PEM file of the authorities that are trusted for an https URL (`tls.ca_file`); none: the system's.

    Raises:
        ConfigError: the URL has a user, password or options, or another scheme; or it is https and `ca_file` cannot be
            used.
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
        """Return why the service cannot do its work now (GET /readyz); None if it can.

        Raises:
            TlsError: it never answered, and its TLS is not as the settings say.
            UnavailableError: it does not answer.
        """
        reply = self.ask("/readyz", timeout_s=timeout_s)
        return None if reply.status == 200 else error_of(reply)

    def ask(self, path: str, *, timeout_s: float | None = None) -> Reply:
        """GET a path once, and return the answer, whatever its status is.

        Raises:
            TlsError: it never answered, and its TLS is not as the settings say.
            UnavailableError: it does not answer.
        """
        read_s = timeout_s or self._timeout_s
        timeout = urllib3.Timeout(connect=min(CONNECT_TIMEOUT_S, read_s), read=read_s)
        return self._attempt("GET", f"{self._path}{path}", path, body=None, headers={}, timeout=timeout)

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
        """Send one request.

        Raises:
            ServiceError: one of its subclasses; UnavailableError once `retry_s` is over.
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
        """Send one request, and return the answer, whatever its status is."""
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
        """Send one request; try each token that the service may know until it accepts one."""
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
        """Yield the reply to a GET whose body is read as it arrives.

        Args:
            silence_s: after so long without a byte it is given up.

        Raises:
            ServiceError: one of its subclasses; in the block too, when the connection is cut.
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
        """Return the error to raise for a call without an answer."""
        problem = explain_tls_error(error, where=self.base_url, ca_file=self._ca_file)
        if problem is None:
            problem = f"{self.base_url} does not answer ({type(error).__name__}); is the service running there?"
            if not self._has_answered and isinstance(error, urllib3.exceptions.ProtocolError):
                problem += " If it speaks TLS, its address begins with https://"
            return UnavailableError(problem)
        # a service that answered before may be getting a new certificate, which passes; else a person must fix it
        return UnavailableError(problem) if self._has_answered else TlsError(problem)


def tls_options(url: str, ca_file: str | None) -> dict[str, Any]:
    """Return the options with which urllib3 checks the certificate behind an https URL; none for other URLs."""
    if not url.startswith("https://"):
        return {}
    check_ca_file(ca_file)
    return {"cert_reqs": "CERT_REQUIRED", **({} if ca_file is None else {"ca_certs": ca_file})}


def parse_reply(response: Reply, reply: type[M]) -> M:
    """Parse the body of a reply.

    Raises:
        BadReplyError: it is not what this client expects; the two sides may run different releases.
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
    """Return the error that an answer which is no success stands for."""
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
    """Return the reason in an answer of an OpenAI-compatible server, to append; nothing where there is none."""
    try:
        document = jsonlib.loads(response.content)
        error = document.get("error", document)
        return f": {error if isinstance(error, str) else error['message']}"[:MAX_MESSAGE_CHARS]
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


class RewardClient(ServiceClient):
    """POST /v1/score and GET /v1/rewards."""

    def score(self, items: Sequence[ScoreItem]) -> ScoreReply:
        """Score completions; each item of the reply holds a reward or an error, never both.

        Raises:
            BadReplyError: the results are not those of the items.
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
