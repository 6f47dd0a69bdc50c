"""Snapshots over real Redis, HTTP and stores: what is saved is exactly what was live at one position of the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis import Redis
from tba_buffer.storage.keys import FORMAT

from tba import __version__
from tba.api import LineageRequest, LoadRequest, OriginInfo, SnapshotInfo, VersionRequest
from tba.clients import BufferClient
from tba.errors import ConflictError, NotFoundError
from tba.store import FileStore
from tba.versions import PolicyVersion
from tba.wire import Rollout, decode_rollout, encode_rollout
from tba.wire.snapshot_manifest import (
    SnapshotManifest,
    SnapshotSource,
    decode_snapshot_manifest,
    encode_snapshot_manifest,
)
from tba_cli.main import main
from tests.integration.buffer.test_buffer_conversations import talk
from tests.support.buffer import begin_run, make_payloads, make_prompts, make_rollout, start_lineage
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.redis_process import RedisProcess
from tests.support.waits import until


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


@pytest.fixture
def serve(serve_buffer: ServeBuffer, store: FileStore) -> ServeBuffer:
    """Call it with the name or the section of a run to serve its buffer; all have that store."""
    return lambda run="test", **more: serve_buffer(run=run, store={"url": store.url}, **more)


def saved(client: BufferClient, name: str) -> SnapshotInfo:
    """Save and wait."""
    client.save_snapshot(name)
    until(f"the end of saving {name}", lambda: client.get_snapshot(name).state != "saving")
    return client.get_snapshot(name)


def loaded(client: BufferClient, source: str, version: str | None = None) -> OriginInfo:
    """Load and wait."""
    client.load_snapshot(LoadRequest(source=source, version=version))
    return ended_load(client)


def ended_load(client: BufferClient) -> OriginInfo:
    until("the end of the load", lambda: (o := client.run().origin) is not None and o.state != "loading")
    origin = client.run().origin
    assert origin is not None
    return origin


def manifest_of(store: FileStore, source: str) -> SnapshotManifest:
    key = SnapshotSource.parse(source).manifest_key
    return decode_snapshot_manifest(store.get(key), key=key)


def stored(redis: RedisProcess, run: str = "test") -> dict[bytes, bytes]:
    """Rollout id -> payload, as Redis has them."""
    with Redis.from_url(redis.url) as client:
        return client.hgetall(f"tba:{run}:payloads")  # pyright: ignore[reportReturnType]


def log_of(redis: RedisProcess, run: str) -> list[bytes | str]:
    """The log in its order: rollout ids, and versions of marks."""
    found: list[bytes | str] = []
    with Redis.from_url(redis.url) as client:
        entries: Any = client.xrange(f"tba:{run}:log")
    for _, fields in entries:
        if b"r" in fields:
            found += [fields[b"r"][at : at + 16] for at in range(0, len(fields[b"r"]), 57)]
        elif b"m" in fields:
            found.append(fields[b"m"].decode())
    return found


def content(payload: bytes, *, run: str) -> dict[str, Any]:
    """A rollout as plain values; run and visit, which a load renames, are left out or as `run` has them."""
    rollout: Rollout = decode_rollout(payload)
    values = msgspec.structs.asdict(rollout)
    assert values.pop("run") == run
    values["visit_id"] = values["visit_id"].partition("@")[0]
    return values


def contents(payloads: dict[bytes, bytes], *, run: str) -> dict[bytes, dict[str, Any]]:
    return {rollout_id: content(payload, run=run) for rollout_id, payload in payloads.items()}


def test_a_snapshot_begins_another_run_with_the_same_rollouts_in_the_same_order(
    serve: ServeBuffer, redis: RedisProcess, store: FileStore
) -> None:
    old = serve().client()
    lineage = begin_run(old, 6, 2)
    old.push(make_payloads(["train-0", "train-1"]))
    old.announce_version(VersionRequest(version="1-0", token=lineage.token))
    made_by = PolicyVersion(1, 0)
    pending = encode_rollout(make_rollout("train-2", reward=None, version=made_by))
    parts = {"format": 1.0, "exact": 0.5}
    old.push([*make_payloads(["train-2"], version=made_by, reward_parts=parts), pending])
    old.push([encode_rollout(talk("train-3"))])
    before = stored(redis)
    info = saved(old, "end")
    assert (info.state, info.num_rollouts, info.log_position) == ("complete", 14, 16)
    manifest = manifest_of(store, "test/end")
    assert (manifest.storage_format, manifest.tba_version) == (FORMAT, __version__)

    new = serve("other").with_prompts(1)
    origin = loaded(new, "test/end")
    assert (origin.state, origin.num_rollouts, origin.num_loaded, origin.version) == ("complete", 14, 14, None)
    after = stored(redis, "other")
    assert contents(after, run="other") == contents(before, run="test")
    assert all(decode_rollout(payload).visit_id == "visit-of-nobody@test" for payload in after.values())
    assert log_of(redis, "other") == log_of(redis, "test")
    stats = new.stats()
    assert (stats.num_scored, stats.num_pending, stats.num_prompts_train, stats.num_prompts_heldout) == (13, 1, 6, 2)
    assert stats.rollouts_generated == 0
    assert new.run().parents == {1: "0-0"}
    assert loaded(new, "test/end").state == "complete"
    assert (log_of(redis, "other"), stored(redis, "other")) == (log_of(redis, "test"), after), "nothing is loaded twice"
    assert new.new_lineage(LineageRequest(trainer_id="t", parent="0-0")).lineage == 2
    with pytest.raises(ConflictError, match="has begun with snapshot test/end"):
        new.load_snapshot(LoadRequest(source="third/none"))


def test_a_snapshot_of_another_storage_format_is_refused(serve: ServeBuffer, store: FileStore) -> None:
    old = serve().client()
    begin_run(old, 1)
    old.push(make_payloads(["train-0"]))
    saved(old, "end")
    manifest = manifest_of(store, "test/end")
    key = SnapshotSource.parse("test/end").manifest_key
    store.delete(key)
    other = manifest.model_copy(update={"storage_format": FORMAT - 1, "tba_version": "0.2.0"})
    store.put(key, encode_snapshot_manifest(other))
    origin = loaded(serve("other").client(), "test/end")
    assert origin.state == "failed"
    assert f"saved by tba 0.2.0 in storage format {FORMAT - 1}, and this release reads" in (origin.reason or "")


@pytest.fixture
def groups(serve: ServeBuffer) -> list[list[bytes]]:
    """Snapshot test/all of a filled run; returns the ids of its rollouts."""
    client = serve().client()
    found = fill(client)
    assert saved(client, "all").num_rollouts == 12
    return found


def fill(client: BufferClient) -> list[list[bytes]]:
    """Versions 0-0, 1-1 and 1-2 are announced, with four rollouts after each; returns their ids."""
    client.upload_prompts(make_prompts(4))
    lineage, groups = start_lineage(client), []
    for step in range(3):
        version = PolicyVersion(1, step) if step else PolicyVersion(0, 0)
        if step:
            client.announce_version(VersionRequest(version=str(version), token=lineage.token))
        rollouts = [make_rollout(f"train-{step}", reward=float(i), version=version) for i in range(4)]
        client.push([encode_rollout(rollout) for rollout in rollouts])
        groups.append([rollout.rollout_id for rollout in rollouts])
    return groups


def test_a_fork_takes_what_arrived_before_the_publication_of_its_version(
    serve: ServeBuffer, redis: RedisProcess, store: FileStore, groups: list[list[bytes]]
) -> None:
    assert [mark.version for mark in manifest_of(store, "test/all").marks] == ["0-0", "1-1", "1-2"]

    new = serve("fork").client()
    origin = loaded(new, "test/all", "1-2")
    assert (origin.state, origin.version, origin.num_rollouts, origin.lineage) == ("complete", "1-2", 8, 1)
    assert log_of(redis, "fork") == ["0 0", *groups[0], "1 1", *groups[1]]
    with pytest.raises(ConflictError, match="no trainer made version 1-3"):
        new.new_lineage(LineageRequest(trainer_id="t", parent="1-3"))
    lineage = new.new_lineage(LineageRequest(trainer_id="t", parent="1-2"))
    assert lineage.lineage == 2
    own_name = VersionRequest(version="1-2", token=lineage.token)
    position = new.announce_version(own_name)  # the snapshot ends before the mark of it
    assert log_of(redis, "fork")[-1] == "1 2"
    new.announce_version(VersionRequest(version="2-2", token=lineage.token))
    assert (new.announce_version(own_name), new.run().latest_version) == (position, "2-2")
    assert (new.run().parents, new.run().step) == ({1: "0-0", 2: "1-2"}, 2)
    old_rollout = encode_rollout(make_rollout("train-3", run="fork", version=PolicyVersion(1, 2)))
    assert new.push([old_rollout]).outcomes[0].outcome == "new"


@pytest.mark.usefixtures("groups")
def test_a_version_without_a_mark_cannot_be_forked(serve: ServeBuffer) -> None:
    new = serve("fork").client()
    origin = loaded(new, "test/all", "1-7")
    assert origin.state == "failed"
    assert "no publication of version 1-7" in (origin.reason or "")
    with pytest.raises(ConflictError, match="could not be loaded"):
        new.new_lineage(LineageRequest(trainer_id="t", parent="0-0"))
    assert loaded(new, "test/all", "1-2").state == "complete"


def test_a_snapshot_is_never_overwritten_and_only_known_ones_are_found(serve: ServeBuffer) -> None:
    client = serve().client()
    fill(client)
    first = saved(client, "one")
    with pytest.raises(ConflictError, match="test/one exists already"):
        client.save_snapshot("one")
    assert client.get_snapshot("one") == first
    with pytest.raises(NotFoundError, match=r"there is no snapshot test/two .*those of run test are: one"):
        client.get_snapshot("two")
    other = serve("other").client()
    assert "there is no snapshot test/two" in (loaded(other, "test/two").reason or "")


def test_only_a_run_that_has_not_begun_can_begin_with_a_snapshot(serve: ServeBuffer) -> None:
    old = serve().client()
    fill(old)
    saved(old, "all")
    with pytest.raises(ConflictError, match="has begun with a trainer"):
        old.load_snapshot(LoadRequest(source="test/all"))
    pushed = serve("pushed").with_prompts(1)
    pushed.push(make_payloads(["train-0"], run="pushed"))
    origin = loaded(pushed, "test/all")
    assert (origin.state, pushed.stats().num_rollouts) == ("failed", 4)
    assert "has begun" in (origin.reason or "")


@pytest.mark.usefixtures("groups")
def test_another_policy_temperature_and_prompts_with_other_content_are_refused(serve: ServeBuffer) -> None:
    hot = serve("hot", model={"policy_temperature": 0.5}).client()
    assert "policy_temperature 1, and this run has 0.5" in (loaded(hot, "test/all").reason or "")
    other = serve("other").client()
    other.upload_prompts([make_prompts(1)[0].model_copy(update={"text": "9+9="})])
    assert "prompt 'train-0'" in (loaded(other, "test/all").reason or "")
    assert other.stats().num_prompts_train == 1


def test_a_run_keeps_its_caps_when_the_snapshot_holds_more(
    serve: ServeBuffer, redis: RedisProcess, groups: list[list[bytes]]
) -> None:
    new = serve("small", buffer={"max_rollouts": 8}).client()
    assert loaded(new, "test/all").state == "complete"
    assert stored(redis, "small").keys() == {*groups[1], *groups[2]}
    assert new.stats().evicted == {"max_rollouts": 4}


@pytest.mark.usefixtures("groups")
def test_the_recipe_says_what_a_run_begins_with(serve: ServeBuffer) -> None:
    begun = {"name": "other", "snapshot": "test/all"}
    buffer = serve(begun)
    client = buffer.client(retry_s=20.0)
    client.new_lineage(LineageRequest(trainer_id="t", parent="0-0"))  # waits for the load
    assert client.run().origin == ended_load(client)
    assert client.stats().num_rollouts == 12
    buffer.stop()
    again = serve(begun).client()
    assert ended_load(again).state == "complete"
    assert again.stats().num_rollouts == 12


def test_a_run_that_should_begin_with_a_snapshot_but_cannot_takes_no_trainer(serve: ServeBuffer) -> None:
    start_lineage(serve("late").client())
    for run, says in (("other", "there is no snapshot test/none"), ("late", "has begun without it")):
        client = serve({"name": run, "snapshot": "test/none"}).client()
        until("the end of the load", lambda client=client: (o := client.run().origin) is None or o.state != "loading")
        with pytest.raises(ConflictError, match=says):
            client.new_lineage(LineageRequest(trainer_id="t", parent="0-0"))


def test_a_store_that_is_away_fails_the_save_with_its_reason(serve: ServeBuffer, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("not a folder")
    client = serve().client()
    fill(client)
    info = saved(client, "end")
    assert (info.state, info.log_position) == ("failed", None)
    assert "correct store.url" in (info.reason or "")


def test_the_commands_save_and_load(serve: ServeBuffer, capsys: pytest.CaptureFixture[str]) -> None:
    old = serve()
    fill(old.client())
    assert main(["buffer", "save", "end", "--url", old.url]) == 0
    assert "saved test/end: 12 rollouts" in capsys.readouterr().out
    new = serve("other")
    assert main(["buffer", "load", "test/end", "--version", "1-1", "--url", new.url]) == 0
    assert "loaded test/end: 4 rollouts\n" in capsys.readouterr().out
    late = serve("late")
    assert main(["buffer", "load", "test/none", "--url", late.url]) == 2
    assert "was not loaded: there is no snapshot test/none" in capsys.readouterr().err


def test_a_rollout_that_cannot_be_read_is_left_out_of_a_snapshot(
    serve: ServeBuffer, redis: RedisProcess, raw: Redis, store: FileStore
) -> None:
    first = serve()
    old = first.client()
    begin_run(old, 3, 2)
    pushed = old.push(make_payloads(["train-0", "train-1", "train-2"])).outcomes
    before = stored(redis)
    bad = next(item for item in pushed if item.rollout_id is not None).rollout_id or ""
    raw.hset("tba:test:payloads", bytes.fromhex(bad), b"\xff\x00")  # pyright: ignore[reportArgumentType]
    first.stop()
    old = serve().client()
    info = saved(old, "damaged")
    good = {rollout_id: payload for rollout_id, payload in before.items() if rollout_id.hex() != bad}
    assert (info.num_rollouts, manifest_of(store, "test/damaged").num_prompts) == (len(good), 5)
    new = serve("other").client()
    assert loaded(new, "test/damaged").num_loaded == len(good)
    assert contents(stored(redis, "other"), run="other") == contents(good, run="test")


@pytest.mark.parametrize("field", ["lineage", "step", "latest_version"])
def test_a_save_fails_with_the_name_of_the_field_that_says_where_the_run_stands(
    serve: ServeBuffer, raw: Redis, field: str
) -> None:
    client, _ = serve().begin(3, 2)
    raw.hset("tba:test:run", field, b"\xff")
    info = saved(client, "damaged")
    assert info.state == "failed"
    assert f"the field {field} of tba:test:run in Redis cannot be read" in str(info.reason)
