"""What a weight version costs each process of a sharded trainer: every one of them stores a share of it.

    python benchmarks/version_shares.py [--processes 1 2] [--layers 8] [--json FILE]

A Qwen2 of random weights, published in bfloat16 to a folder on the same disk; the first version is stored whole, the
others as deltas, after steps that take the weights themselves for gradients.

    loop_s      the snapshot, canary included
    stored_s    files, digests, delta, upload and manifest
    cpu_s       of each process from one snapshot to the next, an optimizer step included
    grown_mb    by how much the resident memory of each process has grown at most since before the first version, mapped
                files included
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "services" / "trainer")]

import torch  # noqa: E402
from tba_trainer.checkpoints.weight_files import WeightSnapshotWriter  # noqa: E402
from tba_trainer.distributed.follower import follow  # noqa: E402
from tba_trainer.distributed.leader import build  # noqa: E402
from tba_trainer.distributed.process_group import Team  # noqa: E402
from tba_trainer.learner.learner import Optimizer  # noqa: E402

from benchmarks.checkpoints import DEADLINE_S, make_model, run_processes  # noqa: E402
from tba.config import Recipe, parse_recipe  # noqa: E402
from tba.store import FileStore  # noqa: E402
from tba.versions import PolicyVersion  # noqa: E402
from tba.weights import LocalVersion, WeightVersions  # noqa: E402

NUM_VERSIONS = 3


def main() -> None:
    """Print one line for each version."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=8, help="layers of Qwen2.5-0.5B's width (it has 24)")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory(prefix="tba-bench-versions-") as name:
        folder = Path(name)
        num_parameters = make_model(folder / "model", args.layers, args.vocab_size)
        print(f"{num_parameters / 1e6:.1f} million parameters", flush=True)
        for num in args.processes:
            for row in _run(folder / str(num), folder / "model", num):
                load = os.getloadavg()[0]
                found.append({"processes": num, "parameters": num_parameters, "load": load, **row})
                print(json.dumps(found[-1]), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


def _run(folder: Path, model: Path, num: int) -> list[dict[str, Any]]:
    folder.mkdir()
    run_processes(num, _process, folder, model, num)
    rows = json.loads((folder / "result.json").read_text())
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(num)]
    for row, *used in zip(rows, *(each["cpu_s"] for each in ranks), strict=True):
        row["cpu_s"] = used
    rows[-1]["grown_mb"] = [each["grown_mb"] for each in ranks]
    return rows


def _process(folder: Path, model: Path, num: int, rank: int) -> None:
    recipe = parse_recipe(
        {
            "run": {"name": "bench"},
            "model": {"path": str(model), "dtype": "bfloat16"},
            "data": {"generator": "addition"},
            "objective": {"preset": "tba_prime"},
            "trainer": {"device": "cpu", "num_processes": num},
            "store": {"url": f"file://{folder / 'store'}"},
        },
        where="benchmarks/version_shares.py",
    )
    _move_without_batches()
    usage = _Usage(folder / f"rank-{rank}.json")
    usage.begin_at_snapshots()
    with Team.join(device="cpu", deadline_s=DEADLINE_S) as team:
        if team.is_leader:
            (folder / "result.json").write_text(json.dumps(_measure(recipe, team, folder, usage)))
        else:
            follow(recipe, team)
    usage.write()


def _move_without_batches() -> None:
    """Let every optimizer of this process take the weights themselves for their gradients."""
    apply = Optimizer.apply

    def moved(self: Optimizer, *, learning_rate: float) -> None:
        for parameter in self._parameters.values():
            parameter.grad = parameter.detach().clone()
        apply(self, learning_rate=learning_rate)

    Optimizer.apply = moved  # pyright: ignore[reportAttributeAccessIssue]


class _Usage:
    """What a process uses from the first snapshot on; a line for each version.

    Args:
        path: of the result.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._rss_kb, self._cpu_s = path, 0, list[float]()

    def begin_at_snapshots(self) -> None:
        """Note each snapshot that this process takes part in."""
        follow = WeightSnapshotWriter.follow

        def noted(writer: Any, *args: Any) -> Any:
            self.note()
            return follow(writer, *args)

        WeightSnapshotWriter.follow = noted  # pyright: ignore[reportAttributeAccessIssue]

    def note(self) -> None:
        """Note the CPU time at a snapshot, and the memory before the first."""
        if not self._cpu_s:
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
            self._rss_kb = _status_kb("VmRSS")
        self._cpu_s.append(process_time())

    def write(self) -> None:
        """Write it down."""
        ends = [*self._cpu_s[1:], process_time()]
        cpu_s = [round(end - begin, 2) for begin, end in zip(self._cpu_s, ends, strict=True)]
        grown_mb = round((_status_kb("VmHWM") - self._rss_kb) * 1024 / 1e6)
        self._path.write_text(json.dumps({"cpu_s": cpu_s, "grown_mb": grown_mb}))


def _status_kb(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _measure(recipe: Recipe, team: Team, folder: Path, usage: _Usage) -> list[dict[str, Any]]:
    _, learner, snapshots = build(recipe, team, folder=folder)
    versions = WeightVersions(FileStore(folder / "store"), "bench")
    rows: list[dict[str, Any]] = []
    base: LocalVersion | None = None
    before: Any = None
    for step in range(1, NUM_VERSIONS + 1):
        learner.apply(step=step, lineage=1)
        usage.note()
        begin = perf_counter()
        snapshot = snapshots.take(PolicyVersion(1, step), None)
        taken = perf_counter()
        snapshot.write()
        others = snapshot.others
        if others is not None:
            others.base = before
        manifest = versions.publish(
            version=snapshot.version,
            parent=None,
            dtype=snapshot.dtype,
            tensors_paths=snapshot.paths,
            files={"config.json": Path(recipe.model.path) / "config.json"},
            canary=snapshot.canary,
            torch_version=torch.__version__,
            transformers_version="",
            base=base,
            others=others,
        )
        base, before = LocalVersion(snapshot.version, snapshot.paths, manifest), others
        rows.append(
            {
                "version": step,
                "kind": "whole" if manifest.delta is None else "delta",
                "loop_s": round(taken - begin, 3),
                "stored_s": round(perf_counter() - taken, 3),
                "mb_stored": round(sum(each.size_bytes for each in [*manifest.full, *manifest.changes]) / 1e6, 1),
            }
        )
    return rows


if __name__ == "__main__":
    main()
