"""Find the errors of a recipe that would show only after `tba run` has begun (`tba config check`).

The code of the run itself reads the prompts, measures the model and asks the scorers, so that both always agree.
"""

from __future__ import annotations

import importlib.util
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tba.api import Prompt, ScoreResult
from tba.config import Recipe
from tba.errors import ConfigError
from tba_cli.artifacts import required_folders
from tba_cli.artifacts.prepared import check_prepared, made_at_start, missing
from tba_cli.doctor.checks.models import check_models
from tba_cli.doctor.target import CheckResult, Target, fail, ok, skip, warn
from tba_cli.prompts.reader import check_tasks, prompt_warnings, prompts_of, tasks_of_recipe
from tba_cli.resolve import check_installed, check_model
from tba_cli.setup.environment_trial import most_s, try_environment
from tba_cli.setup.model_recipe import rate_warning
from tba_cli.setup.prepare import endless_warning, measure_model
from tba_cli.sizing.machine import bfloat16_warning

MAX_MEASURED_PROMPTS = 2000
"""At most this many prompts are measured in tokens."""
INCONCLUSIVE_REASONS = frozenset({"abstained", "ambiguous", "too_long"})
"""Failure reasons that the made-up response may have caused, so that they prove no error of the recipe."""
MAX_SHOWN = 3
"""Most responses without a score that a sentence names."""
SLACK_S = 60.0
"""Time for everything other than the start of the scorers and their answers."""
ELSEWHERE = "its services run elsewhere (buffer.url); `tba doctor` asks the reward service"
OFFLINE = "--offline: a network would be needed"
Check = Callable[[Target], Iterator[CheckResult]]


@dataclass(slots=True, kw_only=True)
class Alike:
    """The prompts of a task whose data have the same columns."""

    columns: tuple[str, ...]
    prompts: Sequence[Prompt]
    num_of_task: int
    results: list[tuple[str, ScoreResult]] = field(default_factory=list)
    """For each made-up response to the first prompt, what it was and its result."""
    odd_results: list[tuple[str, ScoreResult]] = field(default_factory=list)
    """The same for responses that a function may not be made for, and for answers to other prompts."""

    @property
    def problem(self) -> str | None:
        """A sentence if the data of these prompts lack what the scorer needs, else None."""
        error = self.results[0][1].error
        # other errors may be those of the one response
        if error is None or error.reason != "bad_data":
            return None
        first, columns = self.prompts[0], ", ".join(self.columns) or "none"
        return (
            f"{len(self.prompts):,} of {self.num_of_task:,} prompts of task {first.task!r} cannot be scored, first "
            f"{first.prompt_id!r}: their data have the columns {columns}; {error.detail}"
        )


@dataclass(slots=True)
class Trial:
    """The results of scoring made-up responses with every scorer."""

    tried: dict[str, list[Alike]] = field(default_factory=dict)
    """Task -> its groups of prompts with the same columns, the largest first. Several responses were tried for the
    first group, and one for each other group."""
    num_untried: Counter[str] = field(default_factory=Counter)
    """Task -> number of prompts with rarer columns, which were not tried."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Tasks whose scorers were not all asked, and why."""
    right: set[str] = field(default_factory=set)
    """Tasks for which one of the tried responses should be right, so that equal scores deserve a warning."""
    is_slow: bool = False
    """Whether odd responses were not tried, because the others took long already."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (task, sentence) for each task of which all prompts, or some, cannot be scored."""
        for task, sets in self.tried.items():
            lacking = [each.problem for each in sets if each.problem is not None]
            problem = problem_of(sets[0].results)
            if problem is not None and (sets[0].problem is None or len(lacking) == len(sets)):
                yield task, f"task {task!r} scores nothing: {problem}"
            if len(lacking) < len(sets):
                yield from ((task, sentence) for sentence in lacking)

    def failures(self, task: str) -> str | None:
        """Return a warning, with the remedy after its last `; `, about tried responses without a score; or None."""
        tried = self.tried[task][0]
        failed = [(what, result.error) for what, result in tried.results if result.error is not None]
        # a scorer may abstain from odd ones
        odd = ((what, result.error) for what, result in tried.odd_results if result.error is not None)
        failed += [(what, error) for what, error in odd if error.reason not in INCONCLUSIVE_REASONS]
        if not failed:
            return None
        shown = ", ".join(f"{what} ({error.reason}: {error.detail})" for what, error in failed[:MAX_SHOWN])
        more = f" and {len(failed) - MAX_SHOWN} more" if len(failed) > MAX_SHOWN else ""
        return (
            f"task {task!r}: {len(failed)} of {len(tried.results) + len(tried.odd_results)} made-up responses have no "
            f"score: {shown}{more}; correct the scorer, unless they should have none: a wrong answer is a number"
        )

    def check(self) -> None:
        """Raise ConfigError if there is a problem."""
        for task, problem in self.problems():
            raise ConfigError(f"{problem}; {fix_of(task)}")


