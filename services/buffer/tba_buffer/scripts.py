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

from redis.exceptions import NoScriptError, ResponseError

from tba_buffer.keys import Keys
from tba_buffer.loss import Losses
from tba_buffer.promise import Promise
from tba_buffer.redis_link import redis_errors

NAMES = (
    "push",
    "evict",
    "base",
    "score",
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
    "retry_versions",
    "glance",
    "draw",
    "ack",
    "adopt",
    "settings",
    "scale",
    "waited",
    "accept_loss",
)
NUMBERED = {
    "push",
    "score",
    "mark",
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
"""Those that acknowledge something; each adds one to what has been acknowledged (loss.py). What leases, draws and
evictions change is made again when Redis has lost it."""
PRELUDES = {
    "push": ("read",),
    "renew": ("read",),
    "lease": ("read", "release", "effects"),
    "return": ("read", "release"),
    "glance": ("read",),
    "retry_versions": ("audit",),
    "accept_loss": ("audit",),
    "draw": ("effects",),
    "ack": ("effects",),
}


class Scripts:
    """Runs scripts by name.

    Args:
        promise: of the Redis that they run on; while it is broken, nothing that writes runs.
        keys: of the run.
        losses: is told the number of what is acknowledged.
    """

    def __init__(self, promise: Promise, keys: Keys, losses: Losses) -> None:
        self._promise, self._losses = promise, losses
        self._number = ("HINCRBY", keys.counters, "acknowledged", 1)
        self._owner = ("GET", keys.replica)
        redis = promise.redis
        folder = files("tba_buffer") / "lua"
        self._scripts = {}
        for name in NAMES:
            parts = [*PRELUDES.get(name, ()), name]
            self._scripts[name] = redis.register_script("\n".join((folder / f"{p}.lua").read_text() for p in parts))

    async def run(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """The script's reply; texts are bytes.

        Raises:
            UnavailableError: Redis did not run it, did not say that it did, or could lose what it wrote.
        """
        return (await self.run_with(name, keys, args))[0]

    async def run_with(
        self, name: str, keys: Sequence[str], args: Sequence[Any], *commands: Sequence[Any]
    ) -> list[Any]:
        """The script, then plain commands, in one round trip but not atomic together: one reply each.

        Raises:
            UnavailableError: Redis did not run them, did not say that it did, or could lose what it wrote.
        """
        script, told = self._scripts[name], self._losses.told
        if name in NUMBERED:  # behind the script, so that a file that was cut between the two has a number too few
            commands = (*commands, self._number, self._owner)
        await self._promise.require()
        with redis_errors(f"run {name}"):
            evalsha = ("EVALSHA", script.sha, len(keys), *keys, *args)
            try:
                replies = await self._promise.lines.run(evalsha, *commands)
            except NoScriptError:
                await self._promise.redis.script_load(script.script)
                replies = await self._promise.lines.run(evalsha, *commands)
            except ResponseError:  # perhaps what it counts with is damaged: then loss.py says what to do
                await self._promise.check()
                await self._promise.require()
                raise
        if name in NUMBERED:
            owner, number = self._losses.whole("replica", replies.pop()) or 0, replies.pop()
            if await self._losses.tell(number, told, owner=owner):
                await self._promise.check()
        await self._promise.require()  # Redis may have been reached over a new connection
        return replies

    async def accept_loss(self, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """The one script that runs although Redis has lost data.

        Raises:
            UnavailableError: Redis did not run it.
        """
        with redis_errors("accept a loss"):
            return await self._scripts["accept_loss"](keys=keys, args=args)
