"""Trains a learner in one or several processes over recorded batches, and writes the results to files.

`python -m tests.support.trainer_team JOB.json` is one process of a team. `run_team` starts all processes of a team;
`run_alone` trains in the test's own process.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tba.config import Recipe
from tba.versions import START, PolicyVersion
from tba_cli.ports import PortRequest, choose_ports
from tests.support.trainer_values import make_batch

DEADLINE_S = 240.0


class Trained:
    """The results of a run: metrics of every step, the published weights, and the checkpoint."""

    def __init__(self, folder: Path) -> None:
        result = json.loads((folder / "result.json").read_text())
        self.folder = folder
        self.metrics: list[dict[str, float | None]] = result["metrics"]
        self.canary: list[float] = result["canary"]
        self.paths = [Path(path) for path in result["paths"]]
        self.num_computed: int = result["num_computed"]
        self.peak_bytes: int = result["peak_bytes"]
        """Most bytes of tensors that rank 0 held in the last step; 0 if they were not counted."""
        self.deadlines_s: list[float] = result["deadlines_s"]
        """Deadline of the exchanges in each dimension of the mesh; empty for one process."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The published weights by name."""
        from tba_trainer.checkpoints.weight_files import TensorFiles

        return TensorFiles(self.paths)

    def checkpoint(self) -> dict[str, dict[str, Any]]:
        """Return the tensors of the newest checkpoint: section -> name -> tensor."""
        checkpoint = _newest(self.folder)
        try:
            return {
                section: {name: rows.whole for name, rows in tensors.items()}
                for section, tensors in checkpoint.sections.items()
            }
        finally:
            checkpoint.close()


def run_alone(folder: Path, recipe: Recipe, *, num_steps: int, resume: Trained | None = None) -> Trained:
    """Train `num_steps` steps in this process.

    Args:
        resume: the run from whose newest checkpoint training continues.
    """
    from tba_trainer.distributed.process_group import Team

    folder.mkdir(parents=True)
    _train(_job(folder, recipe, num_steps, resume), recipe, Team.alone())
    return Trained(folder)


def run_team(
    folder: Path,
    recipe: Recipe,
    *,
    num_ranks: int,
    num_steps: int,
    resume: Trained | None = None,
    count_bytes: bool = False,
) -> Trained:
    """Train as `run_alone`, but in `num_ranks` new processes.

    Args:
        count_bytes: whether to count the bytes of tensors in the last step.
    """
    folder.mkdir(parents=True)
    job = {**_job(folder, recipe, num_steps, resume), "count_bytes": count_bytes}
    (folder / "job.json").write_text(json.dumps(job))
    [port] = choose_ports([PortRequest("master", "127.0.0.1", 0)])
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.trainer_team", str(folder / "job.json")],
            env=rank_environ(rank, num_ranks, port),
            stdout=(folder / f"rank-{rank}.log").open("wb"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(num_ranks)
    ]
    try:
        for rank, process in enumerate(processes):
            assert process.wait(DEADLINE_S) == 0, (folder / f"rank-{rank}.log").read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return Trained(folder)


def _job(folder: Path, recipe: Recipe, num_steps: int, resume: Trained | None) -> dict[str, Any]:
    from tba_trainer.checkpoints import weight_files

    # every process writes and reads its part of a checkpoint
    store = folder / "store"
    if resume is not None:
        shutil.copytree(resume.folder / "store", store)
    document = recipe.model_dump(mode="json")
    return {
        "recipe": {**document, "store": {**document["store"], "url": f"file://{store}"}},
        "folder": str(folder),
        "num_steps": num_steps,
        "resume": None if resume is None else str(resume.folder),
        "count_bytes": False,
        "file_bytes": weight_files.FILE_BYTES,
    }


