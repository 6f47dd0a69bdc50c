"""Bearer tokens by role, from the JSON file that `auth.tokens_file` names.

A role has one token, or while it is changed two: `{"searcher": ["new", "old"]}`. Servers let both in; a client sends
the first, and the other where the first is not known yet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tba.errors import ConfigError
from tba.watched_file import WatchedFile

ROLES = ("searcher", "trainer", "operator", "viewer")
MIN_TOKEN_CHARS = 16
MAX_TOKENS_OF_A_ROLE = 2
RoleTokens = Mapping[str, tuple[str, ...]]


def load_tokens(path: str | Path | None) -> dict[str, str] | None:
    """Read role -> the token that its clients send; None means no authentication.

    Raises:
        ConfigError: the file is missing, not JSON, or names an unknown role or a short or shared token.
    """
    return None if path is None else {role: tokens[0] for role, tokens in load_role_tokens(path).items()}


def load_role_tokens(path: str | Path) -> dict[str, tuple[str, ...]]:
    """Read role -> all tokens that are let in, the one to send first.

    Raises:
        ConfigError: as `load_tokens`.
    """
    what = f"auth.tokens_file {path}"
    try:
        document = json.loads(_read(path, what))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{what} is not JSON: {error}") from None
    if not isinstance(document, dict) or not document or set(document) - set(ROLES):
        raise ConfigError(f"{what} must map roles ({', '.join(ROLES)}) to tokens")
    found = {role: _tokens_of(role, value, what) for role, value in document.items()}
    every = [token for tokens in found.values() for token in tokens]
    if len(set(every)) != len(every):
        raise ConfigError(f"{what}: two roles share a token, or a role has one twice; give each its own")
    return found


def _tokens_of(role: str, value: Any, what: str) -> tuple[str, ...]:
    tokens = value if isinstance(value, list) else [value]
    if not 1 <= len(tokens) <= MAX_TOKENS_OF_A_ROLE:
        raise ConfigError(
            f"{what}: {role} has {len(tokens)} tokens; it needs one, or {MAX_TOKENS_OF_A_ROLE} while it is changed"
        )
    for token in tokens:
        if not isinstance(token, str) or len(token) < MIN_TOKEN_CHARS:
            raise ConfigError(f"{what}: the token of {role} must be a text of {MIN_TOKEN_CHARS} characters or more")
        if not all("!" <= char <= "~" for char in token):
            raise ConfigError(
                f"{what}: the token of {role} has a blank or a character that is not ASCII, and an HTTP header cannot "
                "carry that; make another one"
            )
    return tuple(tokens)


def role_token(path: str | Path | None, role: str) -> str | None:
    """The token of one role, as it is now; None without authentication.

    Raises:
        ConfigError: the file is wrong, or has no token for the role.
    """
    return None if path is None else _of_role(path, role)[0]


def operator_token(path: str | Path) -> str:
    """The operator's (else the viewer's) token of a JSON tokens file, or the only word of a text file, as it is now.

    Raises:
        ConfigError: the file cannot be read or holds no token.
    """
    return _of_operator(path)[0]


class TokensFile:
    """The tokens that a server lets in: those of the file as it is now.

    Raises:
        ConfigError: the file is wrong. Later a wrong file is logged, and the tokens before it stay.
    """

    def __init__(self, path: str | Path) -> None:
        self._watched = WatchedFile([path], lambda: load_role_tokens(path), what=f"auth.tokens_file {path}")

    @property
    def tokens(self) -> RoleTokens:
        """Role -> its tokens."""
        return self._watched.value


class ClientToken:
    """The tokens that a client may send, in the order in which it tries them: those of the file as it is now."""

    def __init__(self, watched: WatchedFile[tuple[str, ...]]) -> None:
        self._watched = watched

    @property
    def tokens(self) -> tuple[str, ...]:
        """One, or two while it is changed."""
        return self._watched.value


def client_token(path: str | Path | None, role: str) -> ClientToken | None:
    """What a client of one role sends; None without authentication.

    Raises:
        ConfigError: the file is wrong, or has no token for the role.
    """
    if path is None:
        return None
    return ClientToken(WatchedFile([path], lambda: _of_role(path, role), what=f"the token of {role} in {path}"))


def operator_client_token(path: str | Path | None) -> ClientToken | None:
    """What a client of people sends (see `operator_token`); None without authentication.

    Raises:
        ConfigError: the file cannot be read or holds no token.
    """
    if path is None:
        return None
    return ClientToken(WatchedFile([path], lambda: _of_operator(path), what=f"the operator's token in {path}"))


def server_tokens(path: str | Path | None) -> TokensFile | None:
    """What a server lets in; None without authentication.

    Raises:
        ConfigError: the file is wrong.
    """
    return None if path is None else TokensFile(path)


def _of_role(path: str | Path, role: str) -> tuple[str, ...]:
    tokens = load_role_tokens(path)
    if role not in tokens:
        raise ConfigError(f"auth.tokens_file {path} has no token for the role {role!r}; add one")
    return tokens[role]


def _of_operator(path: str | Path) -> tuple[str, ...]:
    text = _read(path, f"token file {path}").strip()
    tokens: Any = text.split()
    if text.startswith("{"):
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"token file {path} is not JSON: {error}") from None
        found = document.get("operator") or document.get("viewer") or []
        tokens = found if isinstance(found, list) else [found]
    elif len(tokens) > 1:
        tokens = []
    if not tokens or not all(isinstance(token, str) and token for token in tokens):
        raise ConfigError(f"token file {path} must hold one token, or a JSON map with the role `operator`")
    return tuple(tokens)


def _read(path: str | Path, what: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} is not text: {error}") from None
