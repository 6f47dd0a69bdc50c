"""Publishes versions of a few tensors, of which a leader and its followers each store a share.

`ShareTeam` has leader and followers in one process. `python -m tests.support.share_team FOLDER PORT` forks two real
processes over gloo. The second one is killed while it uploads the last version. The program prints both exit codes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from tba_trainer.checkpoints.weight_files import WeightSnapshot, share_files
from tba_trainer.distributed.process_group import Team
from tba_trainer.distributed.shares import FollowersShares, KeptShares
from torch import Tensor

from tba.errors import TeamError
from tba.store import FileStore
from tba.versions import START, PolicyVersion
from tba.weights import LocalVersion, WeightVersions
from tba.weights.publishing import Share, version_prefix
from tba.wire import Canary, Manifest
from tests.support.trainer_team import rank_environ
from tests.support.trainer_values import make_recipe
from tests.support.weight_chain import ALWAYS

CANARY = Canary(prompt_tokens=[1, 2], response_tokens=[3, 4], logprobs=[-0.5, -1.25], tolerance=1e-3)
MAX_FILE_BYTES = 3000


def tensors_of(step: int) -> dict[str, Tensor]:
    """Return bfloat16 tensors of different sizes by name; each step changes some elements of one of them."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"layer.{i}": torch.randn((10 + 7 * i, 20), generator=generator).to(torch.bfloat16) for i in range(6)
    } | {"norm": torch.ones(20, dtype=torch.bfloat16)}
    for number in range(step):
        tensors[f"layer.{number % 6}"].view(-1)[number::17] *= 1.01
    return tensors


def take(folder: Path, version: PolicyVersion, tensors: dict[str, Tensor], *, rank: int, num_ranks: int) -> Any:
    """Return one process's snapshot, with its share of the tensors."""
    sizes = {name: each.nbytes for name, each in tensors.items()}
    files = share_files(sizes, num_shares=num_ranks, max_bytes=MAX_FILE_BYTES)[rank]
    place = folder / f"{version}-{rank}-of-{num_ranks}"
    place.mkdir(parents=True)
    held = {name: tensors[name] for names in files.values() for name in names}
    return WeightSnapshot(
        version=version, parent=START, dtype="bfloat16", folder=place, canary=CANARY, held=held, files=files
    )


def publish(versions: WeightVersions, snapshot: WeightSnapshot, base: LocalVersion | None = None) -> LocalVersion:
    """Publish a version as the publisher does: every process uploads its share."""
    snapshot.write()
    config = snapshot.folder.parent / "config.json"
    if not config.exists():  # the same file at every try: the version is then not described a second time
        config.write_text('{"model_type": "tiny"}')
    manifest: Manifest = versions.publish(
        version=snapshot.version, parent=START, dtype="bfloat16", tensors_paths=snapshot.paths,
        files={"config.json": config}, canary=CANARY, torch_version="1", transformers_version="1",
        base=base, deltas=ALWAYS, others=snapshot.others,
    )  # fmt: skip
    return LocalVersion(snapshot.version, snapshot.paths, manifest)


class ShareTeam:
    """A team whose followers are objects of this process.

    Args:
        follower_store: store folder of the followers; None: the leader's.
    """

    def __init__(self, folder: Path, *, num_ranks: int = 2, follower_store: Path | None = None) -> None:
        self.folder, self.num_ranks, self.answers = folder, num_ranks, {}
        recipe = make_recipe(folder, store={"url": f"file://{follower_store or folder / 'store'}"})
        self.versions = WeightVersions(FileStore(folder / "store"), "demo")
        self.followers: list[KeptShares] = []
        for rank in range(1, num_ranks):
            (folder / f"follower-{rank}").mkdir()
            follower = _Follower(self, rank)
            self.followers.append(KeptShares(recipe, cast(Team, follower), deadline_s=0.2))

    @contextmanager
    def lead(self, command: str, **arguments: Any) -> Iterator[None]:
        for follower in self.followers:
            follower.commands[command](**arguments)
        yield

    def gather(self, _: bytes) -> list[bytes]:
        return [b"", *(self.answers.pop(rank) for rank in range(1, self.num_ranks))]

    def take(
        self, step: int, *, base: WeightSnapshot | None = None, lineage: int = 1, keep: bool = True
    ) -> WeightSnapshot:
        """Take a snapshot in every process; followers keep theirs (none if not `keep`); return the leader's."""
        version, tensors = PolicyVersion(lineage, step), tensors_of(step)
        ranks = [
            take(self.folder / (f"follower-{rank}" if rank else "leader"), version, tensors, rank=rank,
                 num_ranks=self.num_ranks)
            for rank in range(self.num_ranks)
        ]  # fmt: skip
        name = str(version)
        theirs = sum(each.nbytes for snapshot in ranks[1:] for each in snapshot.held.values())
        others = FollowersShares(cast(Team, self), name, prefix=version_prefix("demo", version), size_bytes=theirs)
        others.base = None if base is None else base.others
        ranks[0].others = others
        for follower, snapshot in zip(self.followers, ranks[1:], strict=True):
            follower.keep(name, snapshot if keep else None)
        return ranks[0]


class _Follower:
    def __init__(self, team: ShareTeam, rank: int) -> None:
        self.rank, self._team = rank, team

    def gather(self, data: bytes) -> list[bytes]:
        self._team.answers[self.rank] = data
        return []


def main() -> None:
    """Fork two processes, wait for their ends, and print their exit codes."""
    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    pids: list[int] = []
    for rank in range(2):  # forked, and before torch has threads: each would import it for seconds
        if not (pid := os.fork()):
            os.environ.update(rank_environ(rank, 2, port))
            _run(folder)
            os._exit(0)
        pids.append(pid)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))


def _run(folder: Path) -> None:
    with Team.join(device="cpu", deadline_s=60.0) as team:
        assert team.beside is not None
        if team.is_leader:
            team.start_beats(on_loss=lambda: None)
            (folder / "result.json").write_text(json.dumps(_lead(folder, team.beside)))
            os._exit(0)  # the team is broken
        recipe = make_recipe(folder, store={"url": f"file://{folder / 'store'}"})
        shares = KeptShares(recipe, team.beside, deadline_s=60.0)
        for step in (1, 2, 3):
            version = PolicyVersion(1, step)
            shares.keep(str(version), take(folder / "follower", version, tensors_of(step), rank=1, num_ranks=2))
        upload = Share.upload

        def die(self: Share, *, whole: bool, changes: bool) -> None:
            if "1-3" in self._prefix:
                os.kill(os.getpid(), signal.SIGKILL)
            upload(self, whole=whole, changes=changes)

        Share.upload = die  # pyright: ignore[reportAttributeAccessIssue]
        shares.start()
        for _ in team.commands():
            pass


def _lead(folder: Path, beside: Team) -> dict[str, Any]:
    versions, base, before = WeightVersions(FileStore(folder / "store"), "demo"), None, None
    for step in (1, 2, 3):
        version, tensors = PolicyVersion(1, step), tensors_of(step)
        snapshot = take(folder / "leader", version, tensors, rank=0, num_ranks=2)
        theirs = sum(each.nbytes for name, each in tensors.items() if name not in snapshot.held)
        others = FollowersShares(beside, str(version), prefix=version_prefix("demo", version), size_bytes=theirs)
        others.base = before
        snapshot.others = others
        begin = time.monotonic()
        try:
            base, before = publish(versions, snapshot, base), others
        except TeamError as error:
            return {"error": str(error), "seconds": time.monotonic() - begin}
    return {"error": None}


if __name__ == "__main__":
    main()
