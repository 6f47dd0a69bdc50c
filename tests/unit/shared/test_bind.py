"""The listening socket of every service."""

import asyncio
import socket

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