def fix_of(task: str) -> str:
    """Return advice for a task whose prompts cannot be scored."""
    return f"correct reward.tasks.{task}, or the data of the prompts"


def problem_of(results: Sequence[tuple[str, ScoreResult]]) -> str | None:
    """Return why no result has a score; None if one has, or if the made-up responses may be the cause."""
    errors = [result.error for _, result in results if result.error is not None]
    conclusive = [error for error in errors if error.reason not in INCONCLUSIVE_REASONS]
    if len(errors) < len(results) or not conclusive:
        return None
    return f"{conclusive[0].reason}: {conclusive[0].detail}"


@dataclass
class RecipeChecks:
    """The checks of one recipe.

    Args:
        try_scorers: `tba_cli.local.reward_trial.try_scorers`; None: there is no launcher here.
    """

    recipe: Recipe
    offline: bool
    try_scorers: Callable[..., Trial] | None
    file: Path
    prompts: list[Prompt] = field(default_factory=list)

    @property
    def timeout_s(self) -> float:
        """Seconds for the check of the prompts, and as many again for all other checks together."""
        scorers_s = self.recipe.local.start_timeout_s + self.recipe.reward.request_deadline_s
        return max(scorers_s, most_s(self.recipe)) + SLACK_S

    def check_prompts(self, target: Target) -> Iterator[CheckResult]:
        """Read every prompt as the run reads it, and check that its task is scored."""
        named = [section.dataset for section in self.recipe.data.sets if section.dataset is not None]
        hub = [name for name in named if not Path(name).is_dir() and not name.endswith(".jsonl")]
        # a data set may be in a cache here, but nobody could tell a missing one from a broken network
        if self.offline and hub:
            yield skip("prompts", f"{OFFLINE} for {' and '.join(hub)}")
            return
        # `tba run` fetches or makes the other items itself
        check_prepared(self.recipe, at_start=False)
        missing = self._missing({section.dataset or "" for section in self.recipe.data.sets})
        if missing:
            yield skip("prompts", f"{', '.join(missing)} is not there yet; `tba run` fetches or makes it")
            return
        self.prompts = prompts_of(self.recipe)
        num = {split: sum(prompt.split == split for prompt in self.prompts) for split in ("train", "heldout")}
        yield ok("prompts", f"{num['train']} to train on, {num['heldout']} held out")
        for warning in prompt_warnings(self.recipe, self.prompts):
            yield warn("prompts", *warning.rsplit("; ", 1))
        # a misspelt task name shows as a reward that no prompt asks for
        played = {prompt.task for prompt in self.prompts}
        for task in self.recipe.environments:
            if task not in played:
                yield warn(
                    "environment",
                    f"no prompt has the task {task!r}, so environments.{task} is never played",
                    f"correct the name of environments.{task}, or the task of the prompts, or remove it",
                )
        for task in self.recipe.reward.tasks:
            if task not in {*self.recipe.eval.published.tasks, *played}:
                yield warn(
                    "reward-task",
                    f"no prompt has the task {task!r}, so reward.tasks.{task} scores nothing",
                    f"correct the name of reward.tasks.{task}, or the task of the prompts, or remove it",
                )
        check_tasks(self.prompts, tasks_of_recipe(self.recipe))
        yield ok("prompts", f"scored: {', '.join(sorted(played))}")

    def check_model(self, target: Target) -> Iterator[CheckResult]:
        """Check the folders that the services read, and that the starting model is the one that the recipe asks for."""
        yield from check_models(target)
        if not target.is_local:
            return
        if not self._missing({self.recipe.model.path}):
            check_model(self.recipe)
        if (warning := rate_warning(self.recipe)) is not None:
            yield warn("learning-rate", *warning.rsplit("; ", 1))
        if (warning := bfloat16_warning(self.recipe)) is not None:
            yield warn("processor", *warning.rsplit("; ", 1))

    def check_tokenizer(self, target: Target) -> Iterator[CheckResult]:
        """Check that the model's config and tokenizer load, and that prompts and responses fit into its context."""
        if not self.prompts:
            yield skip("tokenizer", "there are no prompts to tokenize")
            return
        try:
            if self._missing({self.recipe.model.path}) or check_model(self.recipe):
                yield skip("tokenizer", f"{self.recipe.model.path} is not there yet; `tba run` fetches or makes it")
                return
        except ConfigError:
            yield skip("tokenizer", f"there is no model at {self.recipe.model.path} to tokenize with")
            return
        if importlib.util.find_spec("transformers") is None:
            yield skip("tokenizer", "transformers, which reads tokenizers, is not installed here")
            return
        # enough to see a limit that is too low; all of them would take minutes
        measured = self.prompts[:MAX_MEASURED_PROMPTS]
        answer, lines = measure_model(self.recipe, measured)
        yield ok("tokenizer", f"{answer['architecture']}, vocabulary of {answer['vocab_size']:,}")
        if answer["num_unknown_texts"]:
            yield warn(
                "tokenizer",
                f"{answer['num_unknown_texts']} of {len(measured)} prompts contain "
                f"{' or '.join(map(repr, answer['unknown']))}, which the tokenizer does not know; the model reads all "
                "that is unknown as one and the same token",
                "write the prompts without it, or take a starting model that knows it (model.path)",
            )
        if (warning := endless_warning(self.recipe, measured, answer)) is not None:
            yield warn("end-of-answers", *warning.rsplit("; ", 1))
        num_over = sum(tokens > self.recipe.searcher.max_prompt_tokens for tokens in answer["text_tokens"])
        # a warning: the run works without them, since searchers refuse such prompts
        if num_over:
            yield warn("prompt-length", lines, "raise searcher.max_prompt_tokens, or leave those prompts out")
        else:
            yield ok("prompt-length", lines)

    def check_installed(self, target: Target) -> Iterator[CheckResult]:
        """Check that the optional packages, and the modules of your own, that the recipe names are installed."""
        if target.is_local:  # else they are in the images of the services
            check_installed(self.recipe)
        yield from ()

    def check_temperature(self, target: Target) -> Iterator[CheckResult]:
        """Warn if no rollout is sampled at the policy temperature, so that none is of the policy that is trained."""
        if (warning := self.recipe.temperature_warning) is not None:
            yield warn("temperature", *warning.rsplit("; ", 1))

    def check_environments(self, target: Target) -> Iterator[CheckResult]:
        """Begin an episode of each task with its environment, in a process of its own."""
        for task, section in self.recipe.environments.items():
            if not target.is_local or section.is_remote:
                where = f"at {section.environment}" if section.is_remote else "where the searchers run (buffer.url)"
                yield skip("environment", f"task {task!r}: its environment is {where}, and was not tried")
                continue
            try:
                yield ok("environment", f"task {task!r}: {try_environment(self.recipe, task, self.prompts)}")
            except ConfigError as error:
                yield fail("environment", *[*str(error).rsplit("; ", 1), "correct the environment"][:2])

    def check_scorers(self, target: Target) -> Iterator[CheckResult]:
        """Start a reward service that imports every scorer, and ask it for the reward of a prompt of each task."""
        if not target.is_local:
            yield skip("scorer", ELSEWHERE)
            return
        if self.try_scorers is None:
            yield skip("scorer", "no image holds the launcher, which starts a reward service for this")
            return
        missing = self._missing({folder.path for folder in required_folders(self.recipe, "reward")})
        if missing:
            yield skip("scorer", f"{', '.join(missing)} is not there yet; `tba run` fetches or makes it")
            return
        trial = self.try_scorers(self.recipe, self.prompts, http=not self.offline)
        for task, why in trial.left_out.items():
            yield skip("scorer", f"task {task!r}: {why}; `tba score` asks it")
        for task, problem in trial.problems():
            yield fail("scorer", problem, fix_of(task))
        if trial.is_slow:
            yield skip("scorer", "odd responses were not tried, since the scorers are slow")
        for task, num in trial.num_untried.items():
            yield skip("scorer", f"task {task!r}: {num:,} prompts, whose data have rarer columns, were not tried")
        for task, sets in trial.tried.items():
            if problem_of(sets[0].results) is None:
                yield _tried_result(trial, task, sets[0].results, self.file)

    def _missing(self, paths: set[str]) -> list[str]:
        """Return the folders among `paths` that do not exist yet and that `tba run` fetches or makes."""
        wanted = made_at_start(self.recipe) & paths
        return [path for path in missing(self.recipe, at_start=True) if path in wanted] if wanted else []


def _tried_result(trial: Trial, task: str, tried: Sequence[tuple[str, ScoreResult]], recipe_file: Path) -> CheckResult:
    if (failures := trial.failures(task)) is not None:
        return warn("scorer", *failures.rsplit("; ", 1))
    rewards = [result.reward for _, result in tried]
    names = ", ".join(what for what, _ in tried)
    if task in trial.right and len(set(rewards)) == 1:
        return warn(
            "scorer",
            f"task {task!r}: all responses that were tried score {rewards[0]:g} ({names}); a run learns nothing from a "
            "reward that is the same for all responses",
            f"see what the scorer gives: `tba score FILE --recipe {shlex.quote(str(recipe_file))}`, where FILE holds "
            "responses of your own (tba score --help); nothing, if the reward is not about the data, or asks for more "
            "than a bare answer",
        )
    scores = ", ".join(f"{what} {result.reward:g}" for what, result in tried)
    return ok("scorer", f"task {task!r}: made-up responses score: {scores}")
