"""Check a run of simulated searchers after its end, and compute its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tba_searcher.engines.simulated import TOKENS_PER_S

from benchmarks.scale_bench.searchers import Evidence

MIN_LIFE_SHARE = 0.5
"""Searchers that lived for so much of the run are compared for fairness."""


def violations(evidence: Evidence) -> list[str]:
    """Sentences about what is not as it must be; none: all is well."""
    checks = (_rollouts, _visits, _leases, _members, _evals, _seen)
    found = [sentence for check in checks for sentence in check(evidence)]
    if evidence.trainer_error is not None:
        found.append(f"the pretend trainer failed: {evidence.trainer_error}")
    return found


def figures(evidence: Evidence) -> dict[str, float]:
    """Compute the figures of the run."""
    reports, section = evidence.reports, evidence.recipe.searcher
    push_ms = sorted(1000 * seconds for report in reports for seconds in report["push_s"])
    num_tokens = sum(report["counts"].get("generated_tokens", 0) for report in reports)
    possible = sum(report["lived_s"] for report in reports) * section.num_slots * TOKENS_PER_S
    per_visit = Counter(rollout.visit_id for rollout in evidence.stored.values())
    extra = sum(max(0, num - evidence.recipe.sampling.rollouts_per_visit) for num in per_visit.values())
    return {
        "searchers_at_once": float(evidence.seen.most_alive),
        "searchers_ever": float(len(reports)),
        "drained": float(sum(report["how_it_ended"] == "drained" for report in reports)),
        "vanished": float(sum(report["how_it_ended"] == "vanished" for report in reports)),
        "stored": float(len(evidence.stored)),
        "rollouts_per_s": len(evidence.stored) / evidence.work_s,
        "tokens_per_s": num_tokens / evidence.work_s,
        "share_of_possible_tokens": num_tokens / possible,
        "pushes": float(len(push_ms)),
        "push_p50_ms": percentile(push_ms, 0.5),
        "push_p90_ms": percentile(push_ms, 0.9),
        "push_p99_ms": percentile(push_ms, 0.99),
        "push_max_ms": percentile(push_ms, 1.0),
        "lease_fairness": fairness(_visits_per_s(evidence)),
        "lease_min_to_mean": _min_to_mean(_visits_per_s(evidence)),
        "rollouts_beyond_their_visit": float(extra),
        "leases_expired": float(evidence.stats.leases["expired"]),
        "pending_at_the_end": float(evidence.stats.num_pending),
        "weight_loads": float(sum(report["counts"].get("weight_loads", 0) for report in reports)),
        "evaluations_done": float(sum(info.state == "done" for info in evidence.evals)),
        "versions": float(evidence.num_versions),
        "steps": float(evidence.num_steps),
        "work_s": evidence.work_s,
    }


def percentile(values: list[float], share: float) -> float:
    """Return a percentile of sorted values, by nearest rank; NaN if there are none."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def fairness(rates: list[float]) -> float:
    """Jain's index: 1 when all are equal, 1/n when one has everything; NaN for none."""
    squares = len(rates) * sum(rate * rate for rate in rates)
    return sum(rates) ** 2 / squares if squares else float("nan")


def _visits_per_s(evidence: Evidence) -> list[float]:
    """Training visits per second that each searcher was granted, of those that lived long enough."""
    least_s = MIN_LIFE_SHARE * evidence.work_s
    return [report["num_visits"] / report["lived_s"] for report in evidence.reports if report["lived_s"] >= least_s]


def _min_to_mean(rates: list[float]) -> float:
    return min(rates) * len(rates) / sum(rates) if rates and sum(rates) else float("nan")


