"""Bearer tokens by role, the throttle of requests without a known token, and web pages of other sites.

On loopback a service may run without tokens; anywhere else it refuses to start.
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
"""The refusals of an address are forgotten after this time without one."""
FREE_REFUSALS = 20
"""So many refusals of an address are answered at once: a person who tries, or a client with the wrong tokens file."""
DELAY_S = 1.0
"""Every later one is answered after this time, which bounds the requests of one connection."""
MAX_DELAYED = 256
"""Most answers that wait at once, of all addresses; further ones go out at once, and end the connection."""
MAX_ADDRESSES = 4096
"""Most addresses that are remembered; the one without a request for longest is forgotten first."""
FORM_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
"""A browser sends them to another site without asking that one first."""
log = get_logger("auth")


class Authenticator:
    """Check `Authorization: Bearer TOKEN` against the tokens of the allowed roles, in constant time.

    Args:
        tokens: role -> token, or the tokens file, which is followed; None accepts everyone (loopback only, as `serve`
            checks). Only digests are kept.
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
        """Return the role whose token an Authorization header carries; None if tokens are not checked.

        Raises:
            UnauthorizedError: no token or an unknown one.
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
        """Accept these roles alone; the operator may do everything that a viewer may.

        Raises:
            UnauthorizedError: no token or an unknown one.
            ForbiddenError: a token of another role.
        """
        role, allowed = self.role_of(authorization), _allowed(roles)
        if role is not None and role not in allowed:
            raise ForbiddenError(f"role {role!r} may not do this; it needs {' or '.join(allowed)}")

    def require(self, *roles: str) -> Callable[[Request], Awaitable[None]]:
        """Return `check` as a FastAPI dependency."""

        async def check(request: Request) -> None:
            self.check(request.headers.get("authorization", ""), roles)

        check.roles = _allowed(roles)  # pyright: ignore[reportFunctionMemberAccess]  # OpenAPI names them (openapi.py)
        return check

    def only(self, *roles: str) -> list[params.Depends]:
        """Return the dependencies of an endpoint that only these roles may call."""
        return [Depends(self.require(*roles))]


def _allowed(roles: Iterable[str]) -> list[str]:
    named = set(roles)
    return sorted(named | {"operator"} if "viewer" in named else named)


class AccessGate:
    """Refuse a request before its body is read: without a known token, or from a web page of another site.

    With tokens, a request under /v1 without a known one is answered with 401. `Authenticator.require` checks the role
    later: FastAPI reads a JSON body before it asks the dependencies.

    Without tokens, a page of another site could make the browser of this machine ask. It reaches loopback under a name
    of its own that it lets point there (Host; DNS rebinding), or sends what browsers send to other sites unasked
    (Origin, and the types of forms). With tokens, which such a page does not know, proxies may change all of these.

    Args:
        names: the hosts of the service's addresses; IP addresses and localhost are known anyway.
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
    """Count requests without a known token by address, log them now and then, and delay their answers."""

    def __init__(self, registry: CollectorRegistry, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._by_address: OrderedDict[str, tuple[int, float, float]] = OrderedDict()
        """Address -> refusals lately, the time of the last one, and of the last that was logged."""
        self._num_delayed = 0
        self._clock = clock
        self._refused = Counter("tba_unauthorized_total", "Requests without a known token", registry=registry)

    @property
    def is_full(self) -> bool:
        """Whether no further answer may wait."""
        return self._num_delayed >= MAX_DELAYED

    async def delay(self, address: str) -> None:
        """Count a refusal, and return once it may be answered."""
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
