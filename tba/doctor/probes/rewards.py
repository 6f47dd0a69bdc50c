"""Whether the reward service scores every task of the prompts, and whether the run has prompts."""

from __future__ import annotations

from collections.abc import Iterator

from tba.api import RewardsReply, Stats
from tba.config import Recipe
from tba.doctor.finding import Finding, fail, ok, skip, warn
from tba.doctor.patient import Answer, Patient
from tba.doctor.probes.services import some_token

WELL = {"ok", "idle"}
"""`idle`: what nobody has asked for yet starts with its first item."""


def probe_rewards(patient: Patient) -> Iterator[Finding]:
    """Tasks and prompts."""
    token = some_token(patient)
    answer = patient.ask("reward", "/v1/rewards", token=token)
    if not isinstance(answer, Answer) or answer.status != 200:
        yield skip("reward-tasks", "the reward service does not say which tasks it scores")
    else:
        try:
            rewards = RewardsReply.model_validate_json(answer.body).rewards
        except ValueError:
            yield skip("reward-tasks", "the reward service's answer is not what this release expects")
            rewards = []
        known = {reward.task: reward.health for reward in rewards}
        for task in tasks_of(patient.recipe) if rewards else ():
            if task not in known:
                yield fail(
                    "reward-tasks",
                    f"no reward scores the task {task!r}; the service knows {', '.join(sorted(known))}",
                    f"give the recipe an entry reward.tasks.{task}, and restart the reward service with it",
                )
            elif not {part.rpartition(": ")[2] for part in known[task].split("; ")} <= WELL:
                yield warn("reward-tasks", f"task {task!r}: {known[task]}", "the log of the reward service says why")
            else:
                yield ok("reward-tasks", f"task {task!r} is scored")
    yield from _prompts(patient, token)


def tasks_of(recipe: Recipe) -> list[str]:
    """Tasks of the prompts, as far as the recipe alone says; those of a file are not read."""
    data = recipe.data
    if data.generator is not None:
        return [data.generator]
    return sorted({section.task for section in (data.train, data.heldout) if section is not None})


def _prompts(patient: Patient, token: str | None) -> Iterator[Finding]:
    answer = patient.ask("buffer", "/v1/stats", token=token)
    if not isinstance(answer, Answer) or answer.status != 200:
        return
    try:
        stats = Stats.model_validate_json(answer.body)
    except ValueError:
        return
    num_train, num_heldout = stats.num_prompts_train, stats.num_prompts_heldout
    text = f"the run has {num_train} prompts to train on and {num_heldout} held out"
    if num_train and num_heldout:
        yield ok("prompts", text)
    else:
        yield warn("prompts", text, "run `tba setup`, or `tba prompts upload`: nothing is generated without prompts")
