"""How long the training loop waits for a version and a checkpoint, beside a step, in one process and in several.

    python benchmarks/checkpoints.py [--processes 1 2] [--staging disk memory] [--layers 8] [--json FILE]
    python benchmarks/checkpoints.py --layers 24 --vocab-size 151936 --without-reference     # 494 million parameters

A Qwen2 of random weights in float32 with AdamW's moments, published in bfloat16, and a reference that has left the
starting model: 16 bytes for each parameter of a checkpoint, 12 without a reference. Before each checkpoint there
is a step and a version. The store is a folder on the same disk.

    step_s      a step of few short rollouts, which a CPU makes in seconds
    version_s   until the next step may begin, of which canary_s is the canary
    loop_s      the same for a checkpoint; loop_cpu_s: CPU time of the leader in it
    stored_s    until the checkpoint is in the store
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "services" / "trainer")]

import torch  # noqa: E402
from tba_trainer.checkpoints.canary import CanaryMaker  # noqa: E402
from tba_trainer.distributed.checkpoints import TeamCheckpoints, staging_of  # noqa: E402
from tba_trainer.distributed.follower import follow  # noqa: E402
from tba_trainer.distributed.leader import build  # noqa: E402
from tba_trainer.distributed.process_group import Team  # noqa: E402
from tba_trainer.learner.learner import Learner, TrainerState, encode_torch_rng  # noqa: E402

from benchmarks.gpu_bench.models import make_batch, qwen2_config, random_model  # noqa: E402
from tba.config import Recipe, parse_recipe  # noqa: E402
from tba.store import FileStore  # noqa: E402
from tba.versions import PolicyVersion  # noqa: E402
from tba.wire import Canary  # noqa: E402
from tba_cli.ports import PortRequest, choose_ports  # noqa: E402

RESET = 1000
"""The step after which the reference is no longer the starting model."""
DEADLINE_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured."""

    folder: Path
    model: Path
    num_processes: int
    staging: Literal["disk", "memory"]
    has_reference: bool
    rollout_tokens: int
    num_checkpoints: int


