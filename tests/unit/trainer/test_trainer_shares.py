"""Versions that several processes each store a share of."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tba_trainer.checkpoints.weight_files import share_files

from tba.errors import ObjectExistsError, StoreUnavailableError, TbaError
from tba.store import FileStore
from tba.versions import PolicyVersion
from tba.weights import LocalVersion, WeightVersions, publishing
from tba_cli.ports import PortRequest, choose_ports
from tests.support.share_team import ShareTeam, publish, take, tensors_of
from tests.support.trainer_team import rank_environ
from tests.support.trainer_world import at_put
from tests.support.waits import until

SIZES = {"embedding": 1000, "a": 300, "b": 300, "c": 300, "d": 300, "norm": 10}


def alone(folder: Path, step: int, base: LocalVersion | None = None, *, lineage: int = 1) -> LocalVersion:
    snapshot = take(folder / "alone", PolicyVersion(lineage, step), tensors_of(step), rank=0, num_ranks=1)
    return publish(WeightVersions(FileStore(folder / "one"), "demo"), snapshot, base)


def assert_holds(local: LocalVersion, step: int) -> None:
    found = {name: tensor for path in local.paths for name, tensor in load_file(path).items()}
    expected = tensors_of(step)
    assert found.keys() == expected.keys()
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


def objects_of(folder: Path) -> list[str]:
    return sorted(key.rpartition("/")[2] for key in FileStore(folder / "store").list("runs/demo/weights/"))


def test_shares_have_about_the_same_bytes_and_every_tensor_once() -> None:
    held = enumerate((["embedding"], ["a", "b"], ["c", "d", "norm"]), start=1)
    files = {f"model-{number:05d}-of-00003.safetensors": names for number, names in held}
    assert share_files(SIZES, num_shares=1, max_bytes=700) == [files]
    two = share_files(SIZES, num_shares=2, max_bytes=700)
    names = [[name for names in share.values() for name in names] for share in two]
    assert names == [["embedding", "norm"], ["a", "b", "c", "d"]]
    assert [name for share in two for name in share] == [f"model-{n:05d}-of-00004.safetensors" for n in (1, 2, 3, 4)]
    # more processes than tensors
    assert share_files({"a": 1}, num_shares=3, max_bytes=700) == [{"model.safetensors": ["a"]}, {}, {}]
    assert share_files({}, num_shares=1, max_bytes=700) == [{"model.safetensors": []}]


@pytest.mark.parametrize("num_ranks", [2, 3, 9])
def test_versions_of_several_processes_are_those_of_one(tmp_path: Path, num_ranks: int) -> None:
    """Whole and as a delta, read as ever; nine processes are more than there are tensors."""
    team = ShareTeam(tmp_path, num_ranks=num_ranks)
    first = team.take(1)
    whole = publish(team.versions, first)
    second = team.take(2, base=first)
    delta = publish(team.versions, second, whole)
    one = alone(tmp_path, 1)
    for ours, theirs in ((whole, one), (delta, alone(tmp_path, 2, one))):
        assert ours.manifest.params_sha256 == theirs.manifest.params_sha256
        assert (ours.manifest.is_full, ours.manifest.base) == (theirs.manifest.is_full, theirs.manifest.base)
    assert len(whole.manifest.full) > 1
    assert delta.manifest.delta is not None
    assert not delta.manifest.full
    (held := tmp_path / "held").mkdir()
    local = team.versions.download_tensors(PolicyVersion(1, 1), held)
    assert_holds(local, 1)
    updated = team.versions.download_tensors(PolicyVersion(1, 2), tmp_path / "updated", held=[local])
    assert updated.route == "delta"
    assert_holds(updated, 2)
    assert_holds(team.versions.download_tensors(PolicyVersion(1, 2), tmp_path / "afresh"), 2)
    # another start with other processes begins with a whole version
    third = take(tmp_path / "resumed", PolicyVersion(2, 3), tensors_of(3), rank=0, num_ranks=1)
    assert publish(team.versions, third).manifest.is_full
    assert_holds(team.versions.download_tensors(PolicyVersion(2, 3), tmp_path / "third", held=[updated]), 3)
    for snapshot in (first, second):
        snapshot.close()
    assert [list((tmp_path / f"follower-{rank}").iterdir()) for rank in range(1, num_ranks)] == [[]] * (num_ranks - 1)


def test_no_process_holds_more_than_its_share(tmp_path: Path) -> None:
    team = ShareTeam(tmp_path, num_ranks=3)
    snapshot = team.take(1)
    publish(team.versions, snapshot)
    sizes = [sum(p.stat().st_size for p in snapshot.paths)]
    for follower in team.followers:
        sizes.append(sum(p.stat().st_size for p in follower._kept["1-1"].snapshot.paths))
        assert not follower._kept["1-1"].snapshot.held
    total = sum(tensor.nbytes for tensor in tensors_of(1).values())
    assert max(sizes) < 0.45 * total


def test_the_leader_has_the_start_whole_and_the_first_delta_is_made_by_all(tmp_path: Path) -> None:
    team = ShareTeam(tmp_path)
    start = team.take(0)  # the followers keep their shares of it
    whole = take(tmp_path / "whole", start.version, tensors_of(0), rank=0, num_ranks=1)
    base = publish(team.versions, whole)
    manifest = publish(team.versions, team.take(1, base=start), base).manifest
    assert manifest.delta is not None
    assert {each.name[:8] for each in manifest.delta.objects} == {"delta-00", "delta-1-"}
    assert_holds(team.versions.download_tensors(PolicyVersion(1, 1), tmp_path / "afresh"), 1)


def test_two_processes_without_any_change_name_two_objects(tmp_path: Path) -> None:
    team = ShareTeam(tmp_path)
    first = team.take(0)
    base = publish(team.versions, first)
    same = team.take(0, base=first, lineage=2)
    manifest = publish(team.versions, same, base).manifest
    assert manifest.delta is not None
    assert len({each.name for each in manifest.delta.objects}) == 2
    assert manifest.params_sha256 == base.manifest.params_sha256


def test_where_one_process_cannot_encode_the_version_is_whole(tmp_path: Path) -> None:
    team = ShareTeam(tmp_path)
    first = team.take(1)
    base = publish(team.versions, first)
    damaged = team.followers[0]._kept["1-1"].snapshot.paths[0]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x11")
    manifest = publish(team.versions, team.take(2, base=first), base).manifest
    assert (manifest.delta, manifest.is_full) == (None, True)
    assert not any(name.startswith("delta-") for name in objects_of(tmp_path))
    assert_holds(team.versions.download_tensors(PolicyVersion(1, 2), tmp_path / "afresh"), 2)


def test_a_follower_that_cannot_upload_is_named_and_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    team = ShareTeam(tmp_path)
    snapshot = team.take(1)

    def refuse(_: str, path: Path) -> None:
        if path.is_relative_to(tmp_path / "follower-1"):
            raise StoreUnavailableError("the store is away")

    with monkeypatch.context() as patch:
        at_put(patch, refuse)
        with pytest.raises(StoreUnavailableError, match="process 1: the store is away"):
            publish(team.versions, snapshot)
    assert team.versions.versions() == []
    assert objects_of(tmp_path), "the leader had stored its own share"
    publish(team.versions, snapshot)
    assert_holds(team.versions.download_tensors(PolicyVersion(1, 1), tmp_path / "afresh"), 1)


def test_changes_that_the_store_has_lost_are_stored_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader does not describe the version a second time, so a follower must still have what it has encoded."""
    team, put = ShareTeam(tmp_path), FileStore.put
    first = team.take(1)
    base = publish(team.versions, first)
    second = team.take(2, base=first)

    def refuse(self: FileStore, key: str, data: bytes, *, create_only: bool = False) -> None:
        if key.endswith("manifest.json"):
            raise StoreUnavailableError("the store is away")
        put(self, key, data, create_only=create_only)

    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "put", refuse)
        with pytest.raises(StoreUnavailableError, match="the store is away"):
            publish(team.versions, second, base)
    [lost] = [name for name in objects_of(tmp_path) if name.startswith("delta-1-")]
    FileStore(tmp_path / "store").delete(f"runs/demo/weights/1-2/{lost}")
    publish(team.versions, second, base)
    assert lost in objects_of(tmp_path)
    assert_holds(team.versions.download_tensors(PolicyVersion(1, 2), tmp_path / "afresh"), 2)
    second.close()
    first.close()
    assert list((tmp_path / "follower-1").iterdir()) == []


