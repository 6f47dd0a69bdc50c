"""Bearer tokens by role, from the JSON file that `auth.tokens_file` names.

A role has one token, or two while it is changed: `{"searcher": ["new", "old"]}`. Servers accept both. A client sends
the first, and then the second if the first is refused. In place of a token the file may hold its digest,
`"sha256:<hex>"`. With a digest a server can check a token, but a thief cannot send it. So a server's file needs no
tokens but those it sends itself. Functions that read a file raise ConfigError if it is missing or wrong, or lacks a
needed token.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tba.errors import ConfigError
from tba.watched_file import WatchedFile

ROLES = ("searcher", "trainer", "operator", "viewer")
MIN_TOKEN_CHARS = 16
"""Minimum length of a token."""
MAX_TOKENS_OF_A_ROLE = 2
RoleTokens = Mapping[str, tuple[str, ...]]
STDIN = "-"
"""File name that makes a command read its token from standard input, once."""
DIGEST_PREFIX = "sha256:"
_DIGEST = re.compile(f"{DIGEST_PREFIX}[0-9a-f]{{64}}")


def token_digest(token: str) -> str:
    """Return the digest of a token; a digest is returned as it is."""
    return token if is_digest(token) else DIGEST_PREFIX + hashlib.sha256(token.encode()).hexdigest()


def is_digest(token: str) -> bool:
    """Return whether a text begins with DIGEST_PREFIX, as a digest does. The rest of it is not checked."""
    return token.startswith(DIGEST_PREFIX)


def new_tokens_files() -> dict[str, dict[str, str]]:
    """Return the content of new tokens files, by name: one per service, and `all` for the commands of an operator."""
    tokens = {role: secrets.token_hex(24) for role in ROLES}
    known = {role: token_digest(token) for role, token in tokens.items()}
    return {
        "buffer": {**known, "searcher": tokens["searcher"]},  # it calls the reward service in the role of a searcher
        "reward": known,
        "searcher": {"searcher": tokens["searcher"]},
        "trainer": {"trainer": tokens["trainer"]},
        "all": tokens,
    }


def load_tokens(path: str | Path | None) -> dict[str, str] | None:
    """Read a tokens file; return role -> the token to send, without roles that have only digests. No path: None."""
    if path is None:
        return None
    tokens = {role: _to_send(several) for role, several in load_role_tokens(path).items()}
    return {role: several[0] for role, several in tokens.items() if several}


def load_role_tokens(path: str | Path) -> dict[str, tuple[str, ...]]:
    """Read and check a tokens file; return role -> its tokens or digests. Clients try them in this order."""
    what = f"auth.tokens_file {path}"
    try:
        document = json.loads(_read(path, what))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{what} is not JSON: {error}") from None
    if not isinstance(document, dict) or not document or set(document) - set(ROLES):
        raise ConfigError(f"{what} must map roles ({', '.join(ROLES)}) to tokens")
    found: dict[str, tuple[str, ...]] = {}
    for role, value in document.items():
        tokens = value if isinstance(value, list) else [value]
        if not 1 <= len(tokens) <= MAX_TOKENS_OF_A_ROLE:
            raise ConfigError(
                f"{what}: {role} has {len(tokens)} tokens; it needs one, or {MAX_TOKENS_OF_A_ROLE} while it is changed"
            )
        for token in tokens:
            # a typo in a digest would lock the role out, and nothing would say why
            if isinstance(token, str) and is_digest(token) and not _DIGEST.fullmatch(token):
                raise ConfigError(
                    f"{what}: the token of {role} begins with {DIGEST_PREFIX} but 64 lower-case hexadecimal digits do "
                    "not follow; `printf %s TOKEN | sha256sum` prints them"
                )
            if not isinstance(token, str) or len(token) < MIN_TOKEN_CHARS:
                raise ConfigError(f"{what}: the token of {role} must be a text of {MIN_TOKEN_CHARS} characters or more")
            if not all("!" <= char <= "~" for char in token):
                raise ConfigError(
                    f"{what}: the token of {role} has a blank or a character that is not ASCII, which an HTTP header "
                    "cannot carry; make another one"
                )
        found[role] = tuple(tokens)
    # a shared token would give one role the rights of the other
    every = [token_digest(token) for tokens in found.values() for token in tokens]
    if len(set(every)) != len(every):
        raise ConfigError(f"{what}: two roles share a token, or a role has one twice; give each its own")
    return found


def role_token(path: str | Path | None, role: str) -> str | None:
    """Read the token that clients of one role send; None: no authentication (`path` is None)."""
    return None if path is None else _of_role(path, role)[0]


def operator_token(path: str | Path) -> str:
    """Read the operator's token, or else the viewer's, from a JSON tokens file; or the only word of a text file."""
    return _of_operator(path)[0]


class TokensFile(WatchedFile[RoleTokens]):
    """The tokens that a server accepts: role -> digests of its tokens, read again when the file changes.

    Raises:
        ConfigError: the file is wrong at the start. If it is wrong later, that is logged, and the old tokens stay.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__([path], lambda: digests(load_role_tokens(path)), what=f"auth.tokens_file {path}")


