"""The buffer process that owns the run: the one that started last, if it can read the storage format of the run.

Every start takes the next epoch. The scripts that change or remove stored rollouts compare it with Redis in the same
atomic call. So a process that was thought dead (a node that came back, a rolling update) can remove nothing any more.
"""

from __future__ import annotations

from tba import __version__
from tba.errors import ConfigError, SupersededError
from tba_buffer.storage.keys import FORMAT, FORMAT_TEXT, Keys
from tba_buffer.storage.redis_client import BytesRedis, read_count, redis_errors


class BufferEpoch:
    """The claim of this process to the run.

    Args:
        redis: the client.
        keys: the key names of the run.
        run: the name of the run.
    """

    def __init__(self, redis: BytesRedis, keys: Keys, run: str) -> None:
        self._redis, self._keys, self._run = redis, keys, run
        self.number = 0
        """The epoch of this process; 0: it has not taken the run yet."""
        self.refused: str | None = None
        """Why this process serves nothing any more, once it has found the epoch of a newer one."""

    async def take(self, now_s: float) -> None:
        """Take the next epoch: now this process owns the run, and older ones cannot change stored rollouts any more.

        Raises:
            ConfigError: the run is stored in another format.
            UnavailableError: Redis did not answer, or answered with an error.
        """
        await check_format(self._redis, self._keys)
        with redis_errors("count the start of this process"):
            if read_count(await self._redis.get(self._keys.epoch)) is None:
                # damaged, so the last epoch is unknown: continue from a number that no start had
                await self._redis.set(self._keys.epoch, int(now_s))
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.set(self._keys.format, FORMAT_TEXT, nx=True)
                pipe.incr(self._keys.epoch)
                self.number = int((await pipe.execute())[1])

    async def look(self) -> None:
        """Adopt the epoch found in Redis and write nothing: a read-only buffer does not own the run.

        Raises:
            ConfigError: the run is stored in another format.
            UnavailableError: Redis did not answer, or answered with an error.
        """
        await check_format(self._redis, self._keys)
        # not 0, with which losses are not looked for: a damaged epoch, or none, is to show as one
        self.number = max(1, await self._found())

    async def check(self, what: str = "serving") -> None:
        """Ask Redis whether this process still owns the run. An error says that `what` was refused.

        Raises:
            SupersededError: a newer buffer process owns it; this one serves nothing from then on.
            UnavailableError: Redis did not answer, or answered with an error.
        """
        if await self._found() > self.number:
            self.refused = (
                f"a newer buffer process owns run {self._run!r} (this one has epoch {self.number}); stop this process, "
                "or restart it to take the run back"
            )
            raise SupersededError(f"{what} was refused: {self.refused}")

    async def _found(self) -> int:
        """Return the epoch in Redis; 0 if it is absent or damaged."""
        with redis_errors("read the epoch of the buffer process"):
            return read_count(await self._redis.get(self._keys.epoch)) or 0


async def check_format(redis: BytesRedis, keys: Keys) -> None:
    """Refuse a storage format that this release does not know.

    Raises:
        ConfigError: the run is stored in another format.
        UnavailableError: Redis did not answer, or answered with an error.
    """
    with redis_errors("be asked for its storage format"):
        found = await redis.get(keys.format)
        # the one key that every start writes, also those of 0.1: a buffer that refuses an emptied Redis writes others
        is_begun = bool(await redis.exists(keys.epoch))
    if found is None and not is_begun:
        return
    number, _, written_by = ("1 0.1" if found is None else found.decode(errors="replace")).partition(" ")
    if number != str(FORMAT):
        raise ConfigError(
            f"what Redis has of this run ({keys.format.removesuffix(':format')}) was written by another release (tba "
            f"{written_by}) in storage format {number}; this one ({__version__}) reads format {FORMAT} and cannot "
            "resume it: resume it with that release, or begin a run of another name; nothing was changed"
        )
