"""The view that a buffer process has of the live settings in Redis."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tba_buffer.run.settings import Settings, read_settings

from tba.errors import ConfigError
from tests.support.trainer_values import make_recipe


class SlowFirst:
    """Redis whose first answer comes long after it was made."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def hgetall(self, name: str) -> dict[bytes, bytes]:
        self.num_calls += 1
        revision = self.num_calls
        for _ in range(50 if revision == 1 else 0):
            await asyncio.sleep(0)
        return {b"revision": b"%d" % revision, b"value:beta": b"0.%d" % revision}


class Holds:
    """Redis with a hash."""

    def __init__(self, fields: dict[bytes, bytes]) -> None:
        self.fields = fields

    async def hgetall(self, name: str) -> dict[bytes, bytes]:
        return self.fields


KEYS: Any = SimpleNamespace(settings="settings")


def test_an_answer_that_comes_late_does_not_put_an_older_revision_back() -> None:
    context: Any = SimpleNamespace(redis=SlowFirst(), keys=KEYS, recipe=make_recipe("model"))
    lineages: Any = None

    async def both() -> Settings:
        settings = Settings(context, lineages)
        await asyncio.gather(settings.load(), settings.load())
        return settings

    settings = asyncio.run(both())
    assert settings.revision == 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"-1", r"'beta\.value' has the value -1"),
        (b'{"value": 1, "shape": "line"}', r"unknown key 'beta\.shape'"),
        (b"{", "Expecting"),
    ],
)
def test_a_stored_value_that_this_release_cannot_read_is_one_sentence(value: bytes, message: str) -> None:
    redis: Any = Holds({b"revision": b"3", b"value:beta": value})
    with pytest.raises(ConfigError, match=rf"live settings \(revision 3\) .* cannot read: .*{message}") as caught:
        asyncio.run(read_settings(redis, KEYS, make_recipe("model")))
    assert "\n" not in str(caught.value)
