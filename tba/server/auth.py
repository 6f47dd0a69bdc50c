"""Access checks: bearer tokens by role, a throttle for unknown tokens, and protection from web pages of other sites.

On loopback a service may run without tokens; on any other address it refuses to start without them.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping

from fastapi import Depends, Request, params
from prometheus_client import CollectorRegistry, Counter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tba.errors import BadRequestError, ForbiddenError, ServiceError, UnauthorizedError
from tba.logs import get_logger
from tba.server.problems import error_response
from tba.tls import is_ip_address
from tba.tokens import DIGEST_PREFIX, RoleTokens, TokensFile, digests

WINDOW_S = 60.0
"""The count of refused requests of an address is reset after this many seconds without one."""
FREE_REFUSALS = 20
"""Number of refusals that an address gets without delay: enough for a person's attempts or a wrong tokens file."""
DELAY_S = 1.0
"""Delay of every later refusal, in seconds, which limits the request rate of a connection."""
MAX_DELAYED = 256
"""Most refusals that are delayed at once, for all addresses; further ones are sent at once and close the connection."""
MAX_ADDRESSES = 4096
"""Most addresses whose refusals are counted; the least recently refused address is forgotten first."""
FORM_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
"""Content types that a browser sends to another site without a preflight request (CORS)."""
log = get_logger("auth")


class Authenticator:
    """Check `Authorization: Bearer TOKEN` against the tokens of the allowed roles, in constant time.

    Args:
        tokens: role -> token, or a tokens file, whose changes are followed; None accepts everyone (`serve` allows that
            on loopback only). Only digests are kept in memory.
    """

    def __init__(self, tokens: Mapping[str, str] | TokensFile | None) -> None:
        self._file = tokens if isinstance(tokens, TokensFile) else None
        self._fixed: RoleTokens | None = None
        if tokens is not None and not isinstance(tokens, TokensFile):
            self._fixed = digests({role: (token,) for role, token in tokens.items()})

    @property
    def enabled(self) -> bool:
        """Whether tokens are checked."""
        return self._digests() is not None

    def _digests(self) -> RoleTokens | None:
        return self._fixed if self._file is None else self._file.value

    def role_of(self, authorization: str) -> str | None:
        """Return the role of the token in an Authorization header; None if tokens are not checked.

        Raises:
            UnauthorizedError: no token, or an unknown one.
        """
        known = self._digests()
        if known is None:
            return None
        # the name of the scheme is case-insensitive (RFC 9110)
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise UnauthorizedError("no bearer token; send `Authorization: Bearer TOKEN`")
        # digests have equal lengths: comparing them tells nothing about the token, not even how long it is
        sent = DIGEST_PREFIX + hashlib.sha256(given.encode()).hexdigest()
        for role, of_role in known.items():
            if any(hmac.compare_digest(digest, sent) for digest in of_role):
                return role
        raise UnauthorizedError("the bearer token is unknown here; compare the tokens files of client and service")

    def check(self, authorization: str, roles: Iterable[str]) -> None:
        """Check that the token belongs to one of these roles; an operator may do all that a viewer may.

        Raises:
            UnauthorizedError: no token, or an unknown one.
            ForbiddenError: a token of another role.
        """
        role, allowed = self.role_of(authorization), _allowed(roles)
        if role is not None and role not in allowed:
            raise ForbiddenError(f"role {role!r} may not do this; it needs {' or '.join(allowed)}")

    def require(self, *roles: str) -> Callable[[Request], Awaitable[None]]:
        """Return a FastAPI dependency that calls `check` for these roles."""

        async def check(request: Request) -> None:
            self.check(request.headers.get("authorization", ""), roles)

        check.roles = _allowed(roles)  # pyright: ignore[reportFunctionMemberAccess]  # OpenAPI names them (openapi.py)
        return check

    def only(self, *roles: str) -> list[params.Depends]:
        """Return the `dependencies` argument for an endpoint that only these roles may call."""
        return [Depends(self.require(*roles))]


def _allowed(roles: Iterable[str]) -> list[str]:
    named = set(roles)
    return sorted(named | {"operator"} if "viewer" in named else named)


