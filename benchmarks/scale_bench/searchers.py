"""Run a plan: services, trainer and hosts start, the timetable happens, everything ends; what was found is evidence."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import Redis

from benchmarks.scale_bench.hosts import Hosts
from benchmarks.scale_bench.plan import Plan
from benchmarks.scale_bench.services import Services, running
from benchmarks.scale_bench.trainer import PretendTrainer
from benchmarks.scale_bench.watch import Seen, Watch
from tba.api import EvalInfo, LeaseRequest, LeaseReturn, Stats
from tba.clients import BufferClient
from tba.config import Recipe
from tba.wire import decode_rollout

LEASE_S = 20.0
EXPIRY_S = 30.0
"""Time beyond the length of a lease in which all leases must come back."""
MORE_S = 120.0
POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The fields of one rollout in Redis."""

    visit_id: str
    searcher_id: str
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The findings at the end of a run."""

    recipe: Recipe
    plan: Plan
    reports: list[dict[str, Any]]
    """One per searcher (`host.Member.report`)."""
    stored: dict[str, Stored]
    """Rollout id -> rollout, from Redis itself."""
    unfinished: dict[str, dict[str, Any]]
    """Visit id -> {l: lease id or "", n: missing rollouts}, from Redis itself."""
    returned: list[str]
    """Visits that wait to be leased again."""
    inflight: int
    stats: Stats
    evals: list[EvalInfo]
    seen: Seen
    num_steps: int
    num_versions: int
    trainer_error: str | None
    work_s: float
    """Time from the first join to the last drain."""


def sections(*, num_slots: int = 8, **changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The recipe of a run; `changes` override single values of sections."""
    document: dict[str, dict[str, Any]] = {
        "buffer": {"lease_s": LEASE_S},
        "sampling": {"prompts_per_batch": 16, "group_size": 4, "rollouts_per_visit": 8, "min_size_to_sample": 64},
        "searcher": {
            "engine": "simulated",
            "num_slots": num_slots,
            "max_response_tokens": 512,
            "drain_s": 20.0,
        },
        "reward": {"num_workers": 1},
        "eval": {"num_samples": 1},  # `verdict` takes a result for one completion
    }
    for name, values in changes.items():
        document[name] = {**document.get(name, {}), **values}
    return document


def run_searchers(
    folder: Path,
    plan: Plan,
    *,
    num_hosts: int,
    recipe: dict[str, dict[str, Any]],
    step_s: float = 0.25,
    sync_interval: int = 8,
    min_rollouts: int = 0,
    min_evals: int = 0,
) -> Evidence:
    """Run a plan to its end.

    Args:
        folder: empty; logs stay in it.
        step_s, sync_interval: of the pretend trainer: seconds between steps, steps between versions.
        min_rollouts, min_evals: the searchers work beyond the plan until so many are stored and done (MORE_S at most).

    Raises:
        RuntimeError: a process did not start, failed or hangs.
    """
    with running(folder, num_prompts=1000, **recipe) as services:
        trainer = PretendTrainer(services, step_s=step_s, sync_interval=sync_interval)
        watch, hosts = Watch(services.stack.client), Hosts(services.recipe_path, folder, num_hosts)
        try:
            hosts.start()
            began_s = time.monotonic()
            trainer.start()
            watch.start()
            for event in plan.events():
                time.sleep(max(0.0, began_s + event.at_s - time.monotonic()))
                hosts.obey(event)
            time.sleep(max(0.0, began_s + plan.duration_s - time.monotonic()))
            _await_work(services.stack.client, trainer, min_rollouts=min_rollouts, min_evals=min_evals)
            reports = hosts.end()
            work_s = time.monotonic() - began_s
        finally:
            hosts.kill()
            for thread in (trainer, watch):
                thread.over.set()
            for thread in (trainer, watch):
                if thread.is_alive():
                    thread.join(timeout=30)
        _await_expiry(services.stack.client)
        return _evidence(services, plan, reports, watch.seen, trainer, work_s)


def _await_work(client: BufferClient, trainer: PretendTrainer, *, min_rollouts: int, min_evals: int) -> None:
    """A machine that does ten other things needs longer than the plan says."""
    deadline = time.monotonic() + MORE_S
    while time.monotonic() < deadline:
        num_done = sum(client.get_eval(eval_id).state == "done" for eval_id in list(trainer.eval_ids))
        if client.stats().num_rollouts >= min_rollouts and num_done >= min_evals:
            return
        time.sleep(POLL_S)


def _await_expiry(client: BufferClient) -> None:
    """Ask for a lease and give it back until no lease is open: leases of searchers that vanished expire meanwhile."""
    deadline = time.monotonic() + LEASE_S + EXPIRY_S
    while time.monotonic() < deadline:
        reply = client.lease(LeaseRequest(searcher_id="observer", max_leases=1))
        client.return_leases(LeaseReturn(searcher_id="observer", lease_ids=[lease.lease_id for lease in reply.leases]))
        if not client.stats().leases["open"]:
            return
        time.sleep(POLL_S)


def _evidence(
    services: Services,
    plan: Plan,
    reports: list[dict[str, Any]],
    seen: Seen,
    trainer: PretendTrainer,
    work_s: float,
) -> Evidence:
    stats, prefix = services.stack.client.stats(), f"tba:{services.recipe.run.name}"
    with Redis.from_url(services.recipe.buffer.redis_url) as redis:
        payloads: Any = redis.hgetall(f"{prefix}:payloads")
        visits: Any = redis.hgetall(f"{prefix}:visits")
        returned: Any = redis.lrange(f"{prefix}:returned", 0, -1)
        inflight: Any = redis.hget(f"{prefix}:counters", "inflight")
    stored = {}
    for rollout_id, payload in payloads.items():
        rollout = decode_rollout(payload)
        stored[rollout_id.hex()] = Stored(
            visit_id=rollout.visit_id, searcher_id=rollout.searcher_id, num_tokens=len(rollout.response_tokens)
        )
    return Evidence(
        recipe=services.recipe,
        plan=plan,
        reports=reports,
        stored=stored,
        unfinished={visit_id.decode(): json.loads(text) for visit_id, text in visits.items()},
        returned=[visit_id.decode() for visit_id in returned],
        inflight=int(inflight or 0),
        stats=stats,
        evals=[services.stack.client.get_eval(eval_id) for eval_id in trainer.eval_ids],
        seen=seen,
        num_steps=trainer.num_steps,
        num_versions=trainer.num_versions,
        trainer_error=None if trainer.error is None else repr(trainer.error),
        work_s=work_s,
    )
