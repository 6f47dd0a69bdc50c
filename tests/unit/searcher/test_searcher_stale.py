"""Which requests in flight are too old: their begin counts, not their submission, and never an evaluation's."""

from __future__ import annotations

import pytest
from tba_searcher.engines.engine import Request
from tba_searcher.generation.engine_thread import StepResult
from tba_searcher.generation.stale_requests import StaleRequests
from tba_searcher.generation.visits import Visit, WorkQueue

from tba.api import Lease, Prompt
from tba.config import Recipe, parse_recipe
from tba.errors import ConfigError
from tba.versions import PolicyVersion

V4, V8, V12 = (PolicyVersion(1, step) for step in (4, 8, 12))


def make_recipe(max_age_steps: int | None = 4, *, abort: bool = True, lag_steps: int = 0) -> Recipe:
    return parse_recipe(
        {
            "run": {"name": "r"},
            "model": {"path": "m"},
            "data": {"generator": "addition"},
            "buffer": {"max_policy_age_steps": max_age_steps},
            "searcher": {"abort_stale_requests": abort},
            "sampling": {"lag_steps": lag_steps},
            "trainer": {"sync_interval": 4},
        },
        where="test",
    )


def add_visit(queue: WorkQueue, name: str, pinned: PolicyVersion | None = None) -> list[Request]:
    """Queue a visit of two rollouts; return its requests as the engine gets them."""
    lease = Lease(
        lease_id=name,
        kind="train" if pinned is None else "sample",
        visit_id=f"visit-{name}",
        prompt=Prompt(prompt_id="p", task="addition", text="1+1="),
        num_rollouts=2,
        temperature=1.0,
        expires_in_s=60,
    )
    queue.add(Visit(lease=lease, prompt_tokens=(5, 6), pinned=pinned))
    return queue.take_requests(2, pinned=pinned)


def make(recipe: Recipe) -> tuple[StaleRequests, WorkQueue]:
    queue = WorkQueue(recipe.searcher, run_seed=0, eos_ids=(1,))
    return StaleRequests(recipe, queue), queue


def stale_names(stale: StaleRequests, newest: PolicyVersion) -> list[str]:
    return [visit.lease.lease_id for visit in stale.visits(newest)]


def test_a_request_is_stale_when_it_began_more_steps_ago_than_the_buffer_allows() -> None:
    stale, queue = make(make_recipe())
    stale.submit(add_visit(queue, "a"))
    stale.after_step(StepResult(), V4, 0)
    stale.submit(add_visit(queue, "b"))
    # weights that change in flight give later tokens a new span, and leave the age of the first ones
    stale.after_step(StepResult(), V8, 0)
    assert stale_names(stale, V8) == []
    assert stale_names(stale, V12) == ["a"]
    assert stale_names(stale, PolicyVersion(1, 13)) == ["a", "b"]


def test_with_a_lag_the_trainer_is_ahead_of_the_newest_version_that_searchers_know() -> None:
    stale, queue = make(make_recipe(12, lag_steps=8))
    stale.submit(add_visit(queue, "a"))
    stale.after_step(StepResult(), V4, 0)
    assert stale_names(stale, V4) == stale_names(stale, V8) == stale_names(stale, PolicyVersion(2, 12)) == []
    assert stale_names(stale, PolicyVersion(1, 9)) == ["a"]


def test_a_request_that_waits_for_a_slot_begins_with_the_weights_of_that_moment() -> None:
    stale, queue = make(make_recipe())
    stale.submit([*add_visit(queue, "a"), *add_visit(queue, "b")])
    stale.after_step(StepResult(), V4, 2)
    assert stale_names(stale, V12) == ["a"]
    stale.after_step(StepResult(), V12, 0)
    assert stale_names(stale, V12) == ["a"]
    assert stale_names(stale, PolicyVersion(1, 17)) == ["a", "b"]


def test_what_has_ended_is_not_stale() -> None:
    stale, queue = make(make_recipe())
    first, second = add_visit(queue, "a")
    stale.submit([first, second])
    stale.after_step(StepResult(), V4, 0)
    stale.end([first.request_id])
    assert stale_names(stale, V12) == ["a"]
    stale.end([second.request_id])
    assert stale_names(stale, V12) == []


def test_an_evaluation_is_never_stale() -> None:
    stale, queue = make(make_recipe())
    stale.submit(add_visit(queue, "a", pinned=V4))
    stale.after_step(StepResult(), V4, 0)
    assert stale_names(stale, PolicyVersion(1, 1000)) == []


def test_a_new_lineage_that_resumed_earlier_makes_nothing_stale() -> None:
    stale, queue = make(make_recipe())
    stale.submit(add_visit(queue, "a"))
    stale.after_step(StepResult(), PolicyVersion(1, 100), 0)
    assert stale_names(stale, PolicyVersion(2, 60)) == []


def test_it_is_off_by_default_and_needs_a_limit() -> None:
    stale, queue = make(make_recipe(abort=False))
    stale.submit(add_visit(queue, "a"))
    stale.after_step(StepResult(), V4, 0)
    assert stale_names(stale, PolicyVersion(1, 1000)) == []
    with pytest.raises(ConfigError, match=r"older than buffer\.max_policy_age_steps, which is not set"):
        make_recipe(None)
