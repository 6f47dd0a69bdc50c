"""Bearer tokens by role, and the throttle of requests without a known token.

On loopback a service may run without tokens; anywhere else it refuses to start.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

from fastapi import Request
from prometheus_client import CollectorRegistry, Counter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tba.errors import ForbiddenError, UnauthorizedError
from tba.logs import get_logger
from tba.server.problems import error_response
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
LOG_EVERY_S = 60.0
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


def _allowed(roles: Iterable[str]) -> list[str]:
    named = set(roles)
    return sorted(named | {"operator"} if "viewer" in named else named)


class TokenGate:
    """Answer a request under /v1 without a known token with 401, before its body is read.

    `Authenticator.require` checks the role later: FastAPI reads a JSON body before it asks the dependencies.
    """

    def __init__(self, app: ASGIApp, auth: Authenticator, throttle: AuthThrottle) -> None:
        self.app = app
        self.auth = auth
        self.throttle = throttle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            try:
                self.auth.role_of(Headers(scope=scope).get("authorization", ""))
            except UnauthorizedError as error:
                response = error_response(error)
                # A request with a known token never waits here, even if its address is throttled: good and bad
                # clients share an address behind a proxy or a gateway.
                await self.throttle.delay((scope.get("client") or ("unknown", 0))[0])
                if self.throttle.is_full:
                    response.headers["connection"] = "close"
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)


@dataclass(slots=True)
class _Address:
    num_refused: int = 0
    num_not_logged: int = 0
    last_s: float = 0.0
    next_log_s: float = 0.0


class AuthThrottle:
    """Count requests without a known token by address, log them now and then, and delay their answers.

    Args:
        registry: shows the count.
        clock: monotonic seconds.
    """

    def __init__(self, registry: CollectorRegistry, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._by_address: OrderedDict[str, _Address] = OrderedDict()
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
        # waiting answers cost memory: when too many wait, the delay itself would be the attack
        if self._note(address) <= FREE_REFUSALS or self.is_full:
            return
        self._num_delayed += 1
        try:
            await asyncio.sleep(DELAY_S)
        finally:
            self._num_delayed -= 1

    def _note(self, address: str) -> int:
        """Count a refusal; return how many requests of this address were refused lately, this one included."""
        now_s = self._clock()
        client = self._by_address.setdefault(address, _Address())
        self._by_address.move_to_end(address)
        # an attacker with many addresses must not fill the memory
        if len(self._by_address) > MAX_ADDRESSES:
            self._by_address.popitem(last=False)
        if now_s - client.last_s > WINDOW_S:
            client.num_refused = 0
        client.last_s = now_s
        client.num_refused += 1
        client.num_not_logged += 1
        if now_s >= client.next_log_s:
            log.warning("unauthorized", client=address, requests=client.num_not_logged)
            client.num_not_logged, client.next_log_s = 0, now_s + LOG_EVERY_S
        return client.num_refused
