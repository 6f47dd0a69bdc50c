"""The listening socket of every service."""

import asyncio
import socket

import pytest

from tba.config import parse_recipe
from tba.server.serve import bind


def test_answers_do_not_wait_for_acknowledgements_on_any_loop() -> None:
    """asyncio sets TCP_NODELAY only where the socket says that it is TCP; uvloop always does."""

    async def accepted_has_no_delay() -> bool:
        found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            found.set_result(bool(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            writer.close()

        server = await asyncio.start_server(serve, sock=(listening := bind("127.0.0.1", 0)))
        async with server:
            _, writer = await asyncio.open_connection(*listening.getsockname())
            writer.close()
            return await found

    assert asyncio.run(accepted_has_no_delay())


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this kernel has no IPv6")
def test_all_addresses_are_those_of_ipv4_too() -> None:
    with bind("::", 0) as listening:
        for host in ("::1", "127.0.0.1"):
            socket.create_connection((host, listening.getsockname()[1])).close()


def test_all_addresses_of_a_machine_without_ipv6_are_those_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with bind("::", 0) as listening:
        assert listening.family == socket.AF_INET


@pytest.mark.parametrize(("host", "url"), [("::1", "http://[::1]:87"), ("::", "http://[::]:87"), ("h", "http://h:87")])
def test_an_ipv6_address_is_in_brackets_in_a_url(host: str, url: str) -> None:
    document = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"generator": "addition"}}
    recipe = parse_recipe(document | {key: {"host": host, "port": 87} for key in ("buffer", "reward")}, where="test")
    assert (recipe.buffer_url, recipe.reward_url) == (url, url)
