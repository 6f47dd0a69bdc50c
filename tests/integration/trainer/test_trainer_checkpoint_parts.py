"""Checkpoints that several processes write and read, their rows cut as torch cuts them; the processes are objects here.

Real teams: test_trainer_parallel.py."""

from __future__ import annotations

import errno
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from tba_trainer.checkpoints import weight_files
from tba_trainer.checkpoints.checkpoint import CheckpointStore
from tba_trainer.distributed.checkpoints import FollowerCheckpoints, TeamCheckpoints, Upload
from tba_trainer.distributed.process_group import mesh_of_all
from tba_trainer.learner.learner import TrainerState
from tba_trainer.loop import limits
from tba_trainer.loop.checkpoint_writer import CheckpointWriter
from tba_trainer.model.parameters import trainable
from tba_trainer.model.sharding import shard
from tba_trainer.model.slices import Layout, Rows, TensorSlice, written_slices
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tba.errors import DigestError, MalformedError, ObjectNotFoundError, StoreUnavailableError
from tba.store import FileStore
from tba.versions import START, PolicyVersion
from tests.support.learner_values import make_state
from tests.support.model_families import make_family_model
from tests.support.stored_checkpoint import manifest_of, object_keys, save
from tests.support.trainer_values import make_recipe
from tests.support.trainer_world import World, at_put, raising
from tests.support.waits import until

MAX_BYTES = 400


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "FILE_BYTES", MAX_BYTES)


Sections = dict[str, dict[str, torch.Tensor]]


def sections_of(seed: int) -> Sections:
    """A state with rows that no number of processes divides, fewer rows than processes, scalars and empty tensors."""
    rng = torch.Generator().manual_seed(seed)
    shapes = {"a": (7, 5), "b": (3,), "c": (1, 4), "d": (16, 9)}
    weights = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    moments = {f"exp_avg.{name}": tensor * 2 for name, tensor in weights.items()}
    steps = {f"step.{name}": torch.tensor(float(seed)) for name in weights}
    cache = {"rollout_ids": torch.zeros(0, 16, dtype=torch.uint8), "ref_logprobs": torch.randn(5, dtype=torch.float64)}
    reference = {name: torch.full(shape, 3.0) for name, shape in shapes.items()}
    return {"model": weights, "optimizer": {**moments, **steps}, "ref_logprobs": cache, "reference": reference}


def rows_of(sections: Sections, layout: Layout) -> Rows:
    def copies() -> Iterator[tuple[str, str, TensorSlice]]:
        for section, tensors in sections.items():
            for name, tensor in tensors.items():
                if section == "ref_logprobs" or not tensor.shape:  # whole, by the first process
                    begin, rows = 0, tensor if layout.index == 0 else None
                else:
                    begin, end = layout.rows(tensor.shape)
                    rows = tensor[begin:end].clone() if begin < end else None
                if rows is not None:
                    yield section, name, TensorSlice(rows, begin, tuple(tensor.shape))

    return Rows(copies, 0)


def store_of(folder: Path, layout: Layout | None = None) -> CheckpointStore:
    return CheckpointStore(FileStore(folder / "store"), "demo", folder=folder, max_bytes=MAX_BYTES, layout=layout)


def write(folder: Path, sections: Sections, version: str, num: int = 1, known: str | None = None) -> str:
    objects = []
    for index in range(num):
        layout = Layout(index, num)
        store = store_of(folder, layout)
        reused = {} if known is None else store.reusable_objects(PolicyVersion.parse(known))
        rows, parsed = rows_of(sections, layout), PolicyVersion.parse(version)
        part = store.begin_part(parsed, rows, known=reused, in_background=index % 2 == 0)
        part.upload()
        objects += part.objects
    return store_of(folder).commit(make_state(version), objects)


def assert_holds(store: CheckpointStore, key: str, layout: Layout, expected: Sections) -> None:
    checkpoint = store.load(key)
    assert checkpoint.sections.keys() == expected.keys()
    for section, tensors in expected.items():
        found = checkpoint.sections[section]
        assert set(found) == set(tensors)
        for name, tensor in tensors.items():
            whole = section == "ref_logprobs" or not tensor.shape
            begin, end = (0, 0) if whole else layout.rows(tensor.shape)
            assert torch.equal(found[name].tensor, tensor if whole else tensor[begin:end]), (section, name)
            assert found[name].shape == tuple(tensor.shape)
    checkpoint.close()


