"""Cursors of GET /v1/rollouts: opaque texts that say where a page ended.

A cursor names the last item by what it is ordered by (reward and log position), not by a count. So pushes and evictions
between two pages neither repeat an item nor skip one; only one that is scored again meanwhile may change its place.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from dataclasses import dataclass

from tba.api import RolloutOrder
from tba.errors import BadRequestError

ORDERS: tuple[RolloutOrder, ...] = ("best", "worst", "newest", "oldest")
_FORMAT = struct.Struct("<BdQ")
MAX_CURSOR_CHARS = 64


@dataclass(frozen=True, slots=True)
class Cursor:
    """The last item of a page. `reward` is 0 where rewards do not order the items."""

    order: RolloutOrder
    reward: float
    position: int

    def __str__(self) -> str:
        packed = _FORMAT.pack(ORDERS.index(self.order), self.reward, self.position)
        return base64.urlsafe_b64encode(packed).decode().rstrip("=")


def parse_cursor(text: str, order: RolloutOrder) -> Cursor:
    """Read a cursor of this order.

    Raises:
        BadRequestError: it was not made by this service, or for another order.
    """
    try:
        packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        number, reward, position = _FORMAT.unpack(packed)
    except (binascii.Error, ValueError, struct.error):
        raise _refused(text, "it is not one") from None
    if number >= len(ORDERS) or not math.isfinite(reward):
        raise _refused(text, "it is not one")
    if ORDERS[number] != order:
        raise _refused(text, f"it is one of order {ORDERS[number]!r}, the request has order {order!r}")
    return Cursor(order, reward, position)


def _refused(text: str, why: str) -> BadRequestError:
    return BadRequestError(
        f"cursor {text[:MAX_CURSOR_CHARS]!r} cannot be used: {why}; send the `next` of the page before, or none"
    )