def main() -> None:
    """Print one line for each checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--staging", nargs="+", choices=("disk", "memory"), default=["disk", "memory"])
    parser.add_argument("--layers", type=int, default=8, help="layers of Qwen2.5-0.5B's width (it has 24)")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--without-reference", action="store_true", help="an objective that has none")
    parser.add_argument("--rollout-tokens", type=int, default=64, help="of the longest of the 4 rollouts of a step")
    parser.add_argument("--checkpoints", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory(prefix="tba-bench-checkpoints-") as name:
        folder = Path(name)
        num_parameters = make_model(folder / "model", args.layers, args.vocab_size)
        print(f"{num_parameters / 1e6:.1f} million parameters", flush=True)
        for num, staging in product(args.processes, args.staging):
            case = Case(
                folder=folder / f"{num}-{staging}",
                model=folder / "model",
                num_processes=num,
                staging=staging,
                has_reference=not args.without_reference,
                rollout_tokens=args.rollout_tokens,
                num_checkpoints=args.checkpoints,
            )
            for row in _run(case):
                load = os.getloadavg()[0]
                found.append({"processes": num, "staging": staging, "parameters": num_parameters, "load": load, **row})
                print(json.dumps(found[-1]), flush=True)
            shutil.rmtree(case.folder)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


def make_model(folder: Path, num_layers: int, vocab_size: int) -> int:
    """Save a Qwen2 of random weights; return its number of parameters."""
    model = random_model(qwen2_config("0.5b", vocab_size=vocab_size, num_hidden_layers=num_layers), "cpu")
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _run(case: Case) -> list[dict[str, Any]]:
    case.folder.mkdir()
    run_processes(case.num_processes, _process, case)
    return json.loads((case.folder / "result.json").read_text())


def run_processes(num: int, target: Callable[..., None], *args: Any) -> None:
    """Run `target(*args, rank)` in as many processes; each may join the team then.

    Raises:
        RuntimeError: one of them failed.
    """
    [port] = choose_ports([PortRequest("master", "127.0.0.1", 0)])
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_run_one, args=(target, args, num, rank, port)) for rank in range(num)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"exit codes {[process.exitcode for process in processes]}; see the traceback above")


def _run_one(target: Callable[..., None], args: tuple[Any, ...], num: int, rank: int, port: int) -> None:
    team_variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num, "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {name: str(value) for name, value in {**team_variables, "MASTER_PORT": port}.items()}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    target(*args, rank)


def _process(case: Case, _rank: int) -> None:
    # without a reference: grpo's anchor is the behaviour policy
    objective = {"preset": "tba_prime", "reference_reset_steps": RESET} if case.has_reference else {"preset": "grpo"}
    recipe = parse_recipe(
        {
            "run": {"name": "bench"},
            "model": {"path": str(case.model), "dtype": "bfloat16"},
            "data": {"generator": "addition"},
            "objective": objective,
            "trainer": {
                "device": "cpu",
                "num_processes": case.num_processes,
                "compute_dtype": "bfloat16",
                "learning_rate": {"value": 1e-5},
                "checkpoint_staging": case.staging,
            },
            "store": {"url": f"file://{case.folder / 'store'}"},
        },
        where="benchmarks/checkpoints.py",
    )
    with Team.join(device="cpu", deadline_s=DEADLINE_S) as team:
        if team.is_leader:
            (case.folder / "result.json").write_text(json.dumps(_measure(case, recipe, team)))
        else:
            follow(recipe, team)


def _measure(case: Case, recipe: Recipe, team: Team) -> list[dict[str, Any]]:
    _, learner, snapshots = build(recipe, team, folder=case.folder)
    store, canary = FileStore(case.folder / "store"), _timed_canaries()
    checkpoints = TeamCheckpoints(
        store,
        "bench",
        folder=case.folder,
        max_bytes=recipe.store.shard_bytes,
        team=team,
        layout=learner.layout(),
        staging=staging_of(recipe, team),
    )
    batch = make_batch(1, 4, case.rollout_tokens, learner.model.config.vocab_size)
    rows, known = [], {}
    for step in range(RESET, RESET + case.num_checkpoints):
        begin = perf_counter()
        learner.gradients(batch, step=step, policy_ages=[1] * len(batch.rollouts))
        learner.apply(step=step, lineage=1)  # the first one is a reset of the reference
        step_s = perf_counter() - begin
        begin = perf_counter()
        snapshot = snapshots.take(PolicyVersion(1, step), None)
        version_s = perf_counter() - begin
        snapshot.write()
        snapshot.close()
        checkpoint, known = _checkpoint(checkpoints, learner, store, step, known)
        rows.append(
            {
                "checkpoint": step - RESET + 1,
                "step_s": round(step_s, 3),
                "version_s": round(version_s, 3),
                "canary_s": round(canary[-1], 3),
                **checkpoint,
                "leader_peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6),
            }
        )
    return rows


def _checkpoint(
    checkpoints: TeamCheckpoints, learner: Learner, store: FileStore, step: int, known: Mapping[str, int]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Write a checkpoint; return what was measured, and its objects."""
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
    found = {
        "loop_s": round(loop_s, 3),
        "loop_cpu_s": round(loop_cpu_s, 3),
        "stored_s": round(stored_s, 3),
        "mb_written": round((_stored_bytes(store) - before) / 1e6, 1),
    }
    return found, checkpoints.known_objects(upload.version)


def _timed_canaries() -> list[float]:
    """Return a list that gets the seconds of every canary from now on."""
    make, found = CanaryMaker.make, []

    def timed(self: CanaryMaker) -> Canary:
        begin = perf_counter()
        canary = make(self)
        found.append(perf_counter() - begin)
        return canary

    CanaryMaker.make = timed  # pyright: ignore[reportAttributeAccessIssue]
    return found


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
