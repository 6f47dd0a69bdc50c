"""summary.json: the run in numbers, a pure function of its history.

How the numbers are measured:
    train_s             per lineage from the first batch request to the last ack, added up; evaluations after the last
                        step are outside
    first_step_s        from the first start of the services to the first ack
    trainer_wait_share  seconds that the trainer spent in named waits / seconds of training, after the first two sync
                        intervals of each lineage; both are differences of counters in the ledger (`waited_s_total`,
                        `train_s`), so that waits before refused acks and for the store are in it
    start, final        the evaluations of the first version (the starting model; a fork: the version that it began
                        with) and of the last version (of the last lineage; if that made no step, of its parent);
                        None if unfinished
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tba.api import EvalInfo, LedgerEntry
from tba.versions import START, PolicyVersion
from tba_cli.reports.history import History
from tba_cli.reports.ledger import active_entries, ledger_violations, lineage_tree

WARM_UP_SYNC_INTERVALS = 2


def summarise(history: History) -> dict[str, Any]:
    """Return the content of summary.json; None stands for unknown."""
    info = history.info
    tree = lineage_tree(info.parents)
    active = active_entries(history.ledger, tree, lineage=info.lineage, step=info.step)
    if info.origin is None or info.origin.version is None:
        starts = eval_of(history, START)
    else:
        # a fork publishes its version under the name of its own lineage: the first, or the next that got so far
        step, origin = PolicyVersion.parse(info.origin.version).step, info.origin
        own = sorted(n for n, parent in info.parents.items() if n > origin.lineage and parent == origin.version)
        starts = next(filter(None, (eval_of(history, PolicyVersion(number, step)) for number in own)), None)
    # a lineage that resumed at the last step publishes and evaluates its parent's weights under its own name
    final = eval_of(history, PolicyVersion(info.lineage, info.step))
    if final is None and active:
        final = eval_of(history, PolicyVersion(active[-1].lineage, active[-1].step))
    elif final is None and info.step == 0:
        final = eval_of(history, START)
    gain = None
    if starts and final and starts.accuracy is not None and final.accuracy is not None:
        gain = final.accuracy - starts.accuracy
    stats, batches, ages = history.stats, history.batches, history.stats.policy_age_histogram
    clipped = [value for entry in active if (value := entry.metrics.get("grad_clipped")) is not None]
    num_aged, first_step_s = sum(ages.values()), None
    if batches and history.timing.starts:
        first_step_s = min(entry.acked_at_s for entry in batches) - history.timing.starts[0]
    return {
        "run": info.run,
        "seed": history.seed,
        "state": info.state,
        "state_reason": info.state_reason,
        "start_accuracy": starts and starts.accuracy,
        "final_accuracy": final and final.accuracy,
        "gain": gain,
        "start_greedy": starts and starts.greedy_accuracy,
        "final_greedy": final and final.greedy_accuracy,
        "start_mean_reward": starts and starts.mean_reward,
        "final_mean_reward": final and final.mean_reward,
        "num_heldout_prompts": final and final.num_prompts,
        "num_unknown_scores": final and final.num_unknown,
        "summary": history.summary and history.summary.model_dump(),
        "rollouts_failed": stats.num_failed,
        "failed_reasons": [item.model_dump() for item in stats.failed_reasons],
        "best_version": info.best and info.best.version,
        "best_metric": info.best and info.best.metric,
        "best_value": info.best and info.best.value,
        "not_evaluated": "the run had no searchers (searcher.num_searchers = 0)" if history.is_offline else None,
        "began_with": info.origin and info.origin.source,
        "forked_from": info.origin and info.origin.version,
        "steps": info.step,
        "num_steps": history.num_steps,
        "settings_changed": len(history.settings.changes) if history.settings else 0,
        # near 1, every step is a normalised one
        "clipped_steps_share": sum(clipped) / len(clipped) if clipped else None,
        "steps_skipped": sum(entry.skipped is not None for entry in active),
        "rollouts_refused_by_trainer": sum(stats.rollouts_refused_by_trainer.values()),
        "train_s": train_s(batches),
        "first_step_s": first_step_s,
        "warm_start_s": history.timing.warm_start_s,
        "trainer_wait_share": trainer_wait_share(batches, history.sync_interval_steps),
        "rollouts_generated": stats.rollouts_generated,
        "rollouts_trained": stats.rollouts_trained,
        "tokens": stats.tokens and stats.tokens.model_dump(),
        "component_seconds": stats.component_seconds,
        "samples_per_insert": stats.samples_per_insert,
        "realised_most_on_policy": stats.realised_most_on_policy,
        "policy_age_histogram": {str(age): count for age, count in sorted(ages.items())},
        "mean_policy_age": sum(age * num for age, num in ages.items()) / num_aged if num_aged else None,
        "lineages": info.lineage,
        "ledger_violations": ledger_violations(
            history.ledger, tree, lineage=info.lineage, step=info.step, origin=info.origin
        ),
        "num_starts": len(history.timing.starts),
    }


def eval_of(history: History, version: PolicyVersion) -> EvalInfo | None:
    """Return the finished evaluation of a version, the one on most prompts if there are several."""
    found = [item for item in history.info.evals if item.state == "done" and item.version == str(version)]
    return max(found, key=lambda item: item.num_prompts, default=None)


def train_s(entries: Sequence[LedgerEntry]) -> float | None:
    """Return the seconds of training, per lineage from the first batch request to the last ack, abandoned steps too."""
    if not entries:
        return None
    total = 0.0
    for mine in _by_lineage(entries):
        first = mine[0]
        # the ledger holds when a step ended; how long it and its wait took is among its metrics
        took_s = (first.metrics.get("step_s") or 0.0) + (first.metrics.get("wait_s") or 0.0)
        total += mine[-1].acked_at_s - first.acked_at_s + took_s
    return total


def trainer_wait_share(entries: Sequence[LedgerEntry], sync_interval_steps: int) -> float | None:
    """Return the share of time that the trainer spent in waits after its warm-up; None if the warm-up never ended."""
    waited_s = passed_s = 0.0
    for mine in _by_lineage(entries):
        # the first batches wait for the first rollouts, which says nothing about the rest
        warm = mine[WARM_UP_SYNC_INTERVALS * sync_interval_steps - 1 :]
        if warm:
            waited_s += _grown(warm, "waited_s_total")
            passed_s += _grown(warm, "train_s")
    return waited_s / passed_s if passed_s > 0 else None


def _grown(entries: Sequence[LedgerEntry], counter: str) -> float:
    """Return by how much a counter in the metrics grew from the first entry to the last; 0 if this is unknown."""
    first, last = entries[0].metrics.get(counter), entries[-1].metrics.get(counter)
    return 0.0 if first is None or last is None else last - first


def _by_lineage(entries: Sequence[LedgerEntry]) -> list[list[LedgerEntry]]:
    """Return the entries of each lineage, by step."""
    lineages: dict[int, list[LedgerEntry]] = {}
    for entry in sorted(entries, key=lambda entry: (entry.lineage, entry.step)):
        lineages.setdefault(entry.lineage, []).append(entry)
    return list(lineages.values())
