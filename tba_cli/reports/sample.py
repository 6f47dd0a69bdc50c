"""What answers say of a recipe: those of `tba config check --sample`, or of the first batch of `tba run`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from tba.api import LedgerEntry, RolloutInfo
from tba.clients import BufferClient
from tba.config import Recipe
from tba.errors import NotFoundError
from tba.evaluation.evaluation_job import Estimate
from tba.evaluation.statistics import mean_of_prompts
from tba.fields import StrictModel, escape_controls
from tba_cli.console import known
from tba_cli.reports.ledger import ledger_lines

MOSTLY = 0.75
"""From this share of cut answers on, the length limit is too low."""
MAX_READ = 512
"""About the most rollouts of the first batch that are read, as each takes a request."""


class SampledAnswer(StrictModel):
    """One answer to a training prompt; the names are those of `RolloutInfo`."""

    task: str
    prompt_id: str
    prompt_text: str
    num_response_tokens: int
    response_text: str
    finish_reason: str
    reward: float | None
    reward_reason: str | None
    """Why the reward is unknown."""


Groups = Sequence[Sequence[SampledAnswer | RolloutInfo]]
"""Answers to a prompt that are compared with each other; no group is empty."""


class TaskSample(StrictModel):
    """Numbers of the answers to the prompts of one task."""

    task: str
    num_prompts: int
    num_answers: int
    num_cut: int
    mean_response_tokens: float
    mean_reward: Estimate
    reward_range: tuple[float, float] | None
    """The lowest and the highest reward; None: all are unknown."""
    num_groups: int
    """Groups with at least two known rewards; `num_equal` of them have equal ones."""
    num_equal: int
    unknown: dict[str, int]
    """Reason -> number of unknown rewards."""

    def line(self, recipe: Recipe) -> str:
        """Return the numbers as text."""
        facts = [f"{self.num_answers} answers to {self.num_prompts} prompts of task {self.task!r}"]
        error = "" if self.mean_reward.stderr is None else f" ± {self.mean_reward.stderr:.2g}"
        facts.append(f"mean reward {known(self.mean_reward.value, '.3g')}{error}")
        if self.num_groups:
            facts.append(f"{self.num_equal} of {self.num_groups} groups without a difference")
        facts.append(f"{self.num_cut} of {self.num_answers} cut at {recipe.searcher.max_response_tokens} tokens")
        facts.append(f"{self.mean_response_tokens:.3g} tokens on average")
        return ", ".join([*facts, *(f"{num} unknown rewards ({reason})" for reason, num in self.unknown.items())])

    def advice(self, recipe: Recipe) -> tuple[str, str] | None:
        """Return what keeps a run from learning, and the remedy; None: these numbers show nothing."""
        num, key = self.num_answers, "searcher.max_response_tokens"
        if self.reward_range is None:
            return f"no answer has a reward: {', '.join(self.unknown)}", "docs/rewards.md says what a reason means"
        if self.num_cut >= MOSTLY * num:
            found = f"{self.num_cut} of {num} answers are cut at {key} ({recipe.searcher.max_response_tokens})"
            return found, f"raise {key}, unless answers of a fixed length are wanted"
        if self.num_equal < max(1, self.num_groups):
            return None
        low, high = self.reward_range
        rewards = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        if recipe.eval.succeeds(self.task, low):
            return f"all {num} answers succeed (reward {rewards}): it is solved already", "take harder prompts"
        return (
            f"in all {self.num_groups} groups the answers have the same reward ({rewards}): there is nothing to learn",
            "take easier prompts, a scorer that gives part credit, or another starting model",
        )


def task_samples(groups: Groups) -> list[TaskSample]:
    """Return the numbers of each task."""
    found = []
    for task in dict.fromkeys(group[0].task for group in groups):
        parts = [group for group in groups if group[0].task == task]
        answers = [answer for part in parts for answer in part]
        rewards = [[answer.reward for answer in part if answer.reward is not None] for part in parts]
        flat, compared = sorted(each for part in rewards for each in part), [part for part in rewards if len(part) > 1]
        found.append(
            TaskSample(
                task=task,
                num_prompts=len({answer.prompt_id for answer in answers}),
                num_answers=len(answers),
                num_cut=sum(answer.finish_reason == "length" for answer in answers),
                mean_response_tokens=sum(answer.num_response_tokens for answer in answers) / len(answers),
                mean_reward=mean_of_prompts(rewards),
                reward_range=(flat[0], flat[-1]) if flat else None,
                num_groups=len(compared),
                num_equal=sum(len(set(part)) == 1 for part in compared),
                unknown=Counter(answer.reward_reason or "no reason" for answer in answers if answer.reward is None),
            )
        )
    return found


def best_and_worst(groups: Sequence[Sequence[SampledAnswer]]) -> dict[str, SampledAnswer]:
    """Return the answers with the highest and the lowest reward; with no reward at all, any two."""
    answers = [answer for group in groups for answer in group]
    ranked = sorted((one for one in answers if one.reward is not None), key=lambda one: one.reward or 0.0) or answers
    return {"best": ranked[-1], "worst": ranked[0]}


def answer_text(name: str, answer: SampledAnswer) -> str:
    """Return an answer and its prompt in full, as text that cannot steer a terminal."""
    reward = f"unknown ({answer.reward_reason})" if answer.reward is None else f"{answer.reward:.4g}"
    lines = [f"{name} answer: reward {reward}, {answer.num_response_tokens} tokens, {answer.finish_reason}"]
    for what, text in ((f"prompt {answer.prompt_id}", answer.prompt_text), ("answer", answer.response_text)):
        lines += [f"  {what}:", *(f"    | {line}" for line in text.split("\n"))]
    return "\n".join(map(escape_controls, lines))


def first_batch(client: BufferClient, *, group_size: int) -> Groups | None:
    """Return the answers in the first batch that a step trained on, by slot; None: there is no such batch yet."""
    batches = (line for line in ledger_lines(client) if isinstance(line, LedgerEntry) and line.skipped is None)
    if (batch := next(batches, None)) is None:
        return None
    ids, groups = batch.rollout_ids, []
    # the ledger lists them slot by slot
    for at in range(0, min(len(ids), MAX_READ), group_size):
        with suppress(NotFoundError):  # one was evicted meanwhile
            groups.append([client.get_rollout(rollout_id) for rollout_id in ids[at : at + group_size]])
    return groups
