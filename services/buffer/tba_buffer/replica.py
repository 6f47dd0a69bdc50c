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
    with redis_errors("read the number of the buffer process"):
        number = await context.redis.get(context.keys.replica)
    if int(number or 0) != context.replica.number:
        raise lost(context, "serving")


def lost(context: Context, what: str) -> SupersededError:
    """The error of a process that found another number in Redis; it serves nothing from then on."""
    context.replica.refused = (
        f"a newer buffer process owns run {context.run!r} (this one was start number {context.replica.number}); stop "
        "this process, or restart it to take the run back"
    )
    return SupersededError(f"{what} was refused: {context.replica.refused}")
