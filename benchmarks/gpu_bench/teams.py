"""FSDP2 on every card there is, a single one too, through the trainer's own start, steps, snapshots and checkpoints."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import traceback
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tba_trainer.distributed.checkpoints import TeamCheckpoints
from tba_trainer.distributed.follower import follow
from tba_trainer.distributed.leader import build
from tba_trainer.distributed.process_group import Team, mesh_of_all
from tba_trainer.learner.learner import Learner, TrainerState, encode_torch_rng

from benchmarks.gpu_bench.check import Bench, Findings, synchronize
from benchmarks.gpu_bench.models import make_batch, qwen2_config, random_model, recipe_of, relative_error
from benchmarks.gpu_bench.weight_path import publish
from tba.config import Recipe
from tba.store import FileStore
from tba.versions import START, PolicyVersion
from tba.weights import WeightVersions
from tba_cli.ports import PortRequest, choose_ports
from tests.support import stored_checkpoint

ALONE = 0
"""Instead of a number of processes: one, with the whole model."""
LIMITS = {"float32": 1e-4, "bfloat16": 0.02}
"""Relative difference of loss, gradient norm and weights' movement between whole and sharded models."""
DEADLINE_S = 25.0
NUM_STEPS = 2


def check_fsdp(bench: Bench, found: Findings) -> None:
    """Train two steps whole and sharded; compare; restore a checkpoint to the bit."""
    torch.set_num_threads(1)  # a pool of threads here would be missing in the processes that are forked
    if bench.device == "cuda":
        num_cards = _count_cards()
        teams = [1, num_cards] if num_cards > 1 else [1]
    else:
        teams = [2]
    config = qwen2_config("tiny" if bench.quick else "0.5b-4-layers", vocab_size=512 if bench.quick else 32_000)
    folder = bench.folder / "model"
    random_model(config, "cpu").save_pretrained(folder)
    before = load_file(folder / "model.safetensors")
    for dtype in LIMITS:
        alone = _run(bench, ALONE, dtype)
        for num in teams:
            name = f"{num}_sharded_{dtype}"
            with found.part(name):
                _compare(found, name, alone, _run(bench, num, dtype), before, LIMITS[dtype])
        found.note(f"whole_{dtype}_step_s", alone["step_s"])
        found.note(f"whole_{dtype}_peak_mib", alone["peak_mib"])


def _count_cards() -> int:
    # by NVML: a CUDA context here could not be used by the processes that are forked
    return torch.cuda.device_count()


def _compare(
    found: Findings, name: str, one: dict[str, Any], two: dict[str, Any], before: dict[str, Any], limit: float
) -> None:
    for metric in ("loss", "grad_norm"):
        pairs = zip(one["metrics"], two["metrics"], strict=True)
        found.at_most(
            f"{name}_{metric}_error", max(abs(b[metric] - a[metric]) / abs(a[metric]) for a, b in pairs), limit
        )
    ours, theirs = ({k: t for path in result["paths"] for k, t in load_file(path).items()} for result in (one, two))
    # AdamW's first steps have the sign of the gradient: where that is nearly 0, any rounding turns it
    moves = [torch.cat([(t[key] - before[key]).flatten() for key in before]) for t in (ours, theirs)]
    found.at_most(f"{name}_movement_error", relative_error(moves[1], moves[0]), math.sqrt(limit))
    found.note(f"{name}_step_s", two["step_s"])
    found.note(f"{name}_peak_mib", two["peak_mib"])
    found.note(f"{name}_restored", str(two["restored"]))
    if not two["restored"]:
        found.fail(f"{name}: the restored checkpoint is not what was saved, to the bit")


def _run(bench: Bench, num: int, dtype: str) -> dict[str, Any]:
    """Train in processes of their own; return what rank 0 found."""
    folder = bench.folder / f"{num}-{dtype}"
    folder.mkdir()
    [port] = choose_ports([PortRequest("master", "127.0.0.1", 0)])
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_process, args=(bench, num, rank, port, dtype, folder)) for rank in range(max(1, num))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
    if any(process.exitcode for process in processes) or not (folder / "result.json").is_file():
        for process in processes:
            process.kill()
        raise RuntimeError(f"exit codes {[process.exitcode for process in processes]}; see the traceback above")
    return json.loads((folder / "result.json").read_text())


