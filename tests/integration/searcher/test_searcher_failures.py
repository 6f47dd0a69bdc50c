"""A searcher when the engine, a service or a version fails: rollouts arrive, leases return, the reason is logged."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import structlog
from tba_searcher import loop
from tba_searcher.engines.engine import Completion, EngineDiedError, EngineError, Request
from tba_searcher.engines.torch import reference_logprobs
from tba_searcher.engines.torch.engine import EmbeddedEngine
from tba_searcher.engines.weight_check import CheckableModel, check_loaded
from tba_searcher.generation import delivery, version_pulls
from tba_searcher.service import Clients, Searcher

from tba.api import Prompt, VersionRequest
from tba.clients import RewardClient
from tba.config import parse_recipe
from tba.errors import DigestError
from tba.store import FileStore
from tba.versions import START, PolicyVersion
from tba.weights import WeightVersions
from tba.wire import Manifest
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.leases import lease, request_eval
from tests.support.reward_server import RewardServer
from tests.support.searcher_loop import LoopWorld, start_loop_world
from tests.support.searcher_world import publish_version
from tests.support.waits import until

MakeWorld = Callable[..., LoopWorld]


@pytest.fixture
def make_world(tmp_path: Path, serve_buffer: ServeBuffer, reward: RewardServer, model: Path) -> MakeWorld:
    return partial(start_loop_world, tmp_path, serve_buffer, reward, model)


class Crashing(EmbeddedEngine):
    num_done = 0

    def step(self) -> list[Completion]:
        completions = super().step()
        self.num_done += len(completions)
        if self.num_done >= 30:
            raise KeyError("slot 7")
        return completions


async def test_an_engine_that_dies_takes_only_what_it_was_decoding_with_it(make_world: MakeWorld) -> None:
    world = make_world(engine_class=Crashing)
    with pytest.raises(EngineDiedError, match="the engine failed with KeyError: 'slot 7'"):
        await world.loop.run()
    stats, engine = world.client.stats(), world.engine
    assert isinstance(engine, Crashing)
    assert 26 <= engine.num_done - 4 <= stats.num_scored <= engine.num_done, "only the rollouts of that step are lost"
    assert stats.leases["open"] == 0
    (component,) = [item for item in world.client.run().components if item.component_id == "s"]
    assert component.state == "failed"


class Refusing(EmbeddedEngine):
    """Cannot honour some requests; half of a visit is taken before it says so."""

    def submit(self, request: Request) -> None:
        if len(request.prompt_tokens) > 4 and request.request_id.endswith("/2"):
            raise EngineError(f"request {request.request_id}: not with this engine")
        super().submit(request)


async def test_a_request_that_the_engine_cannot_honour_refuses_its_prompt_and_no_other(make_world: MakeWorld) -> None:
    """Prompts 0 to 9 have 4 tokens (`0+0=`), the others 6."""
    world = make_world(engine_class=Refusing, num_train=14)
    task = asyncio.create_task(world.loop.run())
    await asyncio.to_thread(
        until, "both", lambda: world.status.counts["refused_prompts"] >= 4 and world.client.stats().num_scored >= 40
    )
    world.stop.set()
    await task
    stats = world.client.stats()
    assert stats.leases["refused"] >= 4
    assert stats.num_prompts_seen == 10
    assert stats.leases["open"] == 0


async def test_messages_that_the_template_cannot_render_refuse_their_prompt_and_no_other(make_world: MakeWorld) -> None:
    """Bug 6: nothing is made up for it. The model of this test has no chat template."""
    world = make_world(num_train=6)
    chat = [{"role": "user", "content": "1+1="}]
    world.client.upload_prompts([Prompt(prompt_id="chat", task="addition", text="1+1=", messages=chat)])
    task = asyncio.create_task(world.loop.run())
    with structlog.testing.capture_logs() as logs:
        await asyncio.to_thread(
            until, "both", lambda: world.status.counts["refused_prompts"] and world.client.stats().num_scored >= 24
        )
    world.stop.set()
    await task
    (refused,) = [log for log in logs if log["event"] == "prompt refused"]
    assert (refused["prompt_id"], "has no chat template" in refused["reason"]) == ("chat", True)
    assert world.client.stats().num_prompts_seen == 6


async def test_a_drain_does_not_wait_for_a_reward_service_that_hangs(make_world, reward, monkeypatch) -> None:
    """Rollouts are pushed unscored, for the buffer's own scorer; an evaluation is returned, not reported as unknown."""
    monkeypatch.setattr(loop, "MAX_UNPUSHED_ROLLOUTS", 16)
    monkeypatch.setattr(delivery, "SCORE_RETRY_S", 60.0)
    world = make_world(searcher={"drain_s": 3.0})
    evaluation = request_eval(world.client, world.lineage)
    reward.gate.clear()
    task = asyncio.create_task(world.loop.run())
    await asyncio.to_thread(until, "it hangs", lambda: world.status.num_unpushed >= 16)
    world.stop.set()
    await task
    stats = world.client.stats()
    assert stats.num_pending >= 16
    assert world.status.num_unpushed == 0
    assert stats.num_scored == 0
    assert stats.leases["open"] == 0
    assert world.client.get_eval(evaluation.eval_id).num_done == 0
    assert lease(world.client, 64).leases


