"""Two evaluations of the same prompts side by side: each prompt with both answers, and what changed in numbers.

completions.jsonl of A --.
                          compare --> AnswerComparison --> lines for people, or JSON
completions.jsonl of B --'
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tba.api import Prompt
from tba.config.evaluation import EvalSection, Mode
from tba.evaluation.evaluation_job import Estimate
from tba.evaluation.statistics import mean_of_prompts
from tba.fields import StrictModel, escape_controls
from tba_cli.console import known

TEXT_CHARS = 400
"""Most characters of a text in the printed lines; the JSON document has the whole text."""
Line = dict[str, Any]


class Answer(StrictModel):
    """The first completion of a prompt."""

    text: str
    rewards: dict[str, float | None]
    """Task -> reward; None: unknown."""
    unknown: dict[str, str]
    """Task -> why its reward is unknown."""


class AnswerPair(StrictModel):
    """One prompt with its answers under two versions. An answer is None if the engine refused the prompt."""

    prompt_id: str
    prompt: str
    gold: dict[str, Any]
    """Data of the prompt for its scorer."""
    before: Answer | None
    after: Answer | None


class Difference(StrictModel):
    """A mean over prompts under two versions, and the mean difference per prompt."""

    task: str
    what: str
    before: Estimate
    after: Estimate
    difference: Estimate
    """The mean difference over the prompts with a known score under both versions."""
    num_better: int
    num_worse: int
    num_same: int
    num_unknown: int
    """Prompts without a known score under at least one version."""


class AnswerComparison(StrictModel):
    """The result of `tba evaluate --compare`. Pairs that got worse come first, unchanged pairs last."""

    run: str
    versions: tuple[str, str]
    mode: Mode
    differences: list[Difference]
    num_changed: int
    """Pairs with another reward or text."""
    pairs: list[AnswerPair]


def compare(
    section: EvalSection, prompts: Sequence[Prompt], folders: tuple[Path, Path], *, run: str, versions: tuple[str, str]
) -> AnswerComparison:
    """Compare two finished evaluations of these prompts: their greedy completions, else all samples of each prompt."""
    mode: Mode = "greedy" if section.published.greedy else "sampled"
    before, after = dict[str, list[Line]](), dict[str, list[Line]]()
    for folder, found in zip(folders, (before, after), strict=True):
        # binary: a line ends at a line feed alone, and texts may hold other separators
        with (folder / "completions.jsonl").open("rb") as file:
            for line in map(json.loads, file):
                if line["mode"] == mode:
                    found.setdefault(line["prompt_id"], []).append(line)
    pairs = [
        AnswerPair(
            prompt_id=prompt.prompt_id,
            prompt=prompt.text,
            gold=prompt.data,
            before=_first(before.get(prompt.prompt_id, [])),
            after=_first(after.get(prompt.prompt_id, [])),
        )
        for prompt in prompts
    ]
    tasks_of = {prompt.prompt_id: section.published.tasks or [prompt.task] for prompt in prompts}
    tasks = dict.fromkeys(task for tasks in tasks_of.values() for task in tasks)
    differences = []
    for task in tasks:
        rewards = [
            tuple(
                [line["scores"][task] for line in lines.get(prompt_id, []) if line["scores"][task] is not None]
                for lines in (before, after)
            )
            for prompt_id, tasks in tasks_of.items()
            if task in tasks
        ]
        successes = [
            tuple([float(section.succeeds(task, reward)) for reward in part] for part in pair) for pair in rewards
        ]
        differences.append(_difference(task, f"success rate ({section.success_rule(task)})", successes))
        if rewards != successes:
            differences.append(_difference(task, "mean reward", rewards))
    return AnswerComparison(
        run=run,
        versions=versions,
        mode=mode,
        differences=differences,
        num_changed=sum(pair.before != pair.after for pair in pairs),
        # the sort is stable: equal ones stay in the order of the prompts
        pairs=sorted(pairs, key=_rank),
    )


def _first(lines: Sequence[Line]) -> Answer | None:
    if not lines:
        return None
    return Answer(text=lines[0]["text"], rewards=lines[0]["scores"], unknown=lines[0]["unknown"])


def _rank(pair: AnswerPair) -> tuple[bool, float]:
    """Return the sort key of a pair: changed pairs come first, by their change of reward; unchanged pairs follow."""
    before, after = (list(answer.rewards.values()) if answer else [None] for answer in (pair.before, pair.after))
    is_known = None not in before and None not in after
    return pair.before == pair.after, sum(filter(None, after)) - sum(filter(None, before)) if is_known else 0.0


def _difference(task: str, what: str, values: Sequence[tuple[list[float], ...]]) -> Difference:
    changes = [sum(after) / len(after) - sum(before) / len(before) for before, after in values if before and after]
    return Difference(
        task=task,
        what=what,
        before=mean_of_prompts([before for before, _ in values]),
        after=mean_of_prompts([after for _, after in values]),
        difference=mean_of_prompts([[change] for change in changes]),
        num_better=sum(change > 0 for change in changes),
        num_worse=sum(change < 0 for change in changes),
        num_same=changes.count(0.0),
        num_unknown=len(values) - len(changes),
    )


def comparison_lines(comparison: AnswerComparison, *, limit: int) -> list[str]:
    """Return three lines for each of the first `limit` pairs, a line of counts, and a line for each difference."""
    before, after = comparison.versions
    width, lines = max(len(before), len(after)), []
    for pair in comparison.pairs[:limit]:
        lines.append(f"{pair.prompt_id}: {_shortened(pair.prompt)}{f'  gold data {pair.gold}' if pair.gold else ''}")
        lines.append(f"  {before:<{width}}  {_answer_text(pair.before)}")
        lines.append(f"  {after:<{width}}  {_answer_text(pair.after)}")
    lines.append(
        f"{comparison.mode} answers of {before} and {after} to {len(comparison.pairs)} held-out prompts: "
        f"{comparison.num_changed} changed, {min(limit, len(comparison.pairs))} are shown (--limit)"
    )
    for found in comparison.differences:
        stderr, values = found.difference.stderr, (found.before.value, found.after.value)
        error = "" if stderr is None else f" ± {stderr:.4f} (standard error, paired)"
        unknown = f", {found.num_unknown} unknown" if found.num_unknown else ""
        lines.append(
            f"{found.task}: {found.what} {' -> '.join(known(value, '.4f') for value in values)}, difference "
            f"{known(found.difference.value, '+.4f')}{error}; {found.num_better} prompts better, "
            f"{found.num_worse} worse, {found.num_same} the same{unknown}"
        )
    return list(map(escape_controls, lines))


def _answer_text(answer: Answer | None) -> str:
    if answer is None:
        return "no answer: the engine refused the prompt"
    rewards = {
        task: f"unknown ({answer.unknown.get(task)})" if reward is None else f"{reward:.4g}"
        for task, reward in answer.rewards.items()
    }
    if len(rewards) == 1:
        return f"reward {next(iter(rewards.values()))}: {_shortened(answer.text)}"
    return f"rewards {', '.join(f'{task} {reward}' for task, reward in rewards.items())}: {_shortened(answer.text)}"


def _shortened(text: str) -> str:
    return repr(text[:TEXT_CHARS]) + (" ..." if len(text) > TEXT_CHARS else "")
