"""Reading rollouts by priority, beside training: nothing is recorded, nothing waits."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from tba.api import SampleRequest
from tba.errors import BusyError
from tba.wire import encode_push
from tba_buffer.context import Context
from tba_buffer.glance import Glances
from tba_buffer.lost_payloads import lost_error
from tba_buffer.redis_link import redis_errors
from tba_buffer.sampler import DrawSettings, draw_rollouts
from tba_buffer.scoring import Scoring

REDRAWS = 5
RETRY_S = 0.25


@dataclass(frozen=True, slots=True)
class Sample:
    """Encoded rollouts (msgpack, as a push), and what reproduces the draw."""

    body: bytes
    seed: int
    log_position: int


class Samples:
    """Draws rollouts without a batch.

    Args:
        context: Redis and settings.
        glances: a level index.
        scoring: fails what cannot be read.
    """

    def __init__(self, context: Context, glances: Glances, scoring: Scoring) -> None:
        self._context = context
        self._glances = glances
        self._scoring = scoring
        self._settings = DrawSettings.of(context.recipe)

    async def draw(self, request: SampleRequest) -> Sample:
        """`request.num` of all scored rollouts stored now, by priority.

        Raises:
            BusyError: none is stored (wait "rollouts"), or what was drawn was evicted meanwhile (wait "eviction").
            UnavailableError: Redis did not answer, or has lost payloads.
        """
        seed = secrets.randbits(63) if request.seed is None else request.seed
        lost = None
        for _ in range(REDRAWS):
            index = (await self._glances.read()).index
            if not index.num_scored:
                raise BusyError("no scored rollout is stored yet", retry_after_s=RETRY_S, wait="rollouts")
            rows = draw_rollouts(index, self._settings, request.num, seed)
            rollout_ids, positions, position = index.rollout_ids(rows), index.column("position", rows), index.position
            with redis_errors("read rollouts"):
                (payloads,) = await self._context.promise.lines.run(
                    ("HMGET", self._context.keys.payloads, *rollout_ids)
                )
            if None not in payloads:
                if await self._scoring.fail_unreadable(positions, payloads):
                    continue
                return Sample(encode_push(payloads), seed, position)
            lost = lost_error((await self._glances.read()).index, positions, payloads)
        raise lost or BusyError("the drawn rollouts were evicted meanwhile", retry_after_s=RETRY_S, wait="eviction")
