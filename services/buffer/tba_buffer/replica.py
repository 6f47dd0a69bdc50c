"""Which buffer process owns the run: the one that started last, if it can read what the run has in Redis.

Every start takes the next number. The scripts that change or remove stored rollouts compare it with Redis in the same
atomic call, so a process that was thought dead (a node that came back, a rolling update) can remove nothing any more.
"""

from __future__ import annotations

from tba import __version__
from tba.errors import ConfigError, SupersededError, UnavailableError
from tba_buffer.context import Context
from tba_buffer.keys import FORMAT, FORMAT_TEXT, Keys
from tba_buffer.redis_link import BytesRedis, redis_errors

SUPERSEDED = b"superseded"


async def take(context: Context) -> None:
    """Own the run from now on.

    Raises:
        ConfigError: the run is stored in another format.
        UnavailableError: Redis did not answer.
    """
    await check_format(context.redis, context.keys)
    with redis_errors("count the start of this process"):
        if context.losses.whole("replica", await context.redis.get(context.keys.replica)) is None:
            # nobody knows how many starts there were: go on from a number that none of them had
            await context.redis.set(context.keys.replica, int(context.clock()))
        async with context.redis.pipeline(transaction=True) as pipe:
            pipe.set(context.keys.format, FORMAT_TEXT, nx=True)
            pipe.incr(context.keys.replica)
            context.replica.number = int((await pipe.execute())[1])
    await context.losses.begin()


async def check_format(redis: BytesRedis, keys: Keys) -> None:
    """Nothing is read or written in a format that this release does not know.

    Raises:
        ConfigError: the run is stored in another one.
        UnavailableError: Redis did not answer.
    """
    with redis_errors("be asked for its storage format"):
        found = await redis.get(keys.format)
        # where every start counts itself, also those of 0.1; a buffer that refuses an emptied Redis writes other keys
        is_begun = bool(await redis.exists(keys.replica))
    if found is None and not is_begun:
        return
    number, _, written_by = ("1 0.1" if found is None else found.decode(errors="replace")).partition(" ")
    if number != str(FORMAT):
        raise ConfigError(
            f"what Redis has of this run ({keys.format.removesuffix(':format')}) was written by tba {written_by} in "
            f"storage format {number}, this is tba {__version__}, which reads format {FORMAT}; save it with the tba "
            "that wrote it (`tba buffer save NAME`) and begin a run of another name with that snapshot (run.snapshot), "
            "or go on with that tba; nothing was changed"
        )


async def check(context: Context) -> None:
    """Ask Redis whether this process still owns the run.

    Raises:
        SupersededError: a newer buffer process does.
        UnavailableError: Redis did not answer.
    """
    if await _number(context) > context.replica.number:
        raise _superseded(context, "serving")


async def refusal(context: Context, what: str) -> UnavailableError:
    """The error of a process to which a script has answered 'superseded'.

    Raises:
        UnavailableError: Redis did not answer.
    """
    if await _number(context) > context.replica.number:
        return _superseded(context, what)
    await context.promise.check()  # nobody else took it: Redis has forgotten starts, and more with them
    return UnavailableError(f"{what} was refused: {context.promise.broken or 'Redis has changed meanwhile, try again'}")


def _superseded(context: Context, what: str) -> SupersededError:
    """The error of a process that found the number of a newer one; it serves nothing from then on."""
    context.replica.refused = (
        f"a newer buffer process owns run {context.run!r} (this one was start number {context.replica.number}); stop "
        "this process, or restart it to take the run back"
    )
    return SupersededError(f"{what} was refused: {context.replica.refused}")


async def _number(context: Context) -> int:
    """The number in Redis; 0: none, or none that can be read."""
    with redis_errors("read the number of the buffer process"):
        return context.losses.whole("replica", await context.redis.get(context.keys.replica)) or 0
