"""The Lua scripts (lua/*.lua): every change of more than one key is one of these, atomic and safe to repeat.

Safe to repeat: run again with the same arguments, a script stores, leases, draws and counts nothing twice; only a push
reports its items as duplicates then, and counts them so.

Each file opens with its keys, arguments and replies. Redis knows a script by its digest; after a restart of Redis the
client loads it again by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from tba_buffer.redis_link import BytesRedis, redis_errors

NAMES = (
    "push",
    "mark",
    "lease",
    "return",
    "renew",
    "upload",
    "eval_request",
    "eval_results",
    "lineage",
    "checkpoint",
    "command",
    "void",
    "draw",
    "ack",
)
PRELUDES = {"lease": "release", "return": "release"}


class Scripts:
    """Runs scripts by name.

    Args:
        redis: the client they run on.
    """

    def __init__(self, redis: BytesRedis) -> None:
        folder = files("tba_buffer") / "lua"
        self._scripts = {}
        for name in NAMES:
            parts = [PRELUDES[name], name] if name in PRELUDES else [name]
            self._scripts[name] = redis.register_script("\n".join((folder / f"{p}.lua").read_text() for p in parts))

    async def run(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """The script's reply; texts are bytes.

        Raises:
            UnavailableError: Redis did not run it, or did not say that it did.
        """
        with redis_errors(f"run {name}"):
            return await self._scripts[name](keys=keys, args=args)