def test_any_number_of_processes_reads_what_another_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = sections_of(1)
    fetched: list[str] = []
    get_file = FileStore.get_file

    def noted(self: FileStore, key: str, path: Path) -> None:
        fetched.append(key)
        get_file(self, key, path)

    monkeypatch.setattr(FileStore, "get_file", noted)
    for writers in (1, 2, 3, 4):
        folder = tmp_path / str(writers)
        folder.mkdir()
        key = write(folder, sections, "1-4", writers)
        objects = manifest_of(FileStore(folder / "store"), key).objects
        for readers in (1, 2, 3, 4, 8):
            for index in range(readers):
                layout = Layout(index, readers)
                fetched.clear()
                assert_holds(store_of(folder, layout), key, layout, sections)
                if readers == writers > 1:  # its own rows, and what all share: no row that another process holds
                    cut = [each for each in objects if f"/{each.name}" in "".join(fetched)]
                    pieces = [p for o in cut if o.section in ("model", "optimizer") for p in o.slices.values()]
                    assert all(piece.begin == layout.rows(piece.shape)[0] for piece in pieces if piece.shape)


def test_the_rows_are_those_that_torch_gives_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinates are those of each of four processes, the shards those of the first that torch makes."""
    written: dict[str, int] = {}
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        model = make_family_model("llama")
        shard(model, mesh_of_all("cpu"))
        tensors = {**trainable(model), "plain": torch.zeros(2)}
        for name, rows in written_slices(tensors, Layout.of(tensors)):  # it checks them against torch's own
            assert (rows.begin, rows.end) == ((0, 2) if name == "plain" else Layout(0, 4).rows(rows.shape))
        for rank in range(4):
            with monkeypatch.context() as patch:
                patch.setattr(DeviceMesh, "get_local_rank", lambda _, rank=rank: rank)
                layout = Layout.of(tensors)
            assert layout == Layout(rank, 4)
            for name, tensor in tensors.items():
                begin, end = layout.rows(tensor.shape) if name != "plain" else (0, 2 * (rank == 0))
                written[name] = written.get(name, 0) + end - begin
                if name != "plain":
                    chunks = torch.arange(tensor.shape[0]).chunk(4)
                    own = chunks[rank].tolist() if rank < len(chunks) else []
                    assert list(range(begin, end)) == own
        assert written == {name: tensor.shape[0] for name, tensor in tensors.items()}  # every row once
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("seed", range(3))
def test_an_object_goes_with_the_last_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Checkpoints of two lineages share what has not changed, and are deleted in random order, with kills."""
    rng, store = random.Random(seed), FileStore(tmp_path / "store")
    expected, before, written = {}, None, []
    delete = FileStore.delete
    at_put(monkeypatch, lambda key, _: written.append(key))
    for step in range(1, 7):
        version = PolicyVersion(1 + step // 4, step)
        sections = sections_of(step)
        sections["model"] = sections_of(rng.randrange(2))["model"]
        write(tmp_path, sections, str(version), rng.choice([1, 2]), known=before)
        expected[version], before = sections, str(version)
    named = [key for version in expected for key in object_keys(store, f"runs/demo/checkpoints/{version}", "reference")]
    assert len(set(named)) < len(named)
    assert max(written.count(key) for key in named) <= 1  # nothing changed, so nothing was written again
    while expected:
        version = rng.choice(list(expected))
        left = [rng.randrange(6)]

        def cut(self: FileStore, key: str, left: list[int] = left) -> None:
            if left[0] == 0:
                raise StoreUnavailableError("killed")
            left[0] -= 1
            delete(self, key)

        monkeypatch.setattr(FileStore, "delete", cut)
        with suppress(StoreUnavailableError):
            store_of(tmp_path).delete(version)
        monkeypatch.setattr(FileStore, "delete", delete)
        if version not in store_of(tmp_path).versions():
            del expected[version]
        for other, sections in expected.items():
            assert_holds(store_of(tmp_path), f"runs/demo/checkpoints/{other}", Layout(), sections)
        # a start collects what was left, but nothing of its own lineage: that may be on its way
        own = "runs/demo/checkpoints/objects/3-" + "0" * 32 + ".safetensors"
        store.put(own, b"on its way")
        store_of(tmp_path).delete_incomplete(before_lineage=3)
        names = {key for other in expected for key in object_keys(store, f"runs/demo/checkpoints/{other}")}
        assert set(store.list("runs/demo/checkpoints/objects/")) == names | {own}


def test_an_object_that_was_deleted_by_hand_is_written_again(tmp_path: Path) -> None:
    sections, store = sections_of(1), FileStore(tmp_path / "store")
    lost = object_keys(store, write(tmp_path, sections, "1-1", 2), "reference")[0]
    store.delete(lost)
    assert_holds(store_of(tmp_path), write(tmp_path, sections, "1-2", 2, known="1-1"), Layout(), sections)


def test_what_a_manifest_of_a_newer_release_names_is_not_collected(tmp_path: Path) -> None:
    key, store = write(tmp_path, sections_of(1), "1-1"), FileStore(tmp_path / "store")
    before = set(store.list("runs/demo/checkpoints/objects/"))
    store.put(f"{key}/manifest.json", b'{"schema_version": 3}')
    with pytest.raises(MalformedError, match="schema_version"):
        store_of(tmp_path).load(key)
    store_of(tmp_path).delete_incomplete(before_lineage=9)
    assert set(store.list("runs/demo/checkpoints/objects/")) == before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_manifest_that_lacks_rows_is_refused(tmp_path: Path, rank: int) -> None:
    key, store = write(tmp_path, sections_of(1), "1-1", 2), FileStore(tmp_path / "store")
    document = json.loads(store.get(f"{key}/manifest.json"))
    slices = [each["slices"] for each in document["objects"] if each["section"] == "model" and "d" in each["slices"]]
    assert [each["d"]["begin"] for each in slices] == [0, 8]
    del slices[rank]["d"]
    store.put(f"{key}/manifest.json", json.dumps(document).encode())
    with pytest.raises(MalformedError, match="'d' of section 'model'"):
        store_of(tmp_path).load(key)


class Pair:
    """A team of two whose follower is an object of this process."""

    num_ranks = num_local_ranks = 2

    def __init__(
        self, folder: Path, sections: Sections, *, follower_store: Path | None = None, retry_s: float = 60.0
    ) -> None:
        self.waits, self.restored = list[str](), cast(Any, None)
        self.folder, self.sections, self.answer = folder, sections, b""
        recipe = make_recipe(folder, store={"url": f"file://{follower_store or folder / 'store'}"})
        (folder / "follower").mkdir()
        self.follower = FollowerCheckpoints(recipe, self, self, folder=folder / "follower")  # type: ignore[arg-type]
        team, store = cast(Any, self), FileStore(folder / "store")
        self.checkpoints = TeamCheckpoints(
            store, "demo", folder=folder, max_bytes=MAX_BYTES, team=team, layout=Layout(0, 2),
            retry_s=retry_s, named_wait=self.named_wait,
        )  # fmt: skip

    @contextmanager
    def lead(self, command: str, **arguments: Any) -> Iterator[None]:
        getattr(self.follower, command.removesuffix("_part"))(**arguments)
        yield

    @contextmanager
    def named_wait(self, name: str, _deadline_s: float) -> Iterator[None]:
        self.waits.append(name)
        yield

    def gather(self, data: bytes) -> list[bytes]:
        self.answer, answer = data, self.answer  # the follower's comes first
        return [data, answer]

    def capture(self) -> Rows:  # as the follower's learner
        return rows_of(self.sections, self.layout())

    def layout(self) -> Layout:
        return Layout(1, 2)

    def restore(self, state: TrainerState, sections: Any) -> None:
        self.restored = {section: dict(tensors) for section, tensors in sections.items()}

    def begin(self, *, in_background: bool = True) -> Upload:
        rows = rows_of(self.sections, Layout(0, 2))
        return self.checkpoints.begin(make_state("1-1"), rows, known={}, in_background=in_background)

    def save(self, version: str) -> str:
        return save(self.checkpoints, make_state(version), rows_of(self.sections, Layout(0, 2)))

    def writer(self, patch: pytest.MonkeyPatch) -> CheckpointWriter:
        """The writer of a leader's loop after step 1, whose uploads are those of this team."""
        writer, learner = CheckpointWriter.__new__(CheckpointWriter), SimpleNamespace(model=torch.nn.Linear(1, 1))
        writer._context = cast(Any, SimpleNamespace(status=self, stop=threading.Event(), learner=learner))
        writer._progress = cast(Any, SimpleNamespace(step=1, version=PolicyVersion(1, 1)))
        writer._upload, writer.saved = None, START
        patch.setattr(writer, "_new", self.begin)
        return writer

    def at_follower_put(self, patch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
        """Call `action` before every file that the follower puts into the store."""
        folder = self.folder / "follower"
        at_put(patch, lambda _, path: action() if path.is_relative_to(folder) else None)


def test_a_leader_and_a_follower_write_and_read_their_own_rows(tmp_path: Path) -> None:
    pair = Pair(tmp_path, sections_of(1))
    key = pair.save("1-1")
    assert_holds(store_of(tmp_path), key, Layout(), pair.sections)
    assert_holds(pair.checkpoints, key, Layout(0, 2), pair.sections)
    pair.follower.restore(make_state("1-1"))
    for name, tensor in pair.sections["optimizer"].items():
        begin, end = Layout(1, 2).rows(tensor.shape)
        expected = tensor[begin:end] if tensor.shape else tensor
        assert torch.equal(pair.restored["optimizer"][name].tensor, expected)
    assert list((tmp_path / "follower").iterdir()) == []


def test_a_follower_that_cannot_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tmp_path, sections_of(1))
    with monkeypatch.context() as patch:
        pair.at_follower_put(patch, raising(StoreUnavailableError("the disk of the store is full")))
        with pytest.raises(StoreUnavailableError, match="process 1: the disk of the store is full"):
            pair.save("1-1")
    assert store_of(tmp_path).versions() == []
    pair.save("1-2")
    assert store_of(tmp_path).versions() == [PolicyVersion(1, 2)]


def test_an_own_part_that_fails_meanwhile_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, asked = Pair(tmp_path, sections_of(1)), threading.Event()

    def refuse(_: str, path: Path) -> None:
        if not path.is_relative_to(tmp_path / "follower"):
            asked.wait(30)
            raise StoreUnavailableError("the disk of the store is full")

    def fail_meanwhile(data: bytes) -> list[bytes]:
        asked.set()
        until("the own part has failed", lambda: upload.error)
        return Pair.gather(pair, data)

    at_put(monkeypatch, refuse)
    upload = pair.begin()
    monkeypatch.setattr(pair, "gather", fail_meanwhile)
    assert upload.wait(30.0)
    assert isinstance(upload.error, StoreUnavailableError)
    assert (upload.key, store_of(tmp_path).versions(), pair.follower._jobs) == (None, [], {})


def test_all_copy_at_the_same_time_and_stop_when_the_leader_has_no_room(tmp_path: Path) -> None:
    pair, version, jobs = Pair(tmp_path, sections_of(1)), "1-1", []

    def full() -> Iterator[tuple[str, str, TensorSlice]]:
        jobs.append(dict(pair.follower._jobs))
        raise OSError(errno.ENOSPC, "No space left on device")
        yield

    with pytest.raises(OSError, match="No space left"):
        pair.checkpoints.begin(make_state(version), Rows(full, 0), known={}, in_background=True)
    assert ([list(each) for each in jobs], pair.follower._jobs) == ([[version]], {})
    assert jobs[0][version].part.is_given_up
    assert_holds(store_of(tmp_path), pair.save(version), Layout(), pair.sections)


def test_a_follower_with_another_store_is_named(tmp_path: Path) -> None:
    pair = Pair(tmp_path, sections_of(1), follower_store=tmp_path / "elsewhere")
    with pytest.raises(StoreUnavailableError, match=r"process 1 has stored .* all processes need the same store"):
        pair.save("1-1")
    assert store_of(tmp_path).versions() == []


def test_a_checkpoint_that_is_given_up_never_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, held = Pair(tmp_path, sections_of(1)), [True]
    pair.at_follower_put(monkeypatch, lambda: until("it is given up", lambda: not held))
    upload = pair.begin()
    assert not upload.wait(0.05)
    assert upload.missing() == "process 1"
    upload.give_up()
    held.clear()
    assert upload.wait(10.0)
    assert (upload.key, upload.error, store_of(tmp_path).versions()) == (None, None, [])
    until("the follower has stopped", lambda: list((tmp_path / "follower").iterdir()) == [])


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_damage_that_only_a_follower_reads_is_found_before_anything_is_restored(tmp_path: Path, damage: str) -> None:
    pair = Pair(tmp_path, sections_of(1))
    key, store = pair.save("1-1"), FileStore(tmp_path / "store")
    theirs = next(each for each in manifest_of(store, key).objects if "d" in each.slices and each.slices["d"].begin)
    name = f"runs/demo/checkpoints/objects/{theirs.name}"
    if damage == "missing":
        store.delete(name)
    else:
        store.put(name, store.get(name)[:-1] + b"\xff")
    assert_holds(store_of(tmp_path, Layout(0, 2)), key, Layout(0, 2), pair.sections)  # the leader's own rows are whole
    with pytest.raises(ObjectNotFoundError if damage == "missing" else DigestError, match=f"process 1: object {name}"):
        pair.checkpoints.load(key)
    assert pair.restored is None


def test_a_follower_that_does_not_fetch_in_time_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tmp_path, sections_of(1), retry_s=0.05)
    key, busy, fetch = pair.save("1-1"), threading.Event(), CheckpointStore.fetch

    def late(self: CheckpointStore, key: str, manifest: bytes) -> Any:
        if not isinstance(self, TeamCheckpoints):  # the follower's
            assert busy.wait(10)
        return fetch(self, key, manifest)

    monkeypatch.setattr(CheckpointStore, "fetch", late)
    with pytest.raises(StoreUnavailableError, match=r"process 1: did not fetch its part .* the wait checkpoint-down"):
        pair.checkpoints.load(key)
    assert pair.waits == ["checkpoint-download"]
    busy.set()
    pair.checkpoints._retry_s = 60.0
    pair.checkpoints.load(key).close()


