"""The buffer process that owns the run: the one that started last, if it can read the storage format of the run.

Every start takes the next epoch. The scripts that change or remove stored rollouts compare it with Redis in the same
atomic call. So a process that was thought dead (a node that came back, a rolling update) can remove nothing any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tba import __version__
from tba.errors import ConfigError, SupersededError, UnavailableError
from tba_buffer.storage.keys import FORMAT, FORMAT_TEXT, Keys
from tba_buffer.storage.redis_client import BytesRedis, redis_errors

if TYPE_CHECKING:
    from tba_buffer.storage.context import Context

SUPERSEDED = b"superseded"


@dataclass(slots=True)
class BufferEpoch:
    """The claim of this process to the run."""

    number: int = 0
    refused: str | None = None
    """Why this process serves nothing any more, once it has found the epoch of a newer one."""


async def take(context: Context) -> None:
    """Take the next epoch, and with it the run.

    Raises:
        ConfigError: the run is stored in another format.
        UnavailableError: Redis did not answer.
    """
    await check_format(context.redis, context.keys)
    with redis_errors("count the start of this process"):
        if context.losses.read_count(await context.redis.get(context.keys.epoch)) is None:
            # damaged, so the last epoch is unknown: continue from a number that no start had
            await context.redis.set(context.keys.epoch, int(context.clock()))
        async with context.redis.pipeline(transaction=True) as pipe:
            pipe.set(context.keys.format, FORMAT_TEXT, nx=True)
            pipe.incr(context.keys.epoch)
            context.epoch.number = int((await pipe.execute())[1])
    await context.losses.begin()


async def look(context: Context) -> None:
    """Take the epoch that Redis has as the own one, and write nothing: a read-only buffer does not own the run.

    Raises:
        ConfigError: the run is stored in another format.
        UnavailableError: Redis did not answer.
    """
    await check_format(context.redis, context.keys)
    # not 0, with which losses are not looked for: a damaged epoch, or none, is to show as one
    context.epoch.number = max(1, await _epoch(context))
    await context.losses.begin()


async def check_format(redis: BytesRedis, keys: Keys) -> None:
    """Refuse a storage format that this release does not know.

    Raises:
        ConfigError: the run is stored in another one.
        UnavailableError: Redis did not answer.
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
            "resume it: save it with the release that wrote it (`tba buffer save NAME`) and begin a run of another "
            "name with that snapshot (run.snapshot), or resume it with that release; nothing was changed"
        )


async def check(context: Context) -> None:
    """Ask Redis whether this process still owns the run.

    Raises:
        SupersededError: a newer buffer process does.
        UnavailableError: Redis did not answer.
    """
    if await _epoch(context) > context.epoch.number:
        raise _superseded(context, "serving")


async def refusal(context: Context, what: str) -> UnavailableError:
    """Return the error of a process that a script has answered 'superseded'.

    Raises:
        UnavailableError: Redis did not answer.
    """
    if await _epoch(context) > context.epoch.number:
        return _superseded(context, what)
    # nobody else took the run: Redis has forgotten epochs, and data with them
    await context.durability.check()
    return UnavailableError(
        f"{what} was refused: {context.durability.broken or 'Redis has changed meanwhile, try again'}"
    )


def _superseded(context: Context, what: str) -> SupersededError:
    """Return the error of a process that found a newer epoch; it serves nothing from then on."""
    context.epoch.refused = (
        f"a newer buffer process owns run {context.run!r} (this one has epoch {context.epoch.number}); stop "
        "this process, or restart it to take the run back"
    )
    return SupersededError(f"{what} was refused: {context.epoch.refused}")


async def _epoch(context: Context) -> int:
    """Return the epoch in Redis; 0: none, or a damaged one."""
    with redis_errors("read the epoch of the buffer process"):
        return context.losses.read_count(await context.redis.get(context.keys.epoch)) or 0
