"""Which buffer process owns the run: the one that started last.

Every start takes the next number. The scripts that change or remove stored rollouts compare it with Redis in the same
atomic call, so a process that was thought dead (a node that came back, a rolling update) can remove nothing any more.
"""

from __future__ import annotations

from tba.errors import SupersededError
from tba_buffer.context import Context
from tba_buffer.redis_link import redis_errors

SUPERSEDED = b"superseded"


async def take(context: Context) -> None:
    """Own the run from now on.

    Raises:
        UnavailableError: Redis did not answer.
    """
    with redis_errors("count the start of this process"):
        context.replica.number = int(await context.redis.incr(context.keys.replica))


async def check(context: Context) -> None:
    """Ask Redis whether this process still owns the run.

    Raises:
        SupersededError: a newer buffer process does.
        UnavailableError: Redis did not answer.
    """
    found = await _number(context)
    if found != context.replica.number:
        raise lost(context, "serving", found)


async def refusal(context: Context, what: str) -> SupersededError:
    """The error of a process to which a script has answered 'superseded'.

    Raises:
        UnavailableError: Redis did not answer.
    """
    return lost(context, what, await _number(context))


def lost(context: Context, what: str, found: int | None = None) -> SupersededError:
    """The error of a process that found another number in Redis; it serves nothing from then on.

    Args:
        context: Redis and settings.
        what: what was refused.
        found: the number in Redis, 0 for none; None when it was not read. One that is not above that of this process
            was not taken by a newer one: Redis has forgotten starts, and more with them.
    """
    run, number = context.run, context.replica.number
    if found is not None and found <= number:
        context.replica.refused = (
            f"Redis has lost data of run {run!r} (it was emptied, or restored from an older file: it counts {found} "
            f"starts of the buffer, and this is start number {number}); restore Redis from its file and restart the "
            "buffer, or load a saved buffer into a new run"
        )
    else:
        context.replica.refused = (
            f"a newer buffer process owns run {run!r} (this one was start number {number}); stop this process, or "
            "restart it to take the run back"
        )
    return SupersededError(f"{what} was refused: {context.replica.refused}")


async def _number(context: Context) -> int:
    """The number in Redis; 0: none."""
    with redis_errors("read the number of the buffer process"):
        return int(await context.redis.get(context.keys.replica) or 0)