def test_a_follower_that_does_not_store_in_time_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, free = Pair(tmp_path, sections_of(1)), threading.Event()
    pair.at_follower_put(monkeypatch, lambda: free.wait(10))
    writer = pair.writer(monkeypatch)
    monkeypatch.setattr(limits, "RETRY_S", 0.05)
    with pytest.raises(StoreUnavailableError, match=r"process 1 did not store its part of checkpoint 1-1 within"):
        writer.save()
    assert pair.waits == ["checkpoint-upload"]
    free.set()
    until("the follower has stopped", lambda: list((tmp_path / "follower").iterdir()) == [])
    assert store_of(tmp_path).versions() == []


@pytest.mark.parametrize("without_room", [{0}, {1}, {0, 1}])
def test_an_upload_without_room_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_room: set[int]) -> None:
    """The follower stores nothing before it has answered three commands."""
    pair, begin_part = Pair(tmp_path, sections_of(1)), CheckpointStore.begin_part
    asked, registered, lead = list[str](), list[tuple[str, set[PolicyVersion]]](), pair.lead

    def part(self: CheckpointStore, version: Any, rows: Rows, *, known: Any, in_background: bool) -> Any:
        rank = 0 if isinstance(self, TeamCheckpoints) else 1
        in_background = in_background and rank not in without_room
        return begin_part(self, version, rows, known=known, in_background=in_background)

    @contextmanager
    def noted(command: str, **arguments: Any) -> Iterator[None]:
        with lead(command, **arguments):
            asked.append(command)
            yield

    monkeypatch.setattr(CheckpointStore, "begin_part", part)
    pair.at_follower_put(monkeypatch, lambda: until("three answers", lambda: asked.count("reply") >= 3))
    monkeypatch.setattr(pair, "lead", noted)
    writer, versions = pair.writer(monkeypatch), store_of(tmp_path).versions
    monkeypatch.setattr(writer, "_register_saved", lambda version, key: registered.append((key, set(versions()))))
    monkeypatch.setattr(limits, "BACKGROUND_BYTES", 1)
    writer.write()
    assert (registered, pair.waits) == ([("runs/demo/checkpoints/1-1", {PolicyVersion(1, 1)})], ["checkpoint-upload"])
    assert_holds(store_of(tmp_path), "runs/demo/checkpoints/1-1", Layout(), pair.sections)