class AccessGate:
    """ASGI middleware that refuses a request before its body is read: no known token, or a web page of another site.

    With tokens, a request under /v1 without a known token gets 401. `Authenticator.require` checks the role later,
    because FastAPI reads a JSON body before it calls dependencies.

    Without tokens, a web page of another site could send requests through a browser on this machine. It could reach
    loopback under a host name of its own (DNS rebinding), so Host is checked. Or it could send what browsers send to
    other sites without a preflight, so Origin and the content types of forms are checked. With tokens, such a page
    lacks a token, and these headers are not checked, because proxies may change them.

    Args:
        names: host names of the service's addresses; IP addresses and localhost are always accepted.
    """

    def __init__(self, app: ASGIApp, auth: Authenticator, throttle: AuthThrottle, names: Iterable[str]) -> None:
        self.app, self.auth, self.throttle = app, auth, throttle
        self.names = {"localhost", *names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        refusal: ServiceError | None = None
        if scope["type"] == "http" and not self.auth.enabled:
            refusal = self._page_refusal(scope["method"], Headers(scope=scope))
        elif scope["type"] == "http" and scope["path"].startswith("/v1/"):
            try:
                self.auth.role_of(Headers(scope=scope).get("authorization", ""))
            except UnauthorizedError as error:
                refusal = error
                # A request with a known token never waits here, even if its address is throttled: good and bad
                # clients share an address behind a proxy or a gateway.
                await self.throttle.delay((scope.get("client") or ("unknown", 0))[0])
        if refusal is None:
            await self.app(scope, receive, send)
            return
        response = error_response(refusal)
        if self.throttle.is_full:
            response.headers["connection"] = "close"
        await response(scope, receive, send)

    def _page_refusal(self, method: str, headers: Headers) -> ServiceError | None:
        host = headers.get("host", "").lower()
        name = host.rpartition(":")[0] if re.search(r":\d*$", host) else host
        # an IP address leads nowhere else; programs of HTTP/1.0 send no host
        if name and not (name in self.names or name.endswith(".localhost") or is_ip_address(name.strip("[]"))):
            return ForbiddenError(
                f"Host is {host!r}: without tokens a service answers as localhost, under IP addresses, and under the "
                "host of buffer.url or reward.url, or a web page could reach it under a name of its own; use one of "
                "these"
            )
        if method in ("GET", "HEAD", "OPTIONS"):
            return None
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return ForbiddenError(f"a web page of {origin!r} may change nothing here without a token (Origin)")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind in FORM_TYPES:
            return BadRequestError(f"content-type is {kind!r}; send application/json or application/msgpack")
        return None


class AuthThrottle:
    """Count requests without a known token per address, log some of them, and delay their replies."""

    def __init__(self, registry: CollectorRegistry, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._by_address: OrderedDict[str, tuple[int, float, float]] = OrderedDict()
        """Address -> number of recent refusals, time of the last one, time of the last one that was logged."""
        self._num_delayed = 0
        self._clock = clock
        self._refused = Counter("tba_unauthorized_total", "Requests without a known token", registry=registry)

    @property
    def is_full(self) -> bool:
        """Whether no further reply may be delayed."""
        return self._num_delayed >= MAX_DELAYED

    async def delay(self, address: str) -> None:
        """Count a refusal of this address, and wait until its reply may be sent (DELAY_S or not at all)."""
        self._refused.inc()
        now_s = self._clock()
        num, last_s, logged_s = self._by_address.pop(address, (0, now_s, -math.inf))
        num = 1 if now_s - last_s > WINDOW_S else num + 1
        # a line a minute: the log drops lines of an event above ten a minute, of all addresses
        if now_s - logged_s >= WINDOW_S:
            log.warning("unauthorized", client=address, requests=num)
            logged_s = now_s
        self._by_address[address] = num, now_s, logged_s
        # an attacker with many addresses must not fill the memory
        if len(self._by_address) > MAX_ADDRESSES:
            self._by_address.popitem(last=False)
        # waiting answers cost memory: when too many wait, the delay itself would be the attack
        if num <= FREE_REFUSALS or self.is_full:
            return
        self._num_delayed += 1
        try:
            await asyncio.sleep(DELAY_S)
        finally:
            self._num_delayed -= 1