async def test_a_busy_buffer_is_waited_out_under_its_own_name_and_no_rollout_is_lost(make_world, monkeypatch) -> None:
    limit_bytes = 20_000
    monkeypatch.setattr(loop, "MAX_UNPUSHED_ROLLOUTS", 16)
    monkeypatch.setattr(delivery, "RETRY_S", 0.3)
    world = make_world(buffer={"MAX_INFLIGHT_BYTES": limit_bytes})
    host, port = world.served.url.removeprefix("http://").split(":")
    # another client's push that takes all the room and never ends
    with socket.create_connection((host, int(port))) as sock:
        head = f"POST /v1/rollouts HTTP/1.1\r\nhost: localhost\r\ncontent-length: {limit_bytes}\r\n\r\n."
        sock.sendall(head.encode())
        task = asyncio.create_task(world.loop.run())
        seen: set[str] = set()

        def waits_and_holds() -> bool:
            wait = world.status.waits.current()
            seen.update([] if wait is None else [wait.name])
            return seen >= {"push-memory", "unpushed-rollouts"} and world.status.num_unpushed >= 16

        await asyncio.to_thread(until, "both sides wait", waits_and_holds)
        assert world.status.counts["rollouts_pushed"] == 0
    await asyncio.to_thread(until, "it continues", lambda: world.client.stats().num_scored >= 48)
    world.stop.set()
    await task
    stats = world.client.stats()
    assert stats.num_rollouts == world.status.counts["rollouts_generated"]
    assert stats.pushed["duplicate"] == 0
    assert stats.leases["open"] == 0


async def test_an_announced_version_that_is_not_in_the_store_is_a_wait_with_a_name(make_world, tmp_path, model) -> None:
    world, version = make_world(), PolicyVersion(1, 4)
    task = asyncio.create_task(world.loop.run())

    def waits_for_the_store() -> bool:
        wait = world.status.waits.current()
        return wait is not None and wait.name == "object-store"

    world.client.announce_version(VersionRequest(version=str(version), token=world.lineage.token))
    await asyncio.to_thread(until, "the wait", waits_for_the_store)
    num_scored = world.client.stats().num_scored
    await asyncio.to_thread(until, "the old version is used", lambda: world.client.stats().num_scored > num_scored + 8)
    publish_version(WeightVersions(FileStore(tmp_path / "store"), world.status.run), model, version)
    await asyncio.to_thread(until, "the new version", lambda: world.status.counts["weight_loads"] >= 1)
    await asyncio.to_thread(until, "the end of the wait", lambda: not waits_for_the_store())
    world.stop.set()
    await task
    assert world.status.version == version


class FailsOnce(EmbeddedEngine):
    """The first check of a new version fails, as when memory is short."""

    num_checks = 0

    def verify(self, manifest: Manifest) -> None:
        if manifest.version != "0-0":
            self.num_checks += 1
            if self.num_checks == 1:
                raise IndexError("index out of range in self")
        super().verify(manifest)


async def test_a_version_whose_check_failed_is_retried_and_all_go_on(make_world, tmp_path, model, monkeypatch) -> None:
    monkeypatch.setattr(version_pulls, "FIRST_RETRY_S", 0.5)
    world, version = make_world(engine_class=FailsOnce), PolicyVersion(1, 4)
    task = asyncio.create_task(world.loop.run())
    publish_version(WeightVersions(FileStore(tmp_path / "store"), world.status.run), model, version)
    world.client.announce_version(VersionRequest(version=str(version), token=world.lineage.token))
    await asyncio.to_thread(until, "the new version", lambda: task.done() or world.status.version == version)
    assert world.status.counts["refused_versions"] == 1
    world.stop.set()
    await task
    assert world.status.state == "ended"


async def test_a_reference_whose_check_failed_is_retried_too(make_world, reward, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(version_pulls, "FIRST_RETRY_S", 0.5)
    world, tries = make_world(objective={"reference_placement": "searcher"}), list[str]()

    def fails_once(model: CheckableModel, manifest: Manifest) -> None:
        tries.append(manifest.version)
        if len(tries) == 1:
            raise RuntimeError("out of memory for a moment")
        check_loaded(model, manifest)

    monkeypatch.setattr(reference_logprobs, "check_loaded", fails_once)
    document = world.served.recipe.model_dump(mode="json")
    document["store"]["url"] = f"file://{tmp_path / 'store'}"
    clients = Clients(buffer=world.served.client(), heartbeats=world.client, reward=RewardClient(reward.url))
    recipe = parse_recipe(document, where="test")
    searcher = Searcher(recipe, tmp_path / "searcher", searcher_id="s", clients=clients, stop=world.stop)
    task = asyncio.create_task(searcher.run())
    await asyncio.to_thread(until, "scored rollouts", lambda: task.done() or world.client.stats().num_scored)
    world.stop.set()
    await task
    assert (tries, searcher.status.counts["refused_versions"]) == (["0-0", "0-0"], 1)


async def test_a_canary_beyond_the_vocabulary_is_refused_before_it_runs(make_world: MakeWorld, tmp_path: Path) -> None:
    world = make_world()
    manifest = WeightVersions(FileStore(tmp_path / "store"), world.status.run).manifest(START)
    spoilt = manifest.canary.model_copy(update={"response_tokens": [7, 8, 9, world.engine.vocab_size]})
    with pytest.raises(DigestError, match=f"its canary has the token id {world.engine.vocab_size}, the model's"):
        world.engine.verify(manifest.model_copy(update={"canary": spoilt}))
    world.engine.verify(manifest)
