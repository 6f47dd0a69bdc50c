"""An HTTP/1.1 relay that reads whole requests and answers: an observer may look at them, a fault may spoil them.

Every request goes over a connection of its own to the service. A client that hangs up takes its request with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from tests.system.chaos.links import reset

HEAD_BYTES = 64 * 1024
Spoil = Literal["503", "slow", "lose", "half", "flip", "short", "other delta", "no delta", "no keyframe"]
SLOW_S = 2.0
SHORTER_BYTES = 10


@dataclass(frozen=True)
class Request:
    """One request as it arrived. `head` is the request line and the headers, names in lower case."""

    method: str
    path: str
    head: bytes
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """One answer: the raw head, and the raw body (still in chunks if it came so)."""

    status: int
    head: bytes
    body: bytes


class Relay:
    """Serves on a loopback port and forwards to another one."""

    def __init__(self, target_port: int, see: Callable[[Request, Answer], None] | None = None) -> None:
        self.port = 0
        self.spoil: Spoil | None = None
        """503: refuse without forwarding. slow: SLOW_S later. lose: forward, no answer. half: half of the answer.
        flip: a bit of every file of weights that is read. short: such a file ends too early, and its length says so.
        other delta: the one that was read before it. no delta, no keyframe: the version has no such file."""
        self.num_requests = self.num_spoiled = 0
        self.errors: list[str] = []
        """Messages that this relay could not read: a defect of the harness, never expected."""
        self._target_port, self._see = target_port, see
        self._last_delta = b""

    async def start(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=HEAD_BYTES)
        self.port = server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        whole = False
        try:
            while (request := await read_request(reader, writer)) is not None:
                self.num_requests += 1
                if not await self._relay(request, reader, writer):
                    return
            whole = True
        except (OSError, asyncio.IncompleteReadError):  # one side is gone: so is the other
            pass
        except (ValueError, KeyError, asyncio.LimitOverrunError) as error:
            self.errors.append(f"port {self._target_port}: {type(error).__name__}: {error}")
        finally:
            writer.close() if whole else reset(writer)

    async def _relay(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        spoil = self.spoil
        self.num_spoiled += spoil is not None
        if spoil == "503":
            text = b"<Error><Code>SlowDown</Code><Message>injected</Message></Error>"
            writer.write(b"HTTP/1.1 503 Slow Down\r\ncontent-type: application/xml\r\n")
            writer.write(b"content-length: %d\r\n\r\n%s" % (len(text), b"" if request.method == "HEAD" else text))
            await writer.drain()
            return True
        kind = _weights_read(request)
        if kind and spoil == f"no {kind}":
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
            return True
        if spoil == "slow":
            await asyncio.sleep(SLOW_S)
        answer = await self._ask(request, reader)
        if answer is None:
            return False
        if self._see is not None:
            self._see(request, answer)
        if spoil == "lose":
            return False
        if kind and answer.status in (200, 206):
            answer = self._with_other_weights(request, answer, kind, spoil)
        writer.write(answer.head)
        writer.write(answer.body[: len(answer.body) // 2] if spoil == "half" else answer.body)
        await writer.drain()
        return spoil != "half" or not answer.body

    def _with_other_weights(self, request: Request, answer: Answer, kind: str, spoil: Spoil | None) -> Answer:
        body = answer.body
        if spoil == "short":
            return _with_length(replace(answer, body=body[:-SHORTER_BYTES]), less_bytes=SHORTER_BYTES)
        if request.method == "HEAD":
            return answer
        if spoil == "flip" and body:
            flipped = bytearray(body)
            flipped[len(flipped) // 2] ^= 1
            return replace(answer, body=bytes(flipped))
        if kind == "delta":
            before, self._last_delta = self._last_delta, body
            if spoil == "other delta" and before:
                return replace(answer, body=(before + bytes(len(body)))[: len(body)])
        return answer

    async def _ask(self, request: Request, client: asyncio.StreamReader) -> Answer | None:
        hung_up = asyncio.create_task(client.read(1))  # clients of ours send nothing before the answer
        exchange = asyncio.create_task(self._exchange(request))
        try:
            await asyncio.wait({hung_up, exchange}, return_when=asyncio.FIRST_COMPLETED)
            if not exchange.done() and hung_up.result():
                raise ValueError("the client sent more before its answer")
            return exchange.result() if exchange.done() else None
        finally:
            for task in (hung_up, exchange):
                task.cancel()
            await asyncio.gather(hung_up, exchange, return_exceptions=True)

    async def _exchange(self, request: Request) -> Answer:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._target_port, limit=HEAD_BYTES)
        try:
            writer.write(request.head)
            writer.write(request.body)
            await writer.drain()
            return await read_answer(reader, request.method)
        finally:
            writer.close()


def _weights_read(request: Request) -> Literal["delta", "keyframe", "other", ""]:
    """Which file of weights a request reads: of a version, another one (of a checkpoint), or none."""
    folder, _, name = request.path.partition("?")[0].rpartition("/")  # a listing names files in its query
    if not name.endswith(".safetensors") or request.method not in ("GET", "HEAD"):
        return ""
    if "/weights/" not in folder:
        return "other"
    return "delta" if name.startswith("delta-") else "keyframe"


def _with_length(answer: Answer, *, less_bytes: int) -> Answer:
    line, headers = _split(answer.head)
    headers["content-length"] = str(max(int(headers["content-length"]) - less_bytes, 0))
    lines = [line, *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return replace(answer, head="\r\n".join(lines).encode("latin-1"))


async def read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
    """The next request; None when the client has no more. A client that asks before it sends gets 100 Continue."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise
    line, headers = _split(head)
    method, path, _version = line.split(" ", 2)
    if "transfer-encoding" in headers:
        raise ValueError(f"{method} {path} is sent in chunks, which no client of ours does")
    if "expect" in headers:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await writer.drain()
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    kept = {name: value for name, value in headers.items() if name not in ("expect", "connection")}
    lines = [line, *(f"{name}: {value}" for name, value in kept.items()), "connection: close", "", ""]
    return Request(method, path, "\r\n".join(lines).encode("latin-1"), headers, body)


async def read_answer(reader: asyncio.StreamReader, method: str) -> Answer:
    """One whole answer, without the header that would end the client's connection."""
    line, headers = _split(await reader.readuntil(b"\r\n\r\n"))
    status = int(line.split(" ", 2)[1])
    if method == "HEAD" or status in (204, 304):
        body = b""
    elif "chunked" in headers.get("transfer-encoding", ""):
        body = await _chunks(reader)
    elif "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        body = await reader.read()
        headers["content-length"] = str(len(body))
    headers.pop("connection", None)
    lines = [line, *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return Answer(status, "\r\n".join(lines).encode("latin-1"), body)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    pieces = []
    while True:
        size = await reader.readuntil(b"\r\n")
        piece = await reader.readexactly(int(size.split(b";")[0], 16) + 2)
        pieces += [size, piece]
        if len(piece) == 2:
            return b"".join(pieces)


def _split(head: bytes) -> tuple[str, dict[str, str]]:
    line, *rest = head.decode("latin-1").split("\r\n")
    headers = {}
    with contextlib.suppress(ValueError):
        for text in rest:
            name, value = text.split(":", 1)
            headers[name.strip().lower()] = value.strip()
    return line, headers
