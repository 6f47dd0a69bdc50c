"""How the URL of Redis is shown: never with a password, however it was written."""

from __future__ import annotations

import pytest

from tba.config.redis import without_secrets


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("rediss://u:SECRET@h:1/3?x=y", "rediss://h:1/3"),
        ("unix:///run/redis.sock?db=1&password=SECRET", "unix:///run/redis.sock"),
        ("unix://u:SECRET@/run/redis.sock", "unix:///run/redis.sock"),
        ("redis://h:1/0?password=SEC@RET", "redis://..."),
        ("redis://:SECRET/more@h:1/0", "redis://h:1/0"),
        ("redis://:SECRET?more@h:1/0", "redis://..."),
        ("redis://:SECRET#more@h:1/0", "redis://..."),
        ("u:SECRET@h", "h"),
    ],
)
def test_no_password_is_shown(url: str, shown: str) -> None:
    assert without_secrets(url) == shown
