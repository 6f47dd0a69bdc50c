"""Bearer tokens by role, from the JSON file that `auth.tokens_file` names."""

from __future__ import annotations

import json
from pathlib import Path

from tba.errors import ConfigError

ROLES = ("searcher", "trainer", "operator", "viewer")
MIN_TOKEN_CHARS = 16


def load_tokens(path: str | Path | None) -> dict[str, str] | None:
    """Read {"role": "token"}; None means no authentication.

    Raises:
        ConfigError: the file is missing, not JSON, or names an unknown role or a short or shared token.
    """
    if path is None:
        return None
    what = f"auth.tokens_file {path}"
    try:
        tokens = json.loads(_read(path, what))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{what} is not JSON: {error}") from None
    if not isinstance(tokens, dict) or not tokens or set(tokens) - set(ROLES):
        raise ConfigError(f"{what} must map roles ({', '.join(ROLES)}) to tokens")
    for role, token in tokens.items():
        if not isinstance(token, str) or len(token) < MIN_TOKEN_CHARS:
            raise ConfigError(f"{what}: the token of {role} must be a text of {MIN_TOKEN_CHARS} characters or more")
    if len(set(tokens.values())) != len(tokens):
        raise ConfigError(f"{what}: two roles share a token; give each its own")
    return tokens


def role_token(path: str | Path | None, role: str) -> str | None:
    """The token of one role; None without authentication.

    Raises:
        ConfigError: the file is wrong, or has no token for the role.
    """
    tokens = load_tokens(path)
    if tokens is None:
        return None
    if role not in tokens:
        raise ConfigError(f"auth.tokens_file {path} has no token for the role {role!r}; add one")
    return tokens[role]


def operator_token(path: str | Path) -> str:
    """The operator's (else the viewer's) token of a JSON tokens file, or the only word of a text file.

    Raises:
        ConfigError: the file cannot be read or holds no token.
    """
    text = _read(path, f"token file {path}").strip()
    if text.startswith("{"):
        try:
            tokens = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"token file {path} is not JSON: {error}") from None
        text = str(tokens.get("operator") or tokens.get("viewer") or "")
    if not text or len(text.split()) != 1:
        raise ConfigError(f"token file {path} must hold one token, or a JSON map with the role `operator`")
    return text


def _read(path: str | Path, what: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}") from None
