"""Histories of runs whose numbers are known by construction."""

from __future__ import annotations

from typing import Any

from tba.api import ComponentInfo, EvalInfo, LedgerEntry, RunInfo, Stats
from tba_cli.reports.history import History, Timing

STEP_S, WAIT_S = 0.8, 0.2
RUN_INFO: dict[str, Any] = {
    "run": "demo",
    "state": "running",
    "state_reason": None,
    "step": 3,
    "lineage": 1,
    "parents": {},
    "latest_version": "1-2",
    "checkpoint": None,
    "checkpoint_key": None,
    "components": [],
    "waits": [],
    "evals": [],
}
"""The answer to GET /v1/run."""


def run_info(**changes: Any) -> RunInfo:
    return RunInfo.model_validate({**RUN_INFO, **changes})


def searcher(name: str, version: str, *, alive: bool = True) -> ComponentInfo:
    return ComponentInfo(
        component_id=name,
        kind="searcher",
        state="generating",
        version=version,
        alive=alive,
        heartbeat_age_s=1.0,
        gauges={},
    )


def entry(step: int, *, lineage: int = 1, at_s: float, wait_s: float = WAIT_S, abandoned: bool = False) -> LedgerEntry:
    """Return a ledger entry of a trainer that has trained since t = 0 s; its waits total 50 s + `WAIT_S` per step."""
    return LedgerEntry(
        lineage=lineage,
        step=step,
        batch_id=f"b-{lineage}-{step}",
        acked_at_s=at_s,
        num_rollouts=8,
        rollout_ids=[],
        metrics={
            "step_s": STEP_S,
            "wait_s": wait_s,
            "waited_s_total": 50.0 + step * WAIT_S,
            "train_s": at_s,
            "reward_mean": 0.5,
            "accuracy": 0.5,
        },
        abandoned=abandoned,
    )


def evaluation(version: str, accuracy: float | None, state: str = "done", num_prompts: int = 512) -> EvalInfo:
    return EvalInfo.model_validate(
        {
            "eval_id": f"e-{version}-{num_prompts}",
            "version": version,
            "state": state,
            "num_prompts": num_prompts,
            "num_done": num_prompts,
            "accuracy": accuracy,
            "greedy_accuracy": None if accuracy is None else accuracy + 0.05,
            "created_at_s": 0.0,
        }
    )


def stats() -> Stats:
    numbers = {name: 0 for name, field in Stats.model_fields.items() if field.annotation is int}
    maps = {name: {} for name in ("pushed", "refused", "evicted", "leases", "slots")}
    known = {
        "run": "demo",
        "rollouts_generated": 1000,
        "rollouts_drawn": 0,
        "rollouts_trained": 2000,
        "samples_per_insert": 2.0,
        "realised_most_on_policy": 0.5,
        "mean_reward_recent": None,
        "slots": {"recent": 60, "replay": 40, "fallback": 5},
        "policy_age_histogram": {0: 30, 10: 10},
    }
    return Stats.model_validate(numbers | maps | known)


def history(**changes: object) -> History:
    """Return a run of ten steps, one per second from t = 101 s; services started at t = 90 s, step 1 waited 3 s."""
    steps = [entry(1, at_s=101.0, wait_s=3.0), *(entry(step, at_s=100.0 + step) for step in range(2, 11))]
    base: dict[str, Any] = {
        "seed": 3,
        "num_steps": 10,
        "sync_interval_steps": 2,
        "ledger": steps,
        "stats": stats(),
        "timing": Timing(starts=(90.0,), warm_start_s=12.0),
    }
    evals = [evaluation("0-0", 0.3), evaluation("1-4", 0.5, num_prompts=64), evaluation("1-10", 0.7)]
    info = {**RUN_INFO, "state": "done", "step": 10, "parents": {1: "0-0"}, "evals": evals}
    info |= {name: value for name, value in changes.items() if name not in History.model_fields}
    own = {name: value for name, value in changes.items() if name in History.model_fields}
    return History.model_validate({**base, "info": info, **own})
