"""What a chunk adds to the re-scoring job. Pure functions of the job and the chunk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tba.api import RescoreInfo
from tba_buffer.scoring import Positions, Scored


def progress(job: RescoreInfo, scored: Sequence[Scored], taken: Positions, *, num_left: int) -> RescoreInfo:
    """The job after one chunk: of the positions `taken`, those in `scored` are done, the others are gone."""
    before = [item.before.reward for item in scored if item.before.reward is not None]
    after = [item.after.reward for item in scored if item.after.reward is not None]
    versions = Counter(job.reward_versions)
    versions.update(item.after.reward_version or "" for item in scored if item.after.reward is not None)
    num_done = job.num_done + len(scored)
    return job.model_copy(
        update={
            "position": int(taken[-1]) if len(taken) else job.position,
            "num_done": num_done,
            "num_changed": job.num_changed + sum(item.before.reward != item.after.reward for item in scored),
            "num_failed": job.num_failed + len(scored) - len(after),
            "num_gone": job.num_total - num_done - num_left,
            "num_known_before": job.num_known_before + len(before),
            "num_known_after": job.num_known_after + len(after),
            "mean_reward_before": _mean(job.mean_reward_before, job.num_known_before, before),
            "mean_reward_after": _mean(job.mean_reward_after, job.num_known_after, after),
            "reward_versions": dict(versions),
        }
    )


def _mean(mean: float | None, num: int, more: Sequence[float]) -> float | None:
    return ((mean or 0.0) * num + sum(more)) / (num + len(more)) if num + len(more) else None


def what(job: RescoreInfo) -> str:
    """What a job scores again, in words."""
    status = "everything" if job.only == "all" else f"what is {job.only}"
    return status if job.task is None else f"{status} of task {job.task!r}"
