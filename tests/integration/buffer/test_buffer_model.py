"""Random histories of push, rescore, mark, draw, ack, lineage, compaction, crash and restart, under random bounds,
compared after every step with a model of a few lists."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from tba_buffer.eviction import evictor
from tba_buffer.index.log import CHANGE_DTYPE, STATUS_CODES
from tba_buffer.index.log_follower import Compactor
from tba_buffer.service import Buffer

from tba.api import AckRequest, BatchRequest, LineageReply, LineageRequest, VersionRequest
from tba.config import Recipe
from tba.config.sections import BufferSection
from tba.errors import BusyError
from tba.versions import START, LineageTree, PolicyVersion
from tba.wire import Batch, Rollout, VersionSpan, decode_batch, encode_rollout
from tests.support import bounds_model
from tests.support.bounds_model import Stored
from tests.support.buffer import make_prompts, make_recipe, make_rollout
from tests.support.index_values import fingerprint
from tests.support.redis_process import RedisProcess

MIN_SIZE, ROLLOUTS_PER_CALL, NUM_PROMPTS = 8, 3, 4

pushed = st.fixed_dictionaries(
    {
        "prompt": st.integers(0, NUM_PROMPTS - 1),
        "status": st.sampled_from(["scored", "scored", "pending", "failed"]),
        "reward": st.sampled_from([-1.0, 0.0, 2.5]),
        "tokens": st.integers(1, 5),
        "num_text": st.integers(0, 100),
        "age": st.integers(0, 3),
    }
)
pushes = st.lists(pushed, min_size=1, max_size=12)
steps = st.one_of(
    st.tuples(st.just("push"), pushes),
    st.tuples(st.just("push"), pushes),
    st.tuples(st.sampled_from(["push_again", "rescore"]), st.integers(0, 20)),
    st.tuples(st.just("rescore"), st.integers(0, 3)),
    st.tuples(st.just("new_lineage"), st.booleans()),
    st.tuples(st.just("compact"), st.none() | st.integers(0, 3)),
    st.tuples(st.sampled_from(["mark", "draw", "ack", "restart"]), st.none()),
)
histories = st.tuples(
    st.lists(pushed, min_size=8, max_size=16).map(lambda first: ("push", first)), st.lists(steps, max_size=25)
).map(lambda parts: [parts[0], *parts[1]])
bounds = st.fixed_dictionaries(
    {
        "max_rollouts": st.integers(8, 24),
        "max_bytes": st.sampled_from([8_000, 12_000, 10**9]),
        "max_rollouts_per_prompt": st.none() | st.integers(4, 8),
        "max_policy_age_steps": st.none() | st.integers(0, 2),
        "deduplicate": st.booleans(),
    }
)


@dataclass
class Model:
    """The expected content of the buffer."""

    bounds: BufferSection
    live: list[Stored] = field(default_factory=list)
    rollouts: dict[bytes, Rollout] = field(default_factory=dict)
    """The live rollouts as stored now, by id."""
    pushed: list[Rollout] = field(default_factory=list)
    rescored: set[bytes] = field(default_factory=set)
    tokens: Counter[str] = field(default_factory=Counter)
    """Counter -> response tokens of the rollouts that it has counted."""
    gone: set[bytes] = field(default_factory=set)
    """Evicted: pushed again, they are duplicates."""
    position: int = 0
    tree: LineageTree = field(default_factory=LineageTree)
    now: PolicyVersion = START
    has_drawn: bool = False
    num_duplicate: int = 0
    evicted: Counter[str] = field(default_factory=Counter)
    acked: list[tuple[int, int, str]] = field(default_factory=list)

    def push(self, rollout: Rollout) -> str:
        if rollout.rollout_id in self.rollouts or rollout.rollout_id in self.gone:
            self.num_duplicate += 1
            return "duplicate"
        self.position += 1
        self.rollouts[rollout.rollout_id] = rollout
        self.pushed.append(rollout)
        self.tokens["tokens:generated"] += len(rollout.response_tokens)
        self.live.append(
            Stored(
                position=self.position,
                rollout_id=rollout.rollout_id,
                prompt=int(rollout.prompt_id.split("-")[1]),
                status=rollout.reward_status,
                reward=rollout.reward,
                num_bytes=len(encode_rollout(rollout)),
                num_tokens=len(rollout.response_tokens),
                tokens=len(rollout.response_tokens) if self.bounds.deduplicate else 0,
                version=rollout.version_spans[0].version,
            )
        )
        return "new"

    def rescore(self, rollout: Rollout) -> Stored:
        """`rollout` replaces the stored one with its id."""
        self.rollouts[rollout.rollout_id] = rollout
        self.rescored.add(rollout.rollout_id)
        at = next(at for at, stored in enumerate(self.live) if stored.rollout_id == rollout.rollout_id)
        assert rollout.reward is not None
        self.live[at] = self.live[at].rescored(rollout.reward, len(encode_rollout(rollout)))
        return self.live[at]

    def enforce(self) -> None:
        for reason, gone in bounds_model.plan(self.live, self.bounds, self.tree, self.now):
            self.position += -(-len(gone) // ROLLOUTS_PER_CALL)
            for stored in gone:
                self.live.remove(stored)
                del self.rollouts[stored.rollout_id]
                self.rescored.discard(stored.rollout_id)
                self.gone.add(stored.rollout_id)
                self.evicted[reason] += 1

    def can_draw(self) -> bool:
        scored = [stored.prompt for stored in self.live if stored.status == "scored"]
        return len(scored) >= MIN_SIZE and any(scored.count(prompt) >= 2 for prompt in scored)


class Crash(Exception):
    """The process dies here."""


class History:
    """Runs steps against a real buffer over a real Redis and checks every answer."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.model = Model(recipe.buffer)
        self.buffer: Buffer
        self.lineage: LineageReply
        self.open: Batch | None = None

    async def run(self, history: list[tuple[str, Any]]) -> None:
        self.buffer = Buffer(self.recipe, CollectorRegistry())
        await self.buffer.context.redis.flushall()
        await self.buffer.start()
        await self.buffer.catalog.upload(make_prompts(NUM_PROMPTS))
        await self.new_lineage(True)
        try:
            for name, argument in history:
                await getattr(self, name)(argument)
                await self.check()
        finally:
            await self.buffer.stop()

    @property
    def version(self) -> PolicyVersion:
        """The version that the trainer would publish now."""
        return self.model.now if self.model.now.step else START

    def make(self, prompt: int, status: str, reward: float, tokens: int, num_text: int, age: int) -> Rollout:
        version = PolicyVersion(self.lineage.lineage, max(0, self.model.now.step - age))
        return make_rollout(
            f"train-{prompt}",
            reward=reward if status == "scored" else None,
            reward_status=status,
            reward_reason="no answer" if status == "failed" else None,
            num_tokens=10 * tokens,
            response_text="x" * num_text,
            version_spans=(VersionSpan.of(version, 0, 10 * tokens),),
        )

    async def mark(self, _: object) -> None:
        await self.buffer.lineages.publish(VersionRequest(version=str(self.version), token=self.lineage.token))
        self.model.position = (await self.buffer.view.catch_up()).position

    async def restart(self, _: object = None) -> None:
        before = fingerprint(await self.buffer.view.catch_up())
        await self.buffer.stop()
        self.buffer = Buffer(self.recipe, CollectorRegistry())
        await self.buffer.start()
        assert fingerprint(self.buffer.view.index) == before

    async def push(self, pushed: list[dict[str, Any]]) -> None:
        await self.push_rollouts([self.make(**values) for values in pushed])

    async def push_again(self, at: int) -> None:
        await self.push_rollouts(self.model.pushed[at : at + 5])

    async def push_rollouts(self, rollouts: list[Rollout]) -> None:
        if not rollouts:
            return
        expected = [self.model.push(rollout) for rollout in rollouts]
        if "new" in expected:
            self.model.enforce()
        outcomes, _ = await self.buffer.writer.push([encode_rollout(rollout) for rollout in rollouts])
        assert [outcome.outcome for outcome in outcomes] == expected

    async def rescore(self, at: int) -> None:
        if at >= len(self.model.live):
            return
        old = self.model.rollouts[self.model.live[at].rollout_id]
        new = old.with_reward((old.reward or 0.0) + 0.5, "2")
        payload, stored, first = encode_rollout(new), self.model.rescore(new), old.reward is None
        self.model.position += 1
        change = np.array((stored.position, new.reward, len(payload), STATUS_CODES["scored"]), dtype=CHANGE_DTYPE)
        context = self.buffer.context
        async with context.mutation_lock:
            reply = await context.scripts.run(
                "score", payload, ids=new.rollout_id, changes=change.tobytes(), kinds=[int(first)]
            )
        assert reply == b"s"
        self.model.enforce()
        await self.buffer.evictor.enforce()

    async def compact(self, crash_after: int | None) -> None:
        """Write a base of small pieces; die after so many of them, if a number is given."""
        index, num_set = await self.buffer.view.catch_up(), 0
        real_set = self.buffer.context.redis.set

        async def counting_set(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_set
            num_set += 1
            if crash_after is not None and num_set > crash_after:
                raise Crash
            return await real_set(*args, **kwargs)

        self.buffer.context.redis.set = counting_set
        writer = Compactor(self.buffer.context, min_events=5, piece_records=4)
        try:
            await writer.keep_up(index)
        except Crash:
            await self.restart()
        else:
            self.buffer.context.redis.set = real_set

    async def new_lineage(self, from_start: bool) -> None:
        parent = START if from_start else self.version
        self.lineage = await self.buffer.lineages.new(LineageRequest(trainer_id="t", parent=str(parent)))
        self.model.position += self.model.has_drawn  # what the start abandons gives back its turns and uses
        self.model.tree.add(self.lineage.lineage, parent)
        self.model.now, self.open = PolicyVersion(self.lineage.lineage, parent.step), None
        self.model.enforce()
        await self.buffer.evictor.enforce()  # else up to a second later

    async def draw(self, _: object) -> None:
        request = BatchRequest(
            trainer_id="t", lineage=self.lineage.lineage, step=self.model.now.step + 1, token=self.lineage.token
        )
        live = {stored.rollout_id: stored for stored in self.model.live}
        again = self.open is not None and all(r.rollout_id in live for r in self.open.rollouts)
        self.model.position += self.open is not None and not again  # it is void
        if not again and not self.model.can_draw():
            with pytest.raises(BusyError, match="min_size_to_sample"):
                await self.buffer.drawer.draw(request)
            self.open = None
            return
        batch = decode_batch((await self.buffer.drawer.draw(request)).body)
        self.model.position += not again
        self.model.has_drawn = True
        for group in batch.groups:
            for rollout in group.rollouts:
                assert live[rollout.rollout_id].status == "scored"
                assert rollout.prompt_id == group.prompt_id
                assert encode_rollout(rollout) == encode_rollout(self.model.rollouts[rollout.rollout_id])
        assert self.open is None or (batch.batch_id == self.open.batch_id) == again
        self.open = batch

    async def ack(self, _: object) -> None:
        if self.open is None:
            return
        self.model.now = replace(self.model.now, step=self.model.now.step + 1)
        lineage, num_tokens = self.lineage, sum(len(r.response_tokens) for r in self.open.rollouts)
        ack = AckRequest(lineage=lineage.lineage, step=self.model.now.step, token=lineage.token, num_tokens=num_tokens)
        for _ in range(2):
            await self.buffer.ledger.ack(self.open.batch_id, ack)
        self.model.tokens["tokens:trained"] += num_tokens
        self.model.acked.append((self.lineage.lineage, self.model.now.step, self.open.batch_id))
        self.open = None
        self.model.enforce()

    async def check(self) -> None:
        await self.check_index()
        await self.check_redis()
        ledger = await self.buffer.ledger.read(after=0, limit=1000)
        batches = [entry for entry in ledger.entries if entry.kind == "batch"]
        assert [(e.lineage, e.step, e.batch_id) for e in batches] == self.model.acked
        history = self.buffer.lineages.history(self.lineage.lineage)
        assert all(e.abandoned == (e.step > history.get(e.lineage, -1)) for e in batches)

    async def check_index(self) -> None:
        model, index = self.model, await self.buffer.view.catch_up()
        rows = index.live_rows()
        assert index.rollout_ids(rows) == [stored.rollout_id for stored in model.live]
        columns = {
            name: index.column(name, rows).tolist()
            for name in ("position", "status", "prompt", "num_bytes", "num_tokens", "lineage", "step", "reward")
        }
        for name in ("position", "prompt", "num_bytes", "num_tokens"):
            assert columns[name] == [getattr(stored, name) for stored in model.live], name
        assert columns["status"] == [STATUS_CODES[stored.status] for stored in model.live]
        versions = [PolicyVersion(*pair) for pair in zip(columns["lineage"], columns["step"], strict=True)]
        assert versions == [stored.version for stored in model.live]
        rewards = [reward if reward == reward else None for reward in columns["reward"]]
        assert rewards == [stored.reward for stored in model.live]
        assert (index.num_live, index.position) == (len(model.live), model.position)
        assert index.payload_bytes == sum(columns["num_bytes"])

    async def check_redis(self) -> None:
        model, context = self.model, self.buffer.context
        payloads = await context.redis.hgetall(context.keys.payloads)
        assert payloads == {rollout_id: encode_rollout(rollout) for rollout_id, rollout in model.rollouts.items()}
        assert set(await context.redis.hkeys(context.keys.originals)) == model.rescored
        counters = await context.counters()
        of_evictions = {f"evicted:{reason}": number for reason, number in model.evicted.items()}
        assert {name: number for name, number in counters.items() if name.startswith("evicted:")} == of_evictions
        assert counters.get("log_position", 0) == model.position
        assert counters.get("generated", 0) == counters.get("pushed:new", 0) == len(model.pushed)
        assert counters.get("pushed:duplicate", 0) == model.num_duplicate
        assert counters.get("trained", 0) == 16 * len(model.acked)
        assert {name: number for name, number in counters.items() if name.startswith("tokens:")} == model.tokens


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories, limits=bounds)
def test_every_history_ends_as_the_model_says(
    redis: RedisProcess, history: list[tuple[str, Any]], limits: dict[str, Any]
) -> None:
    recipe = make_recipe(buffer={"redis_url": redis.url, **limits}, sampling={"min_size_to_sample": MIN_SIZE})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evictor, "ROLLOUTS_PER_CALL", ROLLOUTS_PER_CALL)
        asyncio.run(History(recipe).run(history))
