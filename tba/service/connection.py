"""What an answer that stays open must know of its connection: that the server stops; and how to end it at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Scope

EXTENSION = "tba.connection"


class Connection:
    """Of one client; the protocol (protocol.py) puts it into the scope of every request.

    Args:
        give_up: closes the connection at once for a reason that is counted, whatever the client still reads or sends.
    """

    def __init__(self, give_up: Callable[[str], None]) -> None:
        self.give_up = give_up
        self.stopping = asyncio.Event()
        """Set when the server stops: end the answer, or the end of the server waits for it."""


def connection_of(scope: Scope) -> Connection:
    """The connection of a request; one that never stops and cannot be given up under another server."""
    found = scope.get("extensions", {}).get(EXTENSION)
    return found if isinstance(found, Connection) else Connection(lambda reason: None)
