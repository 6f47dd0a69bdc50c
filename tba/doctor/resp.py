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

TIMEOUT_S = 5.0
"""Deadline of a connection, and of each answer."""
DEFAULT_PORT = 6379
MAX_REPLY_BYTES = 4 * 2**20


class RespError(Exception):
    """Redis does not answer, or refuses; one sentence."""


class Redis:
    """One connection that is open until the block ends."""

    def __init__(self, sock: socket.socket, where: str) -> None:
        self._file: Any = sock.makefile("rwb")
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
            raise RespError(f"Redis at {self.where} does not answer ({type(error).__name__}: {error})") from None

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
        if not isinstance(found, list) or len(found) != 2:
            raise RespError(f"Redis at {self.where} did not say its time")
        return int(str(found[0])) + int(str(found[1])) / 1e6

    def _reply(self) -> object:
        line = self._file.readline(MAX_REPLY_BYTES)
        if not line.endswith(b"\r\n"):
            raise OSError("the connection was closed")
        kind, text = line[:1], line[1:-2].decode(errors="replace")
        if kind == b"+":
            return text
        if kind == b"-":
            raise RespError(f"Redis at {self.where} answers: {text}")
        if kind == b":":
            return int(text)
        if kind == b"$":
            return None if int(text) < 0 else self._file.read(int(text) + 2)[:-2].decode(errors="replace")
        if kind == b"*":
            return [self._reply() for _ in range(int(text))]
        raise ValueError(f"this is not Redis: {line[:40]!r}")


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
            with Redis(sock, access.shown) as redis:
                if login:
                    redis.call("AUTH", *login)
                redis.call("PING")
                yield redis
    except OSError as error:
        raise RespError(f"Redis at {access.shown} cannot be reached ({type(error).__name__}: {error})") from None


def _login_of(url: SplitResult) -> tuple[str, ...]:
    """User and password that the URL itself has."""
    if not url.password:
        return ()
    return (*((unquote(url.username),) if url.username else ()), unquote(url.password))
