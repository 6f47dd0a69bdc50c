"""Bearer tokens by role. On loopback a service may run without; anywhere else it refuses to start."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable, Mapping

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tba.errors import UnauthorizedError
from tba.service.problems import error_response
from tba.service.strangers import Strangers
from tba.tokens import DIGEST_PREFIX, RoleTokens, TokensFile, digests


class ForbiddenError(UnauthorizedError):
    """The token is known, but its role may not do this."""

    slug = "forbidden"
    status = 403


class Authenticator:
    """Checks `Authorization: Bearer TOKEN` against the tokens of the allowed roles, in constant time.

    Args:
        tokens: role -> token, or the tokens file, which is followed; None lets everyone in (loopback only; `serve`
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
        return self._fixed if self._file is None else self._file.digests

    def role_of(self, authorization: str) -> str | None:
        """The role whose token an Authorization header carries; None where tokens are not checked.

        Raises:
            UnauthorizedError: no token or an unknown one.
        """
        known = self._digests()
        if known is None:
            return None
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise UnauthorizedError("no bearer token; send `Authorization: Bearer TOKEN`")
        sent = DIGEST_PREFIX + hashlib.sha256(given.encode()).hexdigest()
        for role, of_role in known.items():
            if any(hmac.compare_digest(digest, sent) for digest in of_role):
                return role
        raise UnauthorizedError("the bearer token is not known here; check the tokens file of both sides")

    def check(self, authorization: str, roles: Iterable[str]) -> None:
        """Let these roles pass; the operator may do whatever a viewer may.

        Raises:
            UnauthorizedError: no token or an unknown one.
            ForbiddenError: a token of another role.
        """
        role, allowed = self.role_of(authorization), _allowed(roles)
        if role is not None and role not in allowed:
            raise ForbiddenError(f"role {role!r} may not do this; it needs {' or '.join(allowed)}")

    def require(self, *roles: str) -> Callable[[Request], Awaitable[None]]:
        """`check` as a FastAPI dependency."""

        async def check(request: Request) -> None:
            self.check(request.headers.get("authorization", ""), roles)

        check.roles = _allowed(roles)  # pyright: ignore[reportFunctionMemberAccess]  # OpenAPI names them (openapi.py)
        return check


def _allowed(roles: Iterable[str]) -> list[str]:
    named = set(roles)
    return sorted(named | {"operator"} if "viewer" in named else named)


class TokenGate:
    """Answers 401 under /v1 where no known token came, before anything of the body is read; slower to an address from
    which many came.

    FastAPI reads a JSON body before it asks the dependencies; which role may do what stays with
    `Authenticator.require`.
    """

    def __init__(self, app: ASGIApp, auth: Authenticator, strangers: Strangers) -> None:
        self.app = app
        self.auth = auth
        self.strangers = strangers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            try:
                self.auth.role_of(Headers(scope=scope).get("authorization", ""))
            except UnauthorizedError as error:
                response = error_response(error)
                await self.strangers.hold_up((scope.get("client") or ("unknown", 0))[0])
                if self.strangers.is_flooded:
                    response.headers["connection"] = "close"
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)
