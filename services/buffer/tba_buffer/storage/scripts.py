"""Run the Lua scripts (lua/*.lua). Every change of more than one key is a script, atomic and safe to repeat.

A script that is run again with the same arguments stores, leases, draws and counts nothing twice. Only a repeated push
reports and counts its items as duplicates.

Each file begins with its keys, arguments and replies.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from redis.exceptions import NoScriptError, ResponseError

from tba_buffer.storage.client import redis_errors
from tba_buffer.storage.data_loss import Losses
from tba_buffer.storage.durability import DurabilityCheck
from tba_buffer.storage.keys import Keys

NAMES = (
    "push",
    "evict",
    "compact",
    "score",
    "publish",
    "lease",
    "return",
    "renew",
    "upload",
    "eval_request",
    "eval_results",
    "lineage",
    "checkpoint",
    "command",
    "retry_versions",
    "read_run",
    "draw",
    "ack",
    "adopt",
    "settings",
    "scale",
    "count_waits",
    "accept_loss",
)
ACKNOWLEDGING = {
    "push",
    "score",
    "publish",
    "upload",
    "eval_request",
    "eval_results",
    "lineage",
    "checkpoint",
    "command",
    "retry_versions",
    "ack",
    "adopt",
    "settings",
    "scale",
}
"""Scripts that acknowledge something: each adds one to the counter `acknowledged` (data_loss.py). Leases, draws and
evictions are made again when Redis has lost them."""
PRELUDES = {
    "push": ("read",),
    "renew": ("read",),
    "lease": ("read", "release", "effects"),
    "return": ("read", "release"),
    "read_run": ("read",),
    "retry_versions": ("audit",),
    "accept_loss": ("audit",),
    "draw": ("effects",),
    "ack": ("effects",),
}


class Scripts:
    """Runs scripts by name.

    Args:
        durability: of Redis; while it is broken, nothing that writes runs.
        keys: of the run.
        losses: takes the numbers of what is acknowledged.
    """

    def __init__(self, durability: DurabilityCheck, keys: Keys, losses: Losses) -> None:
        self._durability, self._losses = durability, losses
        self._number = ("HINCRBY", keys.counters, "acknowledged", 1)
        self._owner = ("GET", keys.epoch)
        redis = durability.redis
        folder = files("tba_buffer.storage") / "lua"
        self._scripts = {}
        for name in NAMES:
            parts = [*PRELUDES.get(name, ()), name]
            self._scripts[name] = redis.register_script("\n".join((folder / f"{p}.lua").read_text() for p in parts))

    async def run(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run a script and return its reply; texts are bytes.

        Raises:
            UnavailableError: Redis did not run it, did not answer, or could lose what it wrote.
        """
        return (await self.run_with(name, keys, args))[0]

    async def run_with(
        self, name: str, keys: Sequence[str], args: Sequence[Any], *commands: Sequence[Any]
    ) -> list[Any]:
        """Run a script, then plain commands, in one round trip but not atomically; return one reply each.

        Raises:
            UnavailableError: Redis did not run them, did not answer, or could lose what it wrote.
        """
        script, acknowledged = self._scripts[name], self._losses.acknowledged
        if name in ACKNOWLEDGING:
            # counted behind the script: a file that was cut between the two counts too little, never too much
            commands = (*commands, self._number, self._owner)
        await self._durability.require()
        with redis_errors(f"run {name}"):
            evalsha = ("EVALSHA", script.sha, len(keys), *keys, *args)
            try:
                replies = await self._durability.pool.run(evalsha, *commands)
            except NoScriptError:  # Redis was restarted
                await self._durability.redis.script_load(script.script)
                replies = await self._durability.pool.run(evalsha, *commands)
            except ResponseError:  # perhaps its counters are damaged: then the check says what to do
                await self._durability.check()
                await self._durability.require()
                raise
        if name in ACKNOWLEDGING:
            owner, number = self._losses.read_count("replica", replies.pop()) or 0, replies.pop()
            if await self._losses.acknowledge(number, acknowledged, owner=owner):
                await self._durability.check()
        # the script may have run over a new connection, behind which is a Redis that is not durable
        await self._durability.require()
        return replies

    async def accept_loss(self, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run the one script that may run although Redis has lost data.

        Raises:
            UnavailableError: Redis did not run it.
        """
        with redis_errors("accept a loss"):
            return await self._scripts["accept_loss"](keys=keys, args=args)
