"""How long the training loop waits for a checkpoint, and how many bytes it writes, in one process and in several; with
--versions, the same of weight versions.

    python benchmarks/checkpoints.py [--versions] [--processes 1 2] [--layers 8] [--json FILE]

A Qwen2 of random weights with AdamW's moments and a reference that has left the starting model: 16 bytes for each
parameter. Of three checkpoints, one after another, theta and the moments change and the reference stays. The store is a
folder on the same disk. `loop_s`: until the next step may begin, `loop_cpu_s`: CPU time of the leader in it;
`stored_s`: until the checkpoint is in the store.

Versions are in bfloat16; the first is stored whole, the others as deltas. `loop_s`: the snapshot, canary included;
`stored_s`: files, digests, delta, upload and manifest; `cpu_s`: of each process from one
snapshot to the next, an optimizer step included; `grown_mb`: by how much the
resident memory of each process has grown at most since before the first version, mapped files included.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
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
from tba_trainer.distributed.checkpoints import TeamCheckpoints  # noqa: E402
from tba_trainer.distributed.follower import follow  # noqa: E402
from tba_trainer.distributed.leader import build  # noqa: E402
from tba_trainer.distributed.process_group import Team  # noqa: E402
from tba_trainer.learner.learner import Learner, Optimizer, TrainerState, encode_torch_rng  # noqa: E402

from tba.config import Recipe, parse_recipe  # noqa: E402
from tba.store import FileStore  # noqa: E402
from tba.versions import PolicyVersion  # noqa: E402
from tba.weights import LocalVersion, WeightVersions  # noqa: E402
from tba_cli.ports import PortRequest, choose_ports  # noqa: E402

NUM_CHECKPOINTS = 3
RESET = 1000
"""The step after which the reference is no longer the starting model."""
DEADLINE_S = 300.0


def main() -> None:
    """Print one line for each checkpoint."""
    parser = argparse.ArgumentParser(
        description="How long the loop waits for a checkpoint, and how many bytes it writes."
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=8, help="layers of Qwen2.5-0.5B's width (it has 24)")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--versions", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory(prefix="tba-bench-checkpoints-") as name:
        folder = Path(name)
        num_parameters = _make_model(folder / "model", args.layers, args.vocab_size)
        print(f"{num_parameters / 1e6:.1f} million parameters")
        for num in args.processes:
            for row in _run(folder / str(num), folder / "model", num, versions=args.versions):
                found.append({"processes": num, "parameters": num_parameters, **row})
                print(json.dumps(found[-1]))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


def _make_model(folder: Path, num_layers: int, vocab_size: int) -> int:
    from benchmarks.gpu_bench.models import qwen2_config, random_model

    model = random_model(qwen2_config("0.5b", vocab_size=vocab_size, num_hidden_layers=num_layers), "cpu")
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _run(folder: Path, model: Path, num: int, *, versions: bool) -> list[dict[str, Any]]:
    folder.mkdir()
    [port] = choose_ports([PortRequest("master", "127.0.0.1", 0)])
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_process, args=(folder, model, num, rank, port, versions)) for rank in range(num)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"exit codes {[process.exitcode for process in processes]}; see the traceback above")
    rows = json.loads((folder / "result.json").read_text())
    if versions:
        ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(num)]
        for row, *used in zip(rows, *(each["cpu_s"] for each in ranks), strict=True):
            row["cpu_s"] = used
        rows[-1]["grown_mb"] = [each["grown_mb"] for each in ranks]
    return rows


def _process(folder: Path, model: Path, num: int, rank: int, port: int, versions: bool) -> None:
    team_variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num, "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {name: str(value) for name, value in {**team_variables, "MASTER_PORT": port}.items()}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    recipe = parse_recipe(
        {
            "run": {"name": "bench"},
            "model": {"path": str(model), "dtype": "bfloat16" if versions else "float32"},
            "data": {"generator": "addition"},
            "objective": {"preset": "tba_prime", "reference_reset_steps": RESET},
            "trainer": {"device": "cpu", "num_processes": num},
            "store": {"url": f"file://{folder / 'store'}"},
        },
        where="benchmarks/checkpoints.py",
    )
    _move_without_batches()
    usage = _Usage(folder / f"rank-{rank}.json")
    if versions:
        usage.begin_at_snapshots()
    with Team.join(device="cpu", deadline_s=DEADLINE_S) as team:
        if team.is_leader:
            measured = _measure_versions(recipe, team, folder, usage) if versions else _measure(recipe, team, folder)
            (folder / "result.json").write_text(json.dumps(measured))
        else:
            follow(recipe, team)
    if versions:
        usage.write()


def _move_without_batches() -> None:
    """Let every optimizer of this process take the weights themselves for their gradients."""
    apply = Optimizer.apply

    def moved(self: Optimizer, *, learning_rate: float) -> None:
        for parameter in self._parameters.values():
            parameter.grad = parameter.detach().clone()
        apply(self, learning_rate=learning_rate)

    Optimizer.apply = moved  # pyright: ignore[reportAttributeAccessIssue]


def _measure(recipe: Recipe, team: Team, folder: Path) -> list[dict[str, Any]]:
    _, learner, _ = build(recipe, team, folder=folder)
    store = FileStore(folder / "store")
    checkpoints = TeamCheckpoints(
        store, "bench", folder=folder, max_bytes=recipe.store.shard_bytes, team=team, layout=learner.layout()
    )
    rows, known = [], {}
    for step in range(RESET, RESET + NUM_CHECKPOINTS):
        learner.apply(step=step, lineage=1)  # the first one is a reset of the reference
        before = _stored_bytes(store)
        begin, cpu_begin = perf_counter(), process_time()
        upload = checkpoints.begin(_state(learner, step), learner.capture(), known=known, in_background=True)
        upload.wait(0.0)  # a step begins with an exchange, too: it waits for those that still copy
        loop_s, loop_cpu_s = perf_counter() - begin, process_time() - cpu_begin
        while not upload.wait(0.05):
            pass
        stored_s = perf_counter() - begin
        if upload.error is not None:
            raise upload.error
        known = checkpoints.known_objects(upload.version)
        rows.append(
            {
                "checkpoint": step - RESET + 1,
                "loop_s": round(loop_s, 3),
                "loop_cpu_s": round(loop_cpu_s, 3),
                "stored_s": round(stored_s, 3),
                "mb_written": round((_stored_bytes(store) - before) / 1e6, 1),
                "leader_peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6),
            }
        )
    return rows


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


def _measure_versions(recipe: Recipe, team: Team, folder: Path, usage: _Usage) -> list[dict[str, Any]]:
    _, learner, snapshots = build(recipe, team, folder=folder)
    versions = WeightVersions(FileStore(folder / "store"), "bench")
    rows: list[dict[str, Any]] = []
    base: LocalVersion | None = None
    before: Any = None
    for step in range(1, NUM_CHECKPOINTS + 1):
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


def _stored_bytes(store: FileStore) -> int:
    return sum(store.size_bytes(key) or 0 for key in store.list("runs/"))


def _state(learner: Learner, step: int) -> TrainerState:
    return TrainerState(
        run="bench",
        version=str(PolicyVersion(1, step)),
        train_s=0.0,
        num_rollouts_trained=0,
        reference_version=str(learner.reference.version),
        rng=dict(learner.rng.bit_generator.state),
        torch_rng=encode_torch_rng(),
        config_sha256="0" * 64,
        model_config_sha256="0" * 64,
        policy_temperature=1.0,
    )


if __name__ == "__main__":
    main()