def test_a_reference_is_written_once_per_reset(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is reset at steps 3 and 6. A kill between the objects and the manifest of 1-5 leaves 1-4."""
    world, written, put = World(tmp_path), list[str](), FileStore.put

    def killed(self: FileStore, key: str, data: bytes, *, create_only: bool = False) -> None:
        if key.endswith("checkpoints/1-5/manifest.json"):
            raise KeyError("killed")
        put(self, key, data, create_only=create_only)

    at_put(monkeypatch, lambda key, _: written.append(key))
    monkeypatch.setattr(FileStore, "put", killed)
    objective = {"preset": "tba_prime", "reference_reset_steps": 3}
    trainer = {"num_steps": 7, "checkpoint_interval": 1, "keep_checkpoints": 9, "export": False}
    recipe = make_recipe(model, objective=objective, trainer=trainer)
    with pytest.raises(Exception, match="killed"):
        world.train(recipe)
    assert world.buffer.checkpoint == ("1-4", "runs/demo/checkpoints/1-4")
    orphans = {key for key in written if "/checkpoints/" in key and world.store.size_bytes(key)}
    world.train(recipe)
    assert world.buffer.state == "done"
    key = "runs/demo/checkpoints/{}".format
    reference = [set(object_keys(world.store, key(v), "reference")) for v in ("1-3", "1-4", "2-5", "2-6", "2-7")]
    assert reference[0] == reference[1] == reference[2] != reference[3] == reference[4]
    assert all(written.count(name) == 1 for name in set().union(*reference))
    named = {name for v in store_of(tmp_path).versions() for name in object_keys(world.store, key(v))}
    assert orphans - named
    assert set(world.store.list("runs/demo/checkpoints/objects/")) == named
