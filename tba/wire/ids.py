"""Identifiers that clients make themselves, so that a retry is recognised."""

from __future__ import annotations

import os
import time


def new_rollout_id() -> bytes:
    """16 bytes, UUIDv7 layout (RFC 9562, section 5.7): ordered by time of creation, unique without coordination."""
    milliseconds = time.time_ns() // 1_000_000
    raw = bytearray(milliseconds.to_bytes(6, "big") + os.urandom(10))
    raw[6] = (raw[6] & 0x0F) | 0x70
    raw[8] = (raw[8] & 0x3F) | 0x80
    return bytes(raw)


def new_id(prefix: str) -> str:
    """A short readable id, for example `lease-01928c3f5a7b7c31`."""
    return f"{prefix}-{new_rollout_id().hex()[:20]}"
