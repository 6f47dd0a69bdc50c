"""Computes the metrics and counts of evaluation.json from scored answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tba.config import Recipe
from tba.config.evaluation import Mode
from tba.evaluation.evaluation_job import Estimate, ModeReport, ScoreCounts
from tba.evaluation.statistics import mean_of_pairs, mean_of_prompts, success_rate
from tba_searcher.evaluation.answers import Answer, Answers, Score, modes_of, temperature_of
from tba_searcher.evaluation.perplexity import perplexities
from tba_searcher.generation.evaluation_results import Embedder, cosine_distances, distinct_share, without_end

Parts = Sequence[Sequence[Answer]]
NO_COMPLETION = Score(None, "no_completion")
"""The score of a prompt that the engine refused."""


class EvaluationMetrics:
    """All metrics of one evaluation, and the counts of each mode."""

    def __init__(self, recipe: Recipe, answers: Answers) -> None:
        self._recipe, self._answers, self._section = recipe, answers, recipe.eval.published
        self._prompts: dict[str, list[int]] = {}
        """Indices of the prompts that are scored under each task, tasks in the order of the recipe or the prompts."""
        for index in range(len(answers.prompts)):
            for task in answers.tasks_of(index, self._section):
                self._prompts.setdefault(task, []).append(index)
        self.by_name: dict[str, Estimate] = {}
        """Estimates by metric name, such as greedy.gsm8k.success_rate."""
        for mode in modes_of(self._section):
            self.by_name |= {f"{mode}.{name}": value for name, value in self._metrics(mode)}

    def report(self, mode: Mode) -> ModeReport:
        """Return the completion and score counts of a mode."""
        answers, counts = [answer for part in self._answers.of(mode) for answer in part], dict[str, ScoreCounts]()
        for task, prompts in self._prompts.items():
            scores = [score for part in self._of_task(mode, task, prompts) for score in part]
            wrong = Counter(score.reason or "no reason" for score in scores if score.is_wrong)
            unknown = Counter(score.reason or "no reason" for score in scores if score.value is None) - wrong
            counts[task] = ScoreCounts(
                reward_versions=sorted({score.reward_version for score in scores if score.reward_version is not None}),
                success=self._recipe.eval.success_rule(task),
                num_scored=len(scores) - unknown.total() - wrong.total(),
                num_unknown=unknown.total(),
                unknown=dict(unknown),
                wrong=dict(wrong),
            )
        return ModeReport(
            temperature=temperature_of(mode, self._recipe),
            num_completions=len(answers),
            finish_reasons=dict(Counter(answer.finish_reason for answer in answers)),
            scores=counts,
        )

    def _metrics(self, mode: Mode) -> Iterator[tuple[str, Estimate]]:
        parts = self._answers.of(mode)
        for task, indices in self._prompts.items():
            yield from self._of_scores(mode, task, indices)
            for key in self._section.by:
                # each value of a key of the prompts' data: numbers in their order, then texts
                groups: dict[str | float, list[int]] = {}
                for index in indices:
                    groups.setdefault(self._answers.prompts[index].data[key], []).append(index)
                for value in sorted(groups, key=lambda value: (isinstance(value, str), value)):
                    for name, estimate in self._of_scores(mode, task, groups[value]):
                        yield f"{name}[{key}={value}]", estimate
        if self._section.perplexity:
            for name, value in perplexities(parts, self._answers).items():
                yield f"perplexity.{name}", value
        if mode == "sampled" and self._section.num_samples > 1:
            folder = self._recipe.eval.embedding_model
            embedder = None if folder is None else Embedder(folder)
            found = dict[str, Estimate]()
            if embedder is not None:
                # The red-teaming task publishes the mean over all pairs of samples of a prompt, whether they succeed or
                # not (GFNOrg/red-teaming, eval.py). Successes under the first task are also taken alone: diverse
                # failures are worth nothing.
                successes = [
                    [each for each in part if self._succeeds(*next(iter(each.scores.items())))] for part in parts
                ]
                found["cosine_distance"] = _cosine_distance(parts, embedder)
                found["cosine_distance_of_successes"] = _cosine_distance(successes, embedder)
            found |= {f"distinct_{n}": _distinct(parts, n) for n in (1, 2, 3)}
            for name, value in found.items():
                yield f"diversity.{name}", value
        yield "mean_response_tokens", mean_of_prompts([[len(answer.tokens) for answer in part] for part in parts])
        finished = [[float(answer.finish_reason != "length") for answer in part] for part in parts]
        yield "finished_share", mean_of_prompts(finished)

    def _of_scores(self, mode: Mode, task: str, prompts: Sequence[int]) -> Iterator[tuple[str, Estimate]]:
        """Yield the names and estimates of mean reward and success rate of these prompts under a task."""
        scores = self._of_task(mode, task, prompts)
        known = [[score.value for score in part if score.value is not None] for part in scores]
        yield f"{task}.mean_reward", mean_of_prompts(known)
        # unknown scores stay unknown here, and bound the rate from both sides
        successes = [[self._succeeds(task, score) for score in part] for part in scores]
        yield f"{task}.success_rate", success_rate(successes)

    def _of_task(self, mode: Mode, task: str, prompts: Sequence[int]) -> list[list[Score]]:
        """Return the scores of these prompts under a task as [prompt][completion]; a refused prompt's are unknown."""
        num, parts = modes_of(self._section)[mode], self._answers.of(mode)
        return [[answer.scores[task] for answer in parts[index]] or [NO_COMPLETION] * num for index in prompts]

    def _succeeds(self, task: str, score: Score) -> bool | None:
        if score.value is None:
            return False if score.is_wrong else None
        return self._recipe.eval.succeeds(task, score.value)


def _distinct(parts: Parts, n: int) -> Estimate:
    """Return the mean share of distinct n-grams, over the prompts whose samples have any n-gram."""
    shares = [distinct_share([without_end(each.tokens, each.finish_reason) for each in part], n) for part in parts]
    known = [(share, len(part)) for share, part in zip(shares, parts, strict=True) if share is not None]
    found = mean_of_prompts([[share] for share, _ in known])
    return found.model_copy(update={"num_completions": sum(num for _, num in known)})


def _cosine_distance(parts: Parts, embedder: Embedder) -> Estimate:
    """Return the mean over prompts of the mean distance between samples; one prompt alone gets a jackknife error."""
    several = [part for part in parts if len(part) > 1]
    matrices = [cosine_distances(embedder.embed([answer.text for answer in part])).numpy() for part in several]
    pairs = [mean_of_pairs(matrix) for matrix in matrices]
    if len(pairs) == 1:
        value, stderr = pairs[0]
        return Estimate(value=value, stderr=stderr, num_prompts=1, num_completions=len(several[0]))
    found = mean_of_prompts([[value] for value, _ in pairs if value is not None])
    return found.model_copy(update={"num_completions": sum(map(len, several))})