def test_a_share_that_is_dropped_before_a_slow_follower_has_taken_it_is_not_kept(tmp_path: Path) -> None:
    team = ShareTeam(tmp_path)
    [follower] = team.followers
    follower.commands["drop_share"](share="1-1")
    team.take(1)
    assert (follower._kept, list((tmp_path / "follower-1").iterdir())) == ({}, [])
    team.take(2)
    assert list(follower._kept) == ["1-2"]


def test_a_leader_that_fails_waits_for_the_followers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    team, failed, stored = ShareTeam(tmp_path), threading.Event(), threading.Event()

    def put(key: str, path: Path) -> None:
        if path.is_relative_to(tmp_path / "leader") and "model-" in key:
            failed.set()
            raise StoreUnavailableError("the store is away")
        if path.is_relative_to(tmp_path / "follower-1"):
            assert failed.wait(10)
            stored.set()

    at_put(monkeypatch, put)
    with pytest.raises(StoreUnavailableError, match="the store is away"):
        publish(team.versions, team.take(1))
    assert stored.is_set()


def test_other_tensors_under_a_followers_key_are_never_published(tmp_path: Path) -> None:
    """As a second trainer of the same lineage would leave them."""
    team = ShareTeam(tmp_path)
    other = take(tmp_path / "other", PolicyVersion(1, 1), tensors_of(5), rank=1, num_ranks=2)
    other.write()
    for path in other.paths:
        FileStore(tmp_path / "store").put_file(f"runs/demo/weights/1-1/{path.name}", path)
    with pytest.raises(ObjectExistsError, match=r"process 1: runs/demo/weights/1-1/model-.* holds other tensors"):
        publish(team.versions, team.take(1))
    assert team.versions.versions() == []