def digests(tokens: RoleTokens) -> dict[str, tuple[str, ...]]:
    """Return role -> the digests of its tokens."""
    return {role: tuple(token_digest(token) for token in several) for role, several in tokens.items()}


class ClientToken(WatchedFile[tuple[str, ...]]):
    """The tokens that a client sends: one, or two to try in this order; read again when the file changes."""


def client_token(path: str | Path | None, role: str) -> ClientToken | None:
    """Return the tokens that a client of one role sends; None: no authentication (`path` is None)."""
    if path is None:
        return None
    return ClientToken([path], lambda: _of_role(path, role), what=f"the token of {role} in {path}")


def operator_client_token(path: str | Path | None) -> ClientToken | None:
    """Return the tokens that an operator's client sends (see `operator_token`); the path "-" reads standard input."""
    if path is None:
        return None
    if path == STDIN:
        tokens = _operator_tokens(sys.stdin.read(), "the token file on stdin")
        return ClientToken([], lambda: tokens, what="the operator's token")
    return ClientToken([path], lambda: _of_operator(path), what=f"the operator's token in {path}")


def server_tokens(path: str | Path | None) -> TokensFile | None:
    """Return the tokens that a server accepts; None: no authentication (`path` is None)."""
    return None if path is None else TokensFile(path)


def _of_role(path: str | Path, role: str) -> tuple[str, ...]:
    tokens = load_role_tokens(path)
    if role not in tokens:
        raise ConfigError(f"auth.tokens_file {path} has no token for the role {role!r}; add one")
    if not (sent := _to_send(tokens[role])):
        raise ConfigError(
            f"auth.tokens_file {path} has only the digest of the token of {role!r}, which lets a server check it; a "
            "client needs the token itself"
        )
    return sent


def _to_send(tokens: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(token for token in tokens if not is_digest(token))


def _of_operator(path: str | Path) -> tuple[str, ...]:
    return _operator_tokens(_read(path, f"token file {path}"), f"token file {path}")


def _operator_tokens(text: str, what: str) -> tuple[str, ...]:
    text = text.strip()
    tokens: Any = text.split()
    if text.startswith("{"):
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{what} is not JSON: {error}") from None
        # the operator may do all that a viewer may, so its token is the better one
        of_roles = [document.get(role) or [] for role in ("operator", "viewer")]
        of_roles = [found if isinstance(found, list) else [found] for found in of_roles]
        to_send = [[x for x in found if not (isinstance(x, str) and is_digest(x))] for found in of_roles]
        tokens = to_send[0] or to_send[1]
    # a text file of several words is something else than a token
    elif len(tokens) > 1:
        tokens = []
    if not tokens or not all(isinstance(token, str) and token for token in tokens):
        raise ConfigError(f"{what} must hold one token, or a JSON map with the token of the role `operator`")
    return tuple(tokens)


def _read(path: str | Path, what: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} is not text: {error}") from None
