"""Redis behind TLS and a password from a file: trusted servers, and a change of the password."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis as Client
from tba_buffer.storage.durability import DurabilityCheck

from tba.config.redis import redis_access
from tba.errors import ConfigError
from tests.support.buffer import make_payloads, make_recipe
from tests.support.buffer_fixtures import BufferThread
from tests.support.redis_process import DURABLE, RedisProcess, free_port, start_redis
from tests.support.served_app import TLS_FOLDER
from tests.support.tls_proxy import TlsProxy

PASSWORD, NEXT = "a password: with @signs/", "the next one"
AUTHORITY = {"ca_file": str(TLS_FOLDER / "authority.crt")}


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    process = start_redis(tmp_path_factory.mktemp("redis"), options=DURABLE)
    yield process
    process.stop()


@pytest.fixture(scope="module")
def rediss(redis: RedisProcess) -> Iterator[str]:
    """The same Redis behind TLS."""
    with TlsProxy(redis.port, TLS_FOLDER / "server.crt", TLS_FOLDER / "server.key") as proxy:
        yield f"rediss://127.0.0.1:{proxy.port}/0"


@pytest.fixture
def locked(redis: RedisProcess) -> Iterator[None]:
    """It asks for the password while the test runs."""
    with Client.from_url(redis.url) as admin:
        admin.config_set("requirepass", PASSWORD)
        yield
        admin.config_set("requirepass", "")
        admin.flushall()


def password_file(folder: Path, password: str = PASSWORD) -> str:
    path = folder / "password"
    path.write_text(password + "\n")
    return str(path)


@asynccontextmanager
async def durability_of(
    url: str, *, tls: dict[str, Any] | None = None, **buffer: Any
) -> AsyncIterator[DurabilityCheck]:
    recipe = make_recipe(buffer={"redis_url": url, **buffer}, tls=tls or {})
    async with aclosing(DurabilityCheck(redis_access(recipe))) as durability:
        yield durability


def test_rollouts_go_through_an_encrypted_redis_with_a_password(rediss: str, locked: None, tmp_path: Path) -> None:
    section = {"redis_url": rediss, "redis_password_file": password_file(tmp_path)}
    buffer = BufferThread(make_recipe(buffer=section, tls=AUTHORITY))
    try:
        client = buffer.with_prompts(1)
        client.push(make_payloads(["train-0"]))
        assert client.stats().num_rollouts == 4
    finally:
        buffer.stop()


async def test_a_changed_password_is_sent_by_new_connections(redis: RedisProcess, locked: None, tmp_path: Path) -> None:
    path = password_file(tmp_path)
    async with durability_of(redis.url, redis_password_file=path) as durability:
        await durability.check_at_start()
        with Client(port=redis.port, password=PASSWORD) as admin:
            admin.config_set("requirepass", NEXT)
        password_file(tmp_path, NEXT)
        await durability.redis.ping()  # connections stay
        await durability.redis.connection_pool.disconnect()
        await durability.check_at_start()
        assert await durability.pool.run(("PING",)) == [b"PONG"]


@pytest.mark.parametrize("kept", [None, "not the password"])
async def test_a_wrong_password_is_said(redis: RedisProcess, locked: None, tmp_path: Path, kept: str | None) -> None:
    section: dict[str, Any] = {} if kept is None else {"redis_password_file": password_file(tmp_path, kept)}
    async with durability_of(redis.url, **section) as durability:
        with pytest.raises(ConfigError, match=r"refuses the password .*; correct buffer.redis_password_file") as raised:
            await durability.check_at_start()
    assert "not the password" not in str(raised.value)


async def test_a_redis_that_never_comes_ends_the_wait_by_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba_buffer.storage.durability.START_TIMEOUT_S", 0.5)
    late: list[str | None] = []
    async with durability_of(f"redis://127.0.0.1:{free_port()}/0") as durability:

        async def note() -> None:
            late.append(durability.late)

        with pytest.raises(ConfigError, match=r"is not ready after .*cannot be reached .*correct buffer.redis_url"):
            await durability.check_at_start(note)
    assert late == [None]  # once, when the wait begins


@pytest.mark.parametrize("tls", [None, {"ca_file": str(TLS_FOLDER / "other.crt")}], ids=["system", "other"])
async def test_a_redis_that_nobody_vouches_for_is_refused(rediss: str, tls: dict[str, str] | None) -> None:
    async with durability_of(rediss, tls=tls) as durability:
        with pytest.raises(
            ConfigError, match=r"its certificate is not trusted: .*; tls.ca_file must hold its authority"
        ):
            await durability.check_at_start()


@pytest.mark.parametrize(
    ("url", "file", "says"),
    [
        ("redis://:SECRET@h:1/0", "there", "leave one of them out"),
        ("redis://h:1/0?password=SECRET", "there", "leave one of them out"),
        ("http://:SECRET@h:1/0", None, "must begin with redis://"),
        ("redis://:SECRET@[::1", None, "its host or port is wrong"),
        ("redis://:SECRET/more@h:1/0", None, "its host or port is wrong"),
        ("redis://:SECRET#more@h:1/0", None, "its host or port is wrong"),
        ("redis://:SECRET@h:99999/0", None, "its host or port is wrong"),
        ("u:SECRET@h", None, "must begin with redis://"),
        ("redis://h:1/0", "nowhere", "nowhere cannot be read: No such file"),
        ("redis://h:1/0", "empty", "is empty; write the password into it"),
    ],
)
def test_what_does_not_go_together_is_refused_without_showing_a_password(
    tmp_path: Path, url: str, file: str | None, says: str
) -> None:
    (tmp_path / "there").write_text("SECRET-TOO")
    (tmp_path / "empty").write_text("\n")
    recipe = make_recipe(
        buffer={"redis_url": url, "redis_password_file": None if file is None else str(tmp_path / file)}
    )
    with pytest.raises(ConfigError, match=says) as raised:
        redis_access(recipe)
    assert "SECRET" not in str(raised.value)


def test_the_user_of_the_url_goes_with_the_password_of_the_file(tmp_path: Path) -> None:
    section = {"redis_url": "rediss://tba%40x@h:1/3?x=y", "redis_password_file": password_file(tmp_path)}
    access = redis_access(make_recipe(buffer=section, tls=AUTHORITY))
    assert access.credentials() == ("tba@x", PASSWORD)
    assert (access.url, access.shown) == ("rediss://h:1/3?x=y", "rediss://h:1/3")
    assert access.tls == {"ssl_ca_certs": AUTHORITY["ca_file"]}
