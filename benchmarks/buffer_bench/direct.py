"""The direct way: one call of the buffer's own push script per batch, straight to Redis, no HTTP, no validation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgpack
from redis import Redis
from tba_buffer.index.log import pack_record
from tba_buffer.storage.context import script_text
from tba_buffer.storage.keys import Keys

from tba.versions import START

REWARDS = [reward / 7 for reward in range(8)]


def direct_push(redis: Redis, run: str) -> Callable[[Sequence[bytes]], int]:
    """A function that stores 64 rollouts of `Work.push` with one EVALSHA and answers how many were new."""
    script = redis.register_script(script_text("push"))
    keys = Keys(run)
    epoch = int(redis.get(keys.epoch))  # type: ignore[arg-type]

    def push(payloads: Sequence[bytes]) -> int:
        records = b"".join(_record(payload, at) for at, payload in enumerate(payloads))
        args = {
            "epoch": epoch,
            "records": records,
            "visit_numbers": bytes(2 * len(payloads)),
            "visit_ids": ["visit-of-nobody"],
            "searcher_ids": ["nobody"],
            "refused": {},
        }
        packed: Any = msgpack.packb(args, use_bin_type=False)  # Lua reads only the text type
        return script(keys=[keys.prefix], args=[packed, *payloads])[2].count(b"n")

    return push


def _record(payload: bytes, at: int) -> bytes:
    """Reads no more of the rollout than its id and prompt; all rollouts of `Work` are scored by (0, 0)."""
    rollout_id = payload[payload.index(b"rollout_id") + 12 :][:16]
    start = payload.index(b"prompt_id") + 9
    prompt_id: str = msgpack.unpackb(payload[start : start + 1 + (payload[start] & 0x1F)])
    return pack_record(
        rollout_id,
        reward=REWARDS[at % 8],
        version=START,
        prompt=int(prompt_id.removeprefix("train-")),
        num_bytes=len(payload),
        num_tokens=100,
        token_hash=0,
        status="scored",
    )
