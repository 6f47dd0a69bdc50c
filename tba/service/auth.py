"""Bearer tokens by role. On loopback a service may run without; anywhere else it refuses to start."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from fastapi import Request

from tba.errors import ConfigError, UnauthorizedError

ROLES = ("searcher", "trainer", "operator", "viewer")


class ForbiddenError(UnauthorizedError):
    """The token is known, but its role may not do this."""

    slug = "forbidden"
    status = 403


def load_tokens(path: str | None) -> dict[str, str] | None:
    """Read {"role": "token"} from a JSON file; None means no authentication.

    Raises:
        ConfigError: the file is missing, not JSON, or names an unknown role or a short token.
    """
    if path is None:
        return None
    try:
        tokens = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"auth.tokens_file {path} cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"auth.tokens_file {path} is not JSON: {error}") from None
    if not isinstance(tokens, dict) or not tokens or set(tokens) - set(ROLES):
        raise ConfigError(f"auth.tokens_file {path} must map roles ({', '.join(ROLES)}) to tokens")
    for role, token in tokens.items():
        if not isinstance(token, str) or len(token) < 16:
            raise ConfigError(f"auth.tokens_file {path}: the token of {role} must be a text of 16 characters or more")
    if len(set(tokens.values())) != len(tokens):
        raise ConfigError(f"auth.tokens_file {path}: two roles share a token; give each its own")
    return tokens


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

    def require(self, *roles: str) -> Callable[[Request], None]:
        """A FastAPI dependency that lets these roles pass; the operator may do whatever a viewer may.

        Raises (in the request):
            UnauthorizedError: no token or an unknown one.
            ForbiddenError: a token of another role.
        """
        allowed = {*roles, *(("operator",) if "viewer" in roles else ())}

        def check(request: Request) -> None:
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

        return check