def rank_environ(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Return the environment that torchrun gives one of its workers, on loopback."""
    team = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {**os.environ, **{name: str(value) for name, value in team.items()}, "GLOO_SOCKET_IFNAME": "lo"}


def _train(job: dict[str, Any], recipe: Recipe, team: Any) -> None:
    from tba_trainer.checkpoints import weight_files
    from tba_trainer.distributed.checkpoints import TeamCheckpoints
    from tba_trainer.distributed.leader import build
    from tba_trainer.memory_trace.fake_device import LiveBytes

    from tba.store import FileStore
    from tests.support.learner_values import make_state
    from tests.support.stored_checkpoint import save

    folder = Path(job["folder"])
    _, learner, snapshots = build(recipe, team, folder=folder)
    checkpoints = TeamCheckpoints(
        FileStore(folder / "store"),
        recipe.run.name,
        folder=folder,
        max_bytes=weight_files.FILE_BYTES,
        team=team,
        layout=learner.layout(),
    )
    first = 1
    if job["resume"] is not None:
        checkpoint = checkpoints.load(checkpoints.key(checkpoints.versions()[-1]))
        learner.restore(checkpoint.state, checkpoint.sections)
        checkpoint.close()
        first = PolicyVersion.parse(checkpoint.state.version).step + 1
    metrics: list[dict[str, float | None]] = []
    last, peak_bytes = first + job["num_steps"] - 1, 0
    for step in range(first, last + 1):
        batch = make_batch(step % 3)
        ages = [step] * len(batch.rollouts)
        if job["count_bytes"] and step == last:
            with LiveBytes() as live:
                metrics.append(learner.gradients(batch, step=step, policy_ages=ages))
            peak_bytes = live.peak
        else:
            metrics.append(learner.gradients(batch, step=step, policy_ages=ages))
        learner.apply(step=step, lineage=1)
    canary, paths = _publish(snapshots, PolicyVersion(1, last), recipe, folder)
    save(checkpoints, make_state(f"1-{last}", learner), learner.capture())
    result = {
        "metrics": metrics,
        "canary": canary,
        "paths": [str(path) for path in paths],
        "num_computed": learner.reference.num_computed,
        "peak_bytes": peak_bytes,
        "deadlines_s": _deadlines_s(team),
    }
    (folder / "result.json").write_text(json.dumps(result))


def _publish(snapshots: Any, version: PolicyVersion, recipe: Recipe, folder: Path) -> tuple[list[float], list[Path]]:
    """Publish the weights, of which each process uploads its share; return the canary's log-probs, and the files of a
    download. An adapter is not published: its own files are returned."""
    from tba.store import FileStore
    from tba.weights import WeightVersions

    snapshot = snapshots.take(version, START)
    snapshot.write()
    if snapshot.adapter is not None:  # the leader has all of it
        return snapshot.canary.logprobs, list(snapshot.paths)
    versions = WeightVersions(FileStore(folder / "store"), recipe.run.name)
    config = Path(recipe.model.path) / "config.json"
    manifest = versions.publish(
        version=version, parent=START, dtype=snapshot.dtype, tensors_paths=snapshot.paths,
        files={"config.json": config}, canary=snapshot.canary, torch_version="", transformers_version="",
        others=snapshot.others,
    )  # fmt: skip
    snapshot.close()
    assert manifest.is_full
    return manifest.canary.logprobs, list(versions.download_tensors(version, folder / "published").paths)


def _deadlines_s(team: Any) -> list[float]:
    import torch

    groups = [] if team.mesh is None else team.mesh.get_all_groups()
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def _newest(folder: Path) -> Any:
    from tba_trainer.checkpoints.checkpoint import CheckpointStore

    from tba.store import FileStore

    [run] = (folder / "store" / "runs").iterdir()
    checkpoints = CheckpointStore(FileStore(folder / "store"), run.name, folder=folder, max_bytes=1)
    return checkpoints.load(checkpoints.key(checkpoints.versions()[-1]))


def main() -> None:
    """Run one process of the team: the leader trains, the others follow."""
    from tba_trainer.checkpoints import weight_files
    from tba_trainer.distributed.follower import follow
    from tba_trainer.distributed.launch import exit_process
    from tba_trainer.distributed.process_group import Team
    from tba_trainer.learner import learner
    from tba_trainer.model.policy import compile_layers

    # Dynamo alone: CI machines need no C++ compiler. "aot_eager", with autograd compiled too, passes the same test and
    # takes 10 s more in each process (2026-11-26).
    setattr(learner, "compile_layers", functools.partial(compile_layers, backend="eager"))  # noqa: B010
    job = json.loads(Path(sys.argv[1]).read_text())
    recipe = Recipe.model_validate(job["recipe"])
    setattr(weight_files, "FILE_BYTES", job["file_bytes"])  # noqa: B010
    with Team.join(device="cpu", deadline_s=120.0, context=recipe.trainer.sharding.context) as team:
        if team.is_leader:
            team.start_beats(on_loss=lambda: None)  # a slow machine may train longer than the deadline of a share
            _train(job, recipe, team)
        else:
            follow(recipe, team)
    exit_process(0)


if __name__ == "__main__":
    main()
