"""Rollouts that are scored again, and the counts of a job that does so."""

from __future__ import annotations

import numpy as np
import pytest
from tba_buffer.scoring.rescore import add_chunk
from tba_buffer.scoring.rollout_scorer import ScoredRollout

from tba.api import RescoreInfo
from tests.support.buffer import make_rollout


def test_a_failed_rollout_has_no_reward_and_remembers_which_version_scored_it_last() -> None:
    failed = make_rollout(reward=1.0, reward_version="v1").with_failure("timeout: 5 s")
    assert (failed.reward, failed.reward_status, failed.reward_reason) == (None, "failed", "timeout: 5 s")
    assert failed.reward_version == "v1"
    assert make_rollout(reward=None).with_failure("x").reward_version is None
    again = failed.with_reward(2.0, "v2")
    assert (again.reward, again.reward_status, again.reward_reason, again.reward_version) == (2.0, "scored", None, "v2")


JOB = RescoreInfo(state="running", task=None, only="all", started_at_s=0.0, start_position=100, num_total=10)


def scored(position: int, before: float | None, after: float | None) -> ScoredRollout:
    rollout = make_rollout(reward=before)
    new = rollout.with_failure("timeout: x") if after is None else rollout.with_reward(after, "v2")
    return ScoredRollout(position, rollout, 100, new, b"")


def test_changes_failures_means_and_versions_add_up_over_chunks() -> None:
    first = [scored(3, 1.0, 1.0), scored(5, 0.0, 4.0), scored(9, None, 2.0)]
    job = add_chunk(JOB, first, np.array([3, 5, 9]), num_left=7)
    assert (job.position, job.num_done, job.num_changed, job.num_failed, job.num_gone) == (9, 3, 2, 0, 0)
    assert (job.num_known_before, job.num_known_after) == (2, 3)
    job = add_chunk(job, [scored(12, 4.0, None), scored(14, None, None)], np.array([11, 12, 14]), num_left=4)
    assert (job.position, job.num_done, job.num_changed, job.num_failed, job.num_gone) == (14, 5, 3, 2, 1)
    assert (job.num_known_before, job.num_known_after) == (3, 3)
    assert job.mean_reward_before == pytest.approx((1.0 + 0.0 + 4.0) / 3)
    assert (job.mean_reward_after, job.reward_versions) == (pytest.approx((1.0 + 4.0 + 2.0) / 3), {"v2": 3})


def test_a_chunk_of_which_nothing_is_left_moves_on() -> None:
    job = add_chunk(JOB, [], np.array([3, 5]), num_left=8)
    assert (job.position, job.num_done, job.num_gone, job.mean_reward_after) == (5, 0, 2, None)


def test_what_is_gone_without_having_been_taken_is_counted_at_the_end() -> None:
    job = add_chunk(JOB, [], np.array([], dtype=np.int64), num_left=0)
    assert (job.position, job.num_gone) == (0, 10)
