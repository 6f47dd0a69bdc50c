"""Server-sent events as they arrive over HTTP.

Comments and unknown fields are skipped. An event that no empty line ends is none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from tba.api.run import RunEvent
from tba.errors import BadReplyError

MAX_EVENT_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class SentEvent:
    """One event: its name, its data, and the id of the last event that had one."""

    name: str
    data: str
    last_id: str | None


def read_events(chunks: Iterable[bytes]) -> Iterator[SentEvent]:
    """Yield the events of a stream of bytes, whose chunks may end anywhere.

    Raises:
        BadReplyError: an event is larger than MAX_EVENT_BYTES, or no UTF-8.
    """
    name, data, last_id, num_bytes = "", [], None, 0
    for line in _lines(chunks):
        if not line:
            if data:
                yield SentEvent(name or "message", "\n".join(data), last_id)
            name, data, num_bytes = "", [], 0
            continue
        num_bytes += len(line)
        # a server that never ends an event must not fill the memory
        if num_bytes > MAX_EVENT_BYTES:
            raise BadReplyError(f"an event of the stream has more than {MAX_EVENT_BYTES} bytes")
        try:
            field, _, value = line.decode().partition(":")
        except UnicodeDecodeError as error:
            raise BadReplyError(f"the stream of events is not UTF-8: {error}") from None
        # the standard takes one space after the colon, and no more
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
        # the standard ignores an id with NUL in it
        elif field == "id" and "\0" not in value:
            last_id = value


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines, ended by LF or CRLF (services of tba send LF)."""
    rest: list[bytes] = []
    num_rest = 0
    for chunk in chunks:
        *whole, last = chunk.split(b"\n")
        for line in whole:
            yield b"".join([*rest, line]).removesuffix(b"\r")
            rest, num_rest = [], 0
        # a chunk may end inside a line; the pieces are joined once, so a long line is not copied for every chunk
        rest.append(last)
        num_rest += len(last)
        if num_rest > MAX_EVENT_BYTES:
            raise BadReplyError(f"a line of the stream of events has more than {MAX_EVENT_BYTES} bytes")


def run_event(sent: SentEvent) -> RunEvent:
    """Parse an event of GET /v1/events.

    Raises:
        BadReplyError: it is not one; the two sides may run different releases.
    """
    try:
        return RunEvent.model_validate({"id": sent.last_id, "event": sent.name, "data": json.loads(sent.data)})
    except (ValidationError, ValueError) as error:
        raise BadReplyError(
            f"the stream has an event {sent.name!r} that this release does not know ({type(error).__name__}); "
            "run the same tba release on every service"
        ) from None
