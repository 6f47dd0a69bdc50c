"""The settings of connections to Redis: URL, password file, trusted authorities. redis-py is not imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tba.config import Recipe
from tba.errors import ConfigError
from tba.tls import check_ca_file, without_secrets

SCHEMES = ("redis", "rediss", "unix")


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """Arguments for redis-py: `from_url(access.url, **access.tls, ...)`, with `credentials` if there is a password
    file, which is read for every connection."""

    url: str
    """The recipe's URL, without the user if there is a password file."""
    username: str | None = None
    """The user that the password file belongs to; None: Redis' default user."""
    password_file: Path | None = None
    tls: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of redis-py for a rediss URL."""

    @property
    def shown(self) -> str:
        """The URL without user, password and options, for logs and errors."""
        return without_secrets(self.url)

    def credentials(self) -> tuple[str] | tuple[str, str]:
        """Read the password file; return (password,) or (user, password) for a new connection."""
        assert self.password_file is not None
        try:
            password = self.password_file.read_text(encoding="utf-8").strip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(f"buffer.redis_password_file {self.password_file} cannot be read: {why}") from None
        if not password:
            raise ConfigError(f"buffer.redis_password_file {self.password_file} is empty; write the password into it")
        return (password,) if self.username is None else (self.username, password)


def redis_access(recipe: Recipe) -> RedisAccess:
    """Return the access that `buffer.redis_url`, `buffer.redis_password_file` and `tls.ca_file` describe.

    Raises:
        ConfigError: the settings contradict each other, or a file cannot be used.
    """
    section, ca_file = recipe.buffer, recipe.tls.ca_file
    try:
        parts = urlsplit(section.redis_url)
        _ = parts.port
    except ValueError:  # its message may contain the password
        raise ConfigError(
            "buffer.redis_url is not a URL: its host or port is wrong; it must be like redis://HOST:6379/0, with / ? # "
            "@ and : of a password written as %2F %3F %23 %40 and %3A, or in buffer.redis_password_file"
        ) from None
    shown = without_secrets(section.redis_url)
    if parts.scheme not in SCHEMES:
        raise ConfigError(
            f"buffer.redis_url {shown!r} is not a Redis URL: it must begin with redis://, rediss:// or unix://"
        )
    if parts.scheme == "rediss":
        check_ca_file(ca_file)
    tls = {"ssl_ca_certs": ca_file} if parts.scheme == "rediss" and ca_file is not None else {}
    if section.redis_password_file is None:
        return RedisAccess(section.redis_url, tls=tls)
    if parts.password is not None or "password=" in parts.query:
        raise ConfigError(
            f"buffer.redis_url ({shown}) has a password, and buffer.redis_password_file is "
            f"{section.redis_password_file}; leave one of them out"
        )
    # no urlunsplit: of unix:///PATH it makes unix:/PATH
    url = section.redis_url.replace(f"//{parts.netloc}", f"//{parts.netloc.rpartition('@')[2]}", 1)
    username = unquote(parts.username) if parts.username else None
    access = RedisAccess(url, username, Path(section.redis_password_file), tls)
    access.credentials()
    return access
