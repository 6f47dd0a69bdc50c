"""Random histories of push, mark, draw, ack, new lineage and restart, compared with a model of a few lists."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from tba_buffer.buffer import Buffer
from tba_buffer.ledger import read_ledger

from tba.api import AckRequest, BatchRequest, LineageReply, LineageRequest, MarkRequest
from tba.config import Recipe
from tba.errors import BusyError
from tba.versions import START
from tba.wire import Batch, Rollout, decode_batch, encode_rollout
from tests.support.buffer import make_prompts, make_recipe, make_rollout
from tests.support.buffer_fixtures import redis  # noqa: F401
from tests.support.redis_process import RedisProcess

MAX_ROLLOUTS, MIN_SIZE = 30, 8

steps = st.one_of(
    st.tuples(st.just("push"), st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=12)),
    st.tuples(st.just("push again"), st.integers(0, 20)),
    st.tuples(st.sampled_from(["mark", "draw", "ack", "lineage", "restart"]), st.none()),
)


@dataclass
class Model:
    """What should be in the buffer."""

    live: list[Rollout] = field(default_factory=list)
    pushed: list[Rollout] = field(default_factory=list)
    num_duplicate: int = 0
    num_evicted: int = 0
    acked: list[tuple[int, int, str]] = field(default_factory=list)

    def push(self, rollout: Rollout) -> str:
        if any(other.rollout_id == rollout.rollout_id for other in self.live):
            self.num_duplicate += 1
            return "duplicate"
        self.live.append(rollout)
        self.pushed.append(rollout)
        return "new"

    def evict(self) -> None:
        excess = max(0, len(self.live) - MAX_ROLLOUTS)
        self.live = self.live[excess:]
        self.num_evicted += excess

    def can_draw(self) -> bool:
        scored = [rollout.prompt_id for rollout in self.live if rollout.reward_status == "scored"]
        return len(scored) >= MIN_SIZE and any(scored.count(prompt_id) >= 2 for prompt_id in scored)


class History:
    """Runs steps against a real buffer over a real Redis and checks every answer."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.model = Model()
        self.buffer: Buffer
        self.lineage: LineageReply
        self.step = 0
        self.open: Batch | None = None

    async def run(self, history: list[tuple[str, Any]]) -> None:
        await self.restart()
        await self.buffer.context.redis.flushall()
        await self.restart()
        await self.buffer.catalog.upload(make_prompts(5))
        await self.new_lineage()
        for name, argument in history:
            match name:
                case "push":
                    await self.push(
                        [make_rollout(f"train-{p}", reward=1.0 if scored else None) for p, scored in argument]
                    )
                case "push again":
                    await self.push(self.model.pushed[argument : argument + 5])
                case "mark":
                    version = f"{self.lineage.lineage}-{self.step}" if self.step else "0-0"
                    await self.buffer.lineages.mark(MarkRequest(version=version, token=self.lineage.token))
                case "draw":
                    await self.draw()
                case "ack":
                    await self.ack()
                case "lineage":
                    await self.new_lineage()
                case "restart":
                    await self.restart()
            await self.check()
        await self.buffer.stop()

    async def restart(self) -> None:
        if hasattr(self, "buffer"):
            before = (await self.buffer.view.level()).fingerprint()
            await self.buffer.stop()
        else:
            before = None
        self.buffer = Buffer(self.recipe, CollectorRegistry())
        await self.buffer.start()
        if before is not None and self.buffer.view.index.position:
            assert self.buffer.view.index.fingerprint() == before

    async def push(self, rollouts: list[Rollout]) -> None:
        if not rollouts:
            return
        expected = [self.model.push(rollout) for rollout in rollouts]
        self.model.evict()
        outcomes = await self.buffer.rollouts.push([encode_rollout(rollout) for rollout in rollouts])
        assert [outcome.outcome for outcome in outcomes] == expected

    async def new_lineage(self) -> None:
        self.lineage = await self.buffer.lineages.new(LineageRequest(trainer_id="t", parent=str(START)))
        self.step, self.open = 0, None

    async def draw(self) -> None:
        request = BatchRequest(
            trainer_id="t", lineage=self.lineage.lineage, step=self.step + 1, token=self.lineage.token
        )
        live = {r.rollout_id: r for r in self.model.live}
        again = self.open is not None and all(r.rollout_id in live for r in self.open.rollouts)
        if not again and not self.model.can_draw():
            with pytest.raises(BusyError, match="min_size_to_sample"):
                await self.buffer.batches.draw(request)
            self.open = None
            return
        batch = decode_batch((await self.buffer.batches.draw(request)).body)
        assert all(live[r.rollout_id].reward_status == "scored" for r in batch.rollouts)
        assert all(r.prompt_id == group.prompt_id for group in batch.groups for r in group.rollouts)
        assert self.open is None or (batch.batch_id == self.open.batch_id) == again
        self.open = batch

    async def ack(self) -> None:
        if self.open is None:
            return
        self.step += 1
        ack = AckRequest(lineage=self.lineage.lineage, step=self.step, token=self.lineage.token)
        for _ in range(2):
            await self.buffer.batches.ack(self.open.batch_id, ack)
        self.model.acked.append((self.lineage.lineage, self.step, self.open.batch_id))
        self.open = None

    async def check(self) -> None:
        model, stats = self.model, await self.buffer.stats()
        scored = [rollout for rollout in model.live if rollout.reward_status == "scored"]
        assert (stats.num_rollouts, stats.num_scored) == (len(model.live), len(scored))
        assert stats.num_pending == len(model.live) - len(scored)
        assert stats.pushed == {"new": len(model.pushed), "duplicate": model.num_duplicate, "refused": 0}
        assert stats.evicted.get("max_rollouts", 0) == model.num_evicted
        assert stats.payload_bytes == sum(len(encode_rollout(rollout)) for rollout in model.live)
        assert stats.num_prompts_seen == len({rollout.prompt_id for rollout in scored})
        index = self.buffer.view.index
        in_index = {rid for prompt in range(5) for rid in index.rollout_ids(index.rows(prompt))}
        assert in_index == {rollout.rollout_id for rollout in scored}
        ledger = await read_ledger(self.buffer.context, self.buffer.lineages, after=0, limit=100)
        assert [(e.lineage, e.step, e.batch_id) for e in ledger.entries] == model.acked
        assert stats.rollouts_trained == 16 * len(model.acked)
        assert all(e.abandoned == (e.lineage != self.lineage.lineage) for e in ledger.entries)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=st.lists(steps, max_size=25))
def test_every_history_ends_as_the_model_says(redis: RedisProcess, history: list[tuple[str, Any]]) -> None:  # noqa: F811
    recipe = make_recipe(
        buffer={"redis_url": redis.url, "max_rollouts": MAX_ROLLOUTS}, sampling={"min_size_to_sample": MIN_SIZE}
    )
    asyncio.run(History(recipe).run(history))