def _rollouts(evidence: Evidence) -> Iterator[str]:
    """Acknowledged is stored, once; stored is acknowledged, or was on the wire when its searcher vanished."""
    acknowledged: Counter[str] = Counter()
    unanswered: set[str] = set()
    for report in evidence.reports:
        refused = [rollout_id for rollout_id, outcome in report["acknowledged"].items() if outcome == "refused"]
        if refused:
            yield f"{report['searcher_id']}: {len(refused)} rollouts were refused"
        acknowledged.update(report["acknowledged"].keys())
        unanswered.update(report["unanswered"])
        if report["unanswered"] and report["how_it_ended"] != "vanished":
            yield f"{report['searcher_id']} has {len(report['unanswered'])} rollouts without an answer"
    stats, stored = evidence.stats, evidence.stored.keys()
    if sum(stats.evicted.values()):
        yield f"{sum(stats.evicted.values())} rollouts were evicted: the buffer is too small for this run"
    if lost := acknowledged.keys() - stored:
        yield f"{len(lost)} acknowledged rollouts are not stored, for example {min(lost)}"
    if doubled := [rollout_id for rollout_id, num in acknowledged.items() if num > 1]:
        yield f"{len(doubled)} rollouts were acknowledged to two searchers, for example {min(doubled)}"
    if strangers := stored - acknowledged.keys() - unanswered:
        yield f"{len(strangers)} stored rollouts were pushed by nobody who knows of it, for example {min(strangers)}"
    if not stats.num_rollouts == stats.pushed["new"] == stats.rollouts_generated == len(stored):
        yield (
            f"the buffer counts {stats.num_rollouts} rollouts and {stats.pushed['new']} new ones, "
            f"Redis holds {len(stored)}"
        )


def _visits(evidence: Evidence) -> Iterator[str]:
    """Every rollout of every visit is stored or still to be leased."""
    wanted = evidence.recipe.sampling.rollouts_per_visit
    per_visit = Counter(rollout.visit_id for rollout in evidence.stored.values())
    for visit_id in per_visit.keys() | evidence.unfinished.keys():
        num, missing = per_visit[visit_id], evidence.unfinished.get(visit_id, {"n": 0})["n"]
        if num + missing < wanted or (missing and num + missing > wanted):
            yield f"visit {visit_id} has {num} rollouts and {missing} to be leased, of {wanted}"


def _leases(evidence: Evidence) -> Iterator[str]:
    """All leases have come back, and what they owed waits to be leased again."""
    leases = evidence.stats.leases
    if leases["open"]:
        yield f"{leases['open']} leases never came back"
    if evidence.inflight:
        yield f"the counter of rollouts on lease is {evidence.inflight}, and no lease is open"
    ended = sum(leases[how] for how in ("fulfilled", "expired", "returned", "refused"))
    if leases["granted"] > ended + leases["open"]:
        yield f"of {leases['granted']} leases, {ended} ended"
    waiting = Counter(evidence.returned)
    for visit_id, visit in evidence.unfinished.items():
        if visit["l"]:
            yield f"visit {visit_id} belongs to lease {visit['l']}, which is gone"
        if not waiting[visit_id]:
            yield f"visit {visit_id} is not complete, and nobody will be asked for it again"


def _members(evidence: Evidence) -> Iterator[str]:
    """Check that searchers that drained left nothing behind."""
    for report in evidence.reports:
        name, counts = report["searcher_id"], report["counts"]
        if report["how_it_ended"] not in ("drained", "vanished"):
            yield f"{name} ended otherwise ({report['how_it_ended']}): {report['error']}"
        if report["how_it_ended"] != "drained":
            continue
        if report["num_unpushed"]:
            yield f"{name} drained and kept {report['num_unpushed']} rollouts"
        made, pushed = counts.get("rollouts_generated", 0), counts.get("rollouts_pushed", 0)
        reported = counts.get("evals_reported", 0)  # of one completion each
        if made != pushed + counts.get("rollouts_duplicate", 0) + reported:
            yield f"{name} made {made} responses, pushed {pushed} and reported {reported}"


def _evals(evidence: Evidence) -> Iterator[str]:
    """Evaluations are done, or would be if searchers were there."""
    for info in evidence.evals:
        if info.state == "expired" or (info.state == "done" and info.num_unknown):
            yield f"evaluation {info.eval_id} of {info.version} is {info.state} with {info.num_unknown} unknown scores"


def _seen(evidence: Evidence) -> Iterator[str]:
    """Check the findings of the watch."""
    seen = evidence.seen
    wrong = {"waited beyond the deadline": seen.overdue, "stood still without a wait": seen.standing_still}
    for what, names in wrong.items():
        if names:
            yield f"{len(names)} times a searcher {what}, for example {names[0]}"
    if not seen.num_looks:
        yield "nobody looked at the run"
    if seen.most_alive < evidence.plan.num_searchers:
        yield f"at most {seen.most_alive} searchers were there at once, of {evidence.plan.num_searchers}"