def _process(bench: Bench, num: int, rank: int, port: int, dtype: str, folder: Path) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(max(1, num)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    trainer = {"compute_dtype": dtype, "micro_batch_tokens": 4096}
    recipe = recipe_of(bench, trainer=trainer, store={"url": f"file://{folder / 'store'}"})
    code = 1
    try:
        team = _team(bench, num)
        with team:
            if team.is_leader:
                (folder / "result.json").write_text(json.dumps(_train(bench, recipe, team, folder)))
            else:
                follow(recipe, team)
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _team(bench: Bench, num: int) -> Team:
    if num == ALONE:
        return Team.alone(bench.device)
    if num > 1:
        return Team.join(device=bench.device, deadline_s=DEADLINE_S)
    # a run of one process never shards; here it does, so that one card is enough to try FSDP2 and NCCL
    team = Team(rank=0, num_ranks=1, device=bench.device, deadline_s=DEADLINE_S)
    dist.init_process_group("cpu:gloo,cuda:nccl" if bench.device == "cuda" else "gloo")
    team.mesh = mesh_of_all(bench.device)
    return team


def _train(bench: Bench, recipe: Recipe, team: Team, folder: Path) -> dict[str, Any]:
    model, learner, snapshots = build(recipe, team, folder=folder)
    longest, vocab_size = 64 if bench.quick else 512, model.config.vocab_size
    metrics, step_s = [], 0.0
    for step in range(1, NUM_STEPS + 1):
        batch = make_batch(2, 8, longest, vocab_size, seed=step)
        begin = perf_counter()
        metrics.append(learner.gradients(batch, step=step, policy_ages=[1] * len(batch.rollouts)))
        learner.apply(step=step, lineage=1)
        synchronize(bench.device)
        step_s = perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() / 2**20 if bench.device == "cuda" else 0.0
    snapshot = snapshots.take(PolicyVersion(1, NUM_STEPS), START)
    snapshot.write()
    versions = WeightVersions(FileStore(folder / "store"), "gpu")
    publish(versions, bench.folder, snapshot, None)
    local = versions.download_tensors(snapshot.version, folder / "local")
    restored = _restores(bench, learner, recipe, team, folder, vocab_size)
    return {
        "metrics": [{name: values[name] for name in ("loss", "grad_norm")} for values in metrics],
        "paths": [str(path) for path in local.paths],
        "step_s": step_s,
        "peak_mib": peak,
        "restored": restored,
    }


def _restores(bench: Bench, learner: Learner, recipe: Recipe, team: Team, folder: Path, vocab_size: int) -> bool:
    """Return whether a checkpoint that was saved, left by a step, and loaded again is there to the bit:
    the rows of this process are compared."""
    store = TeamCheckpoints(
        FileStore(folder / "store"), "gpu", folder=folder, max_bytes=2**30, team=team, layout=learner.layout()
    )
    state = TrainerState(
        run="gpu",
        version=f"1-{NUM_STEPS}",
        train_s=0.0,
        num_rollouts_trained=0,
        reference_version=str(learner.reference.version),
        rng=dict(learner.rng.bit_generator.state),
        torch_rng=encode_torch_rng(),
        config_sha256="0" * 64,
        model_config_sha256="0" * 64,
        policy_temperature=recipe.model.policy_temperature,
    )
    stored_checkpoint.save(store, state, learner.capture())
    batch = make_batch(2, 4, 64, vocab_size, seed=9)
    learner.gradients(batch, step=NUM_STEPS + 1, policy_ages=[1] * len(batch.rollouts))
    learner.apply(step=NUM_STEPS + 1, lineage=1)
    checkpoint = store.load(store.key(store.versions()[-1]))
    learner.restore(checkpoint.state, checkpoint.sections)
    equal = [
        torch.equal(rows.tensor, checkpoint.sections[section][name].tensor) for section, name, rows in learner.capture()
    ]
    checkpoint.close()
    return all(equal) and bool(equal)
