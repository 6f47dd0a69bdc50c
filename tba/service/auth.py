"""Bearer tokens by role. On loopback a service may run without; anywhere else it refuses to start."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping

from fastapi import Request

from tba.errors import UnauthorizedError


class ForbiddenError(UnauthorizedError):
    """The token is known, but its role may not do this."""

    slug = "forbidden"
    status = 403


class Authenticator:
    """Checks `Authorization: Bearer TOKEN` against the tokens of the allowed roles, in constant time.

    Args:
        tokens: role -> token, or None to let everyone in (loopback only; `serve` checks).
    """

    def __init__(self, tokens: Mapping[str, str] | None) -> None:
        self._tokens = None if tokens is None else dict(tokens)

    @property
    def enabled(self) -> bool:
        """Whether tokens are checked."""
        return self._tokens is not None

    def require(self, *roles: str) -> Callable[[Request], Awaitable[None]]:
        """A FastAPI dependency that lets these roles pass; the operator may do whatever a viewer may.

        Raises (in the request):
            UnauthorizedError: no token or an unknown one.
            ForbiddenError: a token of another role.
        """
        allowed = {*roles, *(("operator",) if "viewer" in roles else ())}

        async def check(request: Request) -> None:
            if self._tokens is None:
                return
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not given:
                raise UnauthorizedError("no bearer token; send `Authorization: Bearer TOKEN`")
            role = next((r for r, t in self._tokens.items() if hmac.compare_digest(t.encode(), given.encode())), None)
            if role is None:
                raise UnauthorizedError("the bearer token is not known here; check the tokens file of both sides")
            if role not in allowed:
                raise ForbiddenError(f"role {role!r} may not do this; it needs {' or '.join(sorted(allowed))}")

        check.roles = sorted(allowed)  # pyright: ignore[reportFunctionMemberAccess]  # OpenAPI names them (openapi.py)
        return check
