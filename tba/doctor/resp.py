"""The few words of the Redis protocol that the doctor speaks: images without the Redis library have a doctor too."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from tba.config import Recipe
from tba.errors import ConfigError
from tba.redis_access import redis_access
from tba.trust import missed_tls, tls_trouble

TIMEOUT_S = 5.0
"""Deadline of a connection, and of each answer."""
DEFAULT_PORT = 6379
MAX_REPLY_BYTES = 4 * 2**20
MAX_REPLY_ITEMS = 10_000
MAX_REPLY_DEPTH = 4
"""Far more than INFO, CONFIG GET and TIME answer; beyond it is no Redis."""
MAX_SHOWN_CHARS = 500


class RespError(Exception):
    """Redis does not answer, or refuses; one sentence."""


class Redis:
    """One connection that is open until the block ends."""

    def __init__(self, sock: socket.socket, where: str, password: str | None = None) -> None:
        self._file: Any = sock.makefile("rwb")
        self._password = password
        self.where = where

    def __enter__(self) -> Redis:
        """Use it in a block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file over the socket."""
        with contextlib.suppress(OSError):
            self._file.close()

    def call(self, *words: str) -> object:
        """Send a command: a text, a number, a list of those, or None.

        Raises:
            RespError: Redis answers with an error, or not at all.
        """
        command = [f"*{len(words)}\r\n".encode()]
        for word in words:
            raw = word.encode()
            command.append(b"$%d\r\n%s\r\n" % (len(raw), raw))
        try:
            self._file.write(b"".join(command))
            self._file.flush()
            return self._reply()
        except (OSError, ValueError) as error:
            why = self._hidden(f"{type(error).__name__}: {error}")
            raise RespError(f"Redis at {self.where} does not answer ({why})") from None

    def info(self) -> dict[str, str]:
        """INFO as a map."""
        lines = str(self.call("INFO")).splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))

    def config(self, pattern: str) -> dict[str, str] | None:
        """CONFIG GET as a map; None where it is not allowed."""
        try:
            found = self.call("CONFIG", "GET", pattern)
        except RespError:
            return None
        if not isinstance(found, list):
            return None
        return dict(zip(map(str, found[::2]), map(str, found[1::2]), strict=False))

    def time_s(self) -> float:
        """The clock of Redis, as Unix time."""
        found = self.call("TIME")
        try:
            seconds, micros = map(int, map(str, found if isinstance(found, list) else ()))
        except ValueError:
            raise RespError(f"Redis at {self.where} did not say its time") from None
        return seconds + micros / 1e6

    def _hidden(self, text: str) -> str:
        """A text of the server without the password: a Redis without AUTH answers with the words of the command."""
        return text.replace(self._password, "***") if self._password else text

    def _reply(self, depth: int = 0) -> object:
        line = self._file.readline(MAX_REPLY_BYTES)
        if not line.endswith(b"\r\n"):
            raise OSError("the connection was closed")
        kind, text = line[:1], line[1:-2].decode(errors="replace")
        if kind == b"+":
            return text
        if kind == b"-":
            raise RespError(f"Redis at {self.where} answers: {self._hidden(text)[:MAX_SHOWN_CHARS]}")
        if kind == b":":
            return int(text)
        if kind == b"$":
            if int(text) < 0:
                return None
            return self._file.read(_bounded(text, MAX_REPLY_BYTES) + 2)[:-2].decode(errors="replace")
        if kind == b"*" and depth < MAX_REPLY_DEPTH:
            return [self._reply(depth + 1) for _ in range(_bounded(text, MAX_REPLY_ITEMS))]
        raise ValueError(f"this is not Redis: {self._hidden(line.decode(errors='replace'))[:40]!r}")


@contextmanager
def open_redis(recipe: Recipe) -> Iterator[Redis]:
    """A connection to the buffer's Redis, logged in.

    Raises:
        RespError: it cannot be reached, or refuses the password; or the settings cannot be used.
    """
    try:
        access = redis_access(recipe)
        url = urlsplit(access.url)
        port = url.port or DEFAULT_PORT
        login = access.credentials() if access.password_file is not None else _login_of(url)
    except (ConfigError, ValueError) as error:
        raise RespError(str(error)) from None
    try:
        if url.scheme == "unix":
            raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            raw.settimeout(TIMEOUT_S)
            raw.connect(url.path)
        else:
            raw = socket.create_connection((url.hostname or "localhost", port), timeout=TIMEOUT_S)
        with raw:
            sock = raw
            if url.scheme == "rediss":
                context = ssl.create_default_context(cafile=recipe.tls.ca_file)
                sock = context.wrap_socket(raw, server_hostname=url.hostname)
            with Redis(sock, access.shown, login[-1] if login else None) as redis:
                _greet(redis, login, recipe)
                yield redis
    except OSError as error:
        ca_file = recipe.tls.ca_file
        trouble = tls_trouble(error, where=f"Redis at {access.shown}", ca_file=ca_file, plain="redis")
        if trouble is None:
            trouble = f"Redis at {access.shown} cannot be reached ({type(error).__name__}: {error})"
            if url.scheme == "rediss" and isinstance(error, TimeoutError):
                trouble += "; one without TLS waits for ever there: is it redis://?"
        raise RespError(trouble) from None


def _greet(redis: Redis, login: tuple[str, ...], recipe: Recipe) -> None:
    try:
        if login:
            redis.call("AUTH", *login)
        redis.call("PING")
    except RespError:
        trouble = missed_tls(redis.where, ca_file=recipe.tls.ca_file)
        if trouble is None:
            raise
        raise RespError(f"Redis at {trouble}") from None


def _bounded(text: str, most: int) -> int:
    if int(text) > most:
        raise ValueError(f"this is not Redis: a reply of {text} where {most} is much")
    return int(text)


def _login_of(url: SplitResult) -> tuple[str, ...]:
    """User and password that the URL itself has."""
    if not url.password:
        return ()
    return (*((unquote(url.username),) if url.username else ()), unquote(url.password))
