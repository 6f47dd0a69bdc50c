"""A run whose services are killed one after the other, and come back; at last its trainer becomes a zombie.

Every test finds the run going, hurts it, and leaves it going.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import httpx2
import pytest
from redis import Redis
from safetensors.torch import load_file, save_file

from tba.api import AckRequest, BatchRequest, CheckpointRequest, RunCommand, RunInfo, VersionRequest
from tba.clients import BufferClient
from tba.errors import FencedError, UnavailableError
from tba.store import open_store
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tba.wire import encode_push, encode_rollout
from tba_cli.prompts.reader import prompts_of
from tba_cli.reports.ledger import ledger_violations, lineage_tree
from tests.support.e2e import (
    DEADLINE_S,
    ENDLESS,
    RUN,
    Services,
    decode_all,
    freeze_when,
    searchers_at_rest,
    stands_at,
    start_services,
    stored_rollouts,
    until,
    whole_ledger,
)

SEARCHERS = ("searcher-0", "searcher-1")


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Services]:
    services = start_services(
        tmp_path_factory.mktemp("services"),
        model,
        trainer={"num_steps": ENDLESS, "sync_interval": 4},
        buffer={"lease_s": 600.0},
    )
    try:
        services.start("trainer")
        for name in SEARCHERS:
            services.start("searcher", name)
        yield services
    finally:
        services.stop()


@pytest.fixture
def client(services: Services) -> Iterator[BufferClient]:
    """A client of the run, which is going and at the end of the test still is."""
    client = BufferClient(services.recipe.buffer_url, retry_s=30)
    steps_continue(services, client)
    yield client
    steps_continue(services, client)
    client.close()


def steps_continue(services: Services, client: BufferClient, num_steps: int = 6) -> RunInfo:
    step = client.run().step

    def has_stepped() -> RunInfo | None:
        for name, process in services.processes.items():
            assert process.poll() is None, f"{name} ended: {services.log(name)[-3000:]}"
        info = client.run()
        return info if info.step >= step + num_steps or info.step < step else None

    info = until("training continues", has_stepped)
    assert info is not None
    return info


def settled(client: BufferClient) -> dict[str, float]:
    """Pause the run until the searchers have nothing left to do; their own counts, added up."""
    client.command("pause", RunCommand(reason="counting"))

    def at_rest() -> RunInfo | None:
        """A heartbeat from before an outage may say "at rest" too: it is the last one once its counts are whole."""
        info, generated = client.run(), client.stats().rollouts_generated
        beats = [item.gauges for item in info.components if item.kind == "searcher"]
        known = sum(beat.get("rollouts_pushed", 0) + beat.get("rollouts_duplicate", 0) for beat in beats)
        return info if searchers_at_rest(info) and known == generated else None

    info = until("the searchers rest", at_rest)
    assert info is not None
    searchers = [item for item in info.components if item.kind == "searcher"]
    assert len(searchers) == len(SEARCHERS)
    total: Counter[str] = Counter()
    for item in searchers:
        total.update(item.gauges)
    stored = client.stats().pushed["new"]
    client.command("resume", RunCommand())
    return {**total, "stored": stored}


def assert_nothing_lost_or_doubled(services: Services, client: BufferClient, before: dict[bytes, bytes]) -> None:
    """Check that acknowledged rollouts are stored once: the searchers' counts, Redis and the buffer's counts agree."""
    counts = settled(client)
    stats, stored = client.stats(), stored_rollouts(services.redis_url)
    assert {rollout_id: stored.get(rollout_id) for rollout_id in before} == before
    assert stats.evicted == {} or sum(stats.evicted.values()) == 0
    acknowledged = counts["rollouts_pushed"] + counts.get("rollouts_duplicate", 0)
    assert acknowledged == counts["stored"]
    assert counts.get("rollouts_refused", 0) == stats.pushed["refused"] == 0
    # no lease expires in this run, so a visit that was stored twice would show here
    per_visit = Counter(rollout.visit_id for rollout in decode_all(stored))
    assert set(per_visit.values()) <= {1, 2, 3, 4}


def test_while_the_reward_service_is_away_rollouts_are_kept_unscored_and_are_scored_when_it_is_back(
    services: Services, client: BufferClient
) -> None:
    services.kill("reward")
    until("pending rollouts", lambda: client.stats().num_pending >= 32)
    until("a named wait", lambda: ("buffer-scorer", "reward") in [(w.owner, w.name) for w in client.run().waits])
    rollouts = {r.rollout_id.hex(): r for r in decode_all(stored_rollouts(services.redis_url))}
    pending = {rollout_id: r for rollout_id, r in rollouts.items() if r.reward_status == "pending"}
    assert len(pending) >= 32
    assert {rollout.reward for rollout in pending.values()} == {None}
    assert all("the reward service did not answer" in (rollout.reward_reason or "") for rollout in pending.values())
    assert trained_rollouts(client).isdisjoint(pending)

    services.start("reward")
    until("all rollouts are scored", lambda: client.stats().num_pending == 0)
    steps_continue(services, client)
    trained = trained_rollouts(client)  # first: what is trained later is not in the store as it is read now
    rollouts = {r.rollout_id.hex(): r for r in decode_all(stored_rollouts(services.redis_url))}
    answers = {prompt.prompt_id: prompt.data["answer"] for prompt in prompts_of(services.recipe)}
    for rollout_id, before in pending.items():
        after = rollouts[rollout_id]
        reward = float(before.response_text.strip() == answers[before.prompt_id])
        version = str(after.reward_version)
        assert version.startswith("exact@")
        assert encode_rollout(after) == encode_rollout(before.with_reward(reward, version))
    assert client.stats().num_failed == 0
    assert {rollouts[rollout_id].reward_status for rollout_id in trained} == {"scored"}


def trained_rollouts(client: BufferClient) -> set[str]:
    """Ids of all rollouts that a step has consumed."""
    return {rollout_id for entry in whole_ledger(client) for rollout_id in entry.rollout_ids}


@pytest.mark.parametrize("victim", ["buffer", "redis"])
def test_a_killed_buffer_or_redis_comes_back_with_everything_it_acknowledged(
    services: Services, client: BufferClient, victim: str
) -> None:
    stored = stored_rollouts(services.redis_url)
    before = {r.rollout_id: stored[r.rollout_id] for r in decode_all(stored) if r.reward_status == "scored"}
    version = client.run().latest_version
    process = services.stack.buffer if victim == "buffer" else services.stack.redis
    process.kill()
    if victim == "redis":
        assert_refuses_writes(services, encode_push([*before.values()][:1]))
    else:
        with pytest.raises(UnavailableError):
            BufferClient(services.recipe.buffer_url, retry_s=0).run()
    process.start()
    steps_continue(services, client)
    until("the next version is announced", lambda: client.run().latest_version != version)
    assert_nothing_lost_or_doubled(services, client, before)


def assert_refuses_writes(services: Services, push: bytes) -> None:
    """Without Redis every write is a 503, also one that would change nothing; the service itself lives on."""
    url = services.recipe.buffer_url
    headers = {"content-type": "application/msgpack"}
    refused = httpx2.post(f"{url}/v1/rollouts", content=push, headers=headers, timeout=DEADLINE_S)
    assert refused.status_code == 503
    assert refused.headers["content-type"] == "application/problem+json"
    assert "nothing was acknowledged" in refused.json()["detail"]
    request = {"searcher_id": "s", "max_leases": 1}
    assert httpx2.post(f"{url}/v1/leases", json=request, timeout=DEADLINE_S).status_code == 503
    until("not ready", lambda: httpx2.get(f"{url}/readyz", timeout=DEADLINE_S).status_code == 503)
    assert httpx2.get(f"{url}/livez", timeout=DEADLINE_S).status_code == 200
    assert services.stack.buffer.process.poll() is None


@dataclass(frozen=True)
class Takeover:
    """A trainer was frozen, another one took over, and the first woke up."""

    zombie: subprocess.Popen[bytes]
    zombie_log: Path
    at_freeze: RunInfo
    old_token: str


@pytest.fixture(scope="module")
def takeover(services: Services) -> Takeover:
    client = BufferClient(services.recipe.buffer_url, retry_s=30)
    steps_continue(services, client)
    until("a checkpoint", lambda: client.run().checkpoint)
    zombie, zombie_log = services.processes["trainer"], services.folder / "zombie.log"
    at_freeze = freeze_when(zombie.pid, "the zombie holds the run", client, client.run, same=stands_at)
    with Redis.from_url(services.redis_url) as redis:
        token = cast(bytes, redis.hget(f"tba:{RUN}:run", "token")).decode()
    shutil.move(services.folder / "trainer.log", zombie_log)
    services.processes["zombie"] = zombie
    services.start("trainer")
    until("the next lineage trains", lambda: client.run().lineage == 2 and client.run().step > step_of(at_freeze))
    os.kill(zombie.pid, signal.SIGCONT)
    zombie.wait(DEADLINE_S)
    services.processes.pop("zombie")
    client.close()
    return Takeover(zombie, zombie_log, at_freeze, token)


def step_of(info: RunInfo) -> int:
    """Step of the checkpoint."""
    assert info.checkpoint is not None
    return PolicyVersion.parse(info.checkpoint).step


def test_a_zombie_trainer_ends_by_itself_and_announces_nothing_more(
    services: Services, takeover: Takeover, client: BufferClient
) -> None:
    assert takeover.zombie.returncode == 3
    last_line = takeover.zombie_log.read_text().strip().splitlines()[-1]
    assert last_line.startswith("error: trainer: ")
    assert "a newer trainer start owns this run" in last_line
    info = steps_continue(services, client)
    assert info.parents == {1: "0-0", 2: takeover.at_freeze.checkpoint}
    assert PolicyVersion.parse(info.latest_version or "").lineage == 2
    last = PolicyVersion.parse(takeover.at_freeze.latest_version or "")
    used = {span.version for r in decode_all(stored_rollouts(services.redis_url)) for span in r.version_spans}
    assert {version for version in used if version.lineage == 1 and version > last} == set()
    until("searchers use lineage 2", lambda: all(lineage_of(client, name) == 2 for name in SEARCHERS))
    at = client.run()
    assert ledger_violations(whole_ledger(client), lineage_tree(at.parents), lineage=2, step=at.step) == []


def lineage_of(client: BufferClient, searcher: str) -> int:
    versions = {item.component_id: item.version for item in client.run().components}
    return PolicyVersion.parse(versions[searcher] or "").lineage


def test_every_write_with_the_old_token_is_refused_and_the_zombies_versions_are_never_loaded(
    services: Services, takeover: Takeover, client: BufferClient, tmp_path: Path
) -> None:
    token, version = takeover.old_token, PolicyVersion(1, ENDLESS)
    publish_spoiled(services, client, version, tmp_path)
    open_batch = BatchRequest(trainer_id="zombie", lineage=1, step=takeover.at_freeze.step + 1, token=token)
    attempts: list[Callable[[], object]] = [
        lambda: client.announce_version(VersionRequest(version=str(version), token=token)),
        lambda: client.register_checkpoint(CheckpointRequest(version=str(version), token=token, key="nowhere")),
        lambda: client.draw_batch(open_batch),
        lambda: client.ack("batch-x", AckRequest(lineage=1, step=open_batch.step, token=token)),
        lambda: client.command("done", RunCommand(token=token)),
        lambda: client.command("fail", RunCommand(token=token)),
    ]
    for attempt in attempts:
        with pytest.raises(FencedError):
            attempt()
    info = steps_continue(services, client, num_steps=10)
    assert (info.state, info.lineage) == ("running", 2)
    assert info.latest_version != str(version)
    assert info.checkpoint_key != "nowhere"
    assert not any(str(version) in services.log(name) for name in SEARCHERS)


def publish_spoiled(services: Services, client: BufferClient, version: PolicyVersion, folder: Path) -> None:
    """Write a whole version, manifest included, to the store, as a zombie still can."""
    versions = WeightVersions(open_store(services.recipe.store), services.recipe.run.name)
    latest = PolicyVersion.parse(client.run().latest_version or "")
    manifest = versions.download(latest, folder / "latest")
    tensors = load_file(folder / "latest" / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "spoiled.safetensors")
    versions.publish(
        version=version,
        parent=latest,
        dtype=manifest.dtype,
        tensors_paths=[folder / "spoiled.safetensors"],
        files={item.name: folder / "latest" / item.name for item in manifest.files},
        canary=manifest.canary,
        torch_version=manifest.torch_version,
        transformers_version=manifest.transformers_version,
    )
    assert versions.exists(version)


def test_after_all_of_it_the_run_ends_as_any_other(services: Services) -> None:
    client = BufferClient(services.recipe.buffer_url, retry_s=30)
    steps_continue(services, client)
    client.command("stop", RunCommand(reason="enough"))
    for name in ("trainer", *SEARCHERS):
        assert services.processes[name].wait(DEADLINE_S) == 0, services.log(name)
    info = client.run()
    assert info.state == "done"
    assert info.checkpoint == info.latest_version == f"{info.lineage}-{info.step}"
    tree = lineage_tree(info.parents)
    assert ledger_violations(whole_ledger(client), tree, lineage=info.lineage, step=info.step) == []
    for name, text in services.logs().items():
        assert "Traceback" not in text, name
    client.close()
