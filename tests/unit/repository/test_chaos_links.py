"""deploy/chaos/links.py: what a spoilt link does to real connections."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PATH = Path(__file__).parents[3] / "deploy/chaos/links.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tba_chaos_links", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


links = load()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1000):
        writer.write(data)
        await writer.drain()
    writer.close()


@asynccontextmanager
async def spoilable() -> AsyncIterator[tuple[Any, int]]:
    """A link to an echo service, and the port it listens on."""
    service = await asyncio.start_server(echo, "127.0.0.1", 0)
    link = links.Link(f"127.0.0.1:{service.sockets[0].getsockname()[1]}")
    front = await asyncio.start_server(link._accept, "127.0.0.1", 0)
    try:
        yield link, front.sockets[0].getsockname()[1]
    finally:
        front.close()
        service.close()


async def test_an_open_link_forwards_both_ways():
    async with spoilable() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"hello")
        assert await asyncio.wait_for(reader.readexactly(5), 30) == b"hello"
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()


async def test_a_cut_link_resets_and_refuses_and_heals():
    async with spoilable() as (link, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"x")
        assert await asyncio.wait_for(reader.readexactly(1), 30) == b"x"
        link.set("cut")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 30)
        other, other_writer = await asyncio.open_connection("127.0.0.1", port)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(other.readexactly(1), 30)
        link.set("open")
        third, third_writer = await asyncio.open_connection("127.0.0.1", port)
        third_writer.write(b"y")
        assert await asyncio.wait_for(third.readexactly(1), 30) == b"y"
        for end in (writer, other_writer, third_writer):
            end.close()


async def test_a_deaf_link_holds_data_until_it_hears_again():
    async with spoilable() as (link, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        link.set("deaf")
        writer.write(b"later")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(5), 0.3)
        link.set("open")
        assert await asyncio.wait_for(reader.readexactly(5), 30) == b"later"
        writer.close()
