"""Eight simulated searchers against real services: joins, leaves and preemptions lose and double nothing.

benchmarks/scale.py runs the same with hundreds.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest

from benchmarks.scale_bench.plan import Plan
from benchmarks.scale_bench.searchers import Evidence, run_searchers, sections
from benchmarks.scale_bench.verdict import figures, violations
from tba.wire import new_rollout_id

pytestmark = pytest.mark.nightly
PLAN = Plan(num_searchers=8, duration_s=6.0, leave_share=0.25, vanish_share=0.25, replace_after_s=1.0)


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    recipe = sections(num_slots=4, buffer={"lease_s": 2.0}, searcher={"max_response_tokens": 16})
    folder = tmp_path_factory.mktemp("searchers")
    return run_searchers(folder, PLAN, num_hosts=1, recipe=recipe, sync_interval=2, min_rollouts=200, min_evals=1)


def test_nothing_is_lost_doubled_or_left_behind(evidence: Evidence) -> None:
    assert violations(evidence) == []


def test_the_searchers_follow_the_plan(evidence: Evidence) -> None:
    numbers = figures(evidence)
    exact = {"searchers_ever": 12, "vanished": 2, "drained": 10, "pending_at_the_end": 0}
    assert {name: numbers[name] for name in exact} == exact
    at_least = {"stored": 200, "versions": 3, "evaluations_done": 1}
    assert [name for name, least in at_least.items() if numbers[name] < least] == []
    assert numbers["weight_loads"] > 12, "no searcher took a new version in flight"
    assert evidence.seen.num_looks >= 3
    assert numbers["push_p99_ms"] >= numbers["push_p50_ms"] > 0


def test_the_verdict_notices_what_is_lost_and_what_is_stored_twice(evidence: Evidence) -> None:
    lost = dict(evidence.stored)
    teller, lost_id = next((i, name) for i, report in enumerate(evidence.reports) for name in report["acknowledged"])
    del lost[lost_id]
    found = violations(dataclasses.replace(evidence, stored=lost))
    assert any(f"1 acknowledged rollouts are not stored, for example {lost_id}" in sentence for sentence in found)
    assert any("rollouts and 0 to be leased" in sentence for sentence in found)

    stranger = {**evidence.stored, new_rollout_id().hex(): evidence.stored[lost_id]}
    found = violations(dataclasses.replace(evidence, stored=stranger))
    assert any("1 stored rollouts were pushed by nobody" in sentence for sentence in found)

    reports = copy.deepcopy(evidence.reports)
    reports[teller - 1]["acknowledged"][lost_id] = "duplicate"
    found = violations(dataclasses.replace(evidence, reports=reports))
    assert any("1 rollouts were acknowledged to two searchers" in sentence for sentence in found)