def test_a_follower_with_another_store_is_found(tmp_path: Path) -> None:
    team = ShareTeam(tmp_path, follower_store=tmp_path / "elsewhere")
    with pytest.raises(StoreUnavailableError, match="all processes need the same store"):
        publish(team.versions, team.take(1))
    assert team.versions.versions() == []


def test_a_follower_without_a_share_or_given_up_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    team = ShareTeam(tmp_path)
    with pytest.raises(TbaError, match=r"process 1: this process took no share 1-1 within 0\.2 s"):
        publish(team.versions, team.take(1, keep=False))
    snapshot, busy = team.take(2), threading.Event()
    others = snapshot.others
    assert others is not None
    describe = publishing.describe_tensors

    def hang(paths: list[Path]) -> object:
        if paths and paths[0].is_relative_to(tmp_path / "follower-1"):
            until("the leader waits for it", lambda: others.missing() == "process 1")
            others.give_up()
            assert busy.wait(10)
        return describe(paths)

    monkeypatch.setattr(publishing, "describe_tensors", hang)
    with pytest.raises(TbaError, match="1-2 of the other processes are given up"):
        publish(team.versions, snapshot)
    busy.set()
    assert team.versions.versions() == []


@pytest.mark.nightly
def test_two_processes_publish_over_gloo_and_a_killed_one_registers_nothing(tmp_path: Path) -> None:
    [port] = choose_ports([PortRequest("master", "127.0.0.1", 0)])
    command = [sys.executable, "-m", "tests.support.share_team", str(tmp_path), str(port)]
    ended = subprocess.run(command, env=rank_environ(0, 2, port), capture_output=True, text=True, timeout=240)
    *log, codes = ended.stdout.splitlines()
    assert json.loads(codes) == [0, -signal.SIGKILL], (log, ended.stderr)
    result = json.loads((tmp_path / "result.json").read_text())
    assert "process 0 of 2 has lost another process of this trainer during 'share_reply'" in result["error"]
    assert result["seconds"] < 60
    versions = WeightVersions(FileStore(tmp_path / "store"), "demo")
    assert list(map(str, versions.versions())) == ["1-1", "1-2"]
    one = alone(tmp_path, 1)
    delta = alone(tmp_path, 2, one).manifest
    assert versions.manifest(PolicyVersion(1, 1)).params_sha256 == one.manifest.params_sha256
    assert versions.manifest(PolicyVersion(1, 2)).params_sha256 == delta.params_sha256
    local = versions.download_tensors(PolicyVersion(1, 2), tmp_path / "afresh")
    assert local.manifest.delta is not None
    assert_holds(local, 2)
    # what it left goes as what any killed trainer leaves
    assert versions.delete_incomplete(before_lineage=2, keep=()) == [PolicyVersion(1, 3)]
