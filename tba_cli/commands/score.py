"""`tba score`: try the scorers of a recipe on examples, from a file or from the stored rollouts of a run."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from tba.api import RolloutDetail, ScoreItem, ScoreResult
from tba.clients import BufferClient, RewardClient
from tba.config import Recipe, load_recipe
from tba.errors import ConfigError, NotFoundError
from tba.fields import StrictModel, escape_controls, first_problem
from tba_cli.commands.rollouts import MAX_PER_PAGE, with_run
from tba_cli.prompts.sources import jsonl_rows
from tba_cli.resolve import with_absolute_paths
from tba_cli.run_target import run_folder

EXIT_FAILED = 1
TOLERANCE = 1e-6
"""Relative, and absolute around 0: rewards of stored rollouts are of single precision."""
MAX_SHOWN_CHARS = 24


class Example(StrictModel):
    """One line of the file."""

    task: str
    prompt: str
    response: str
    data: dict[str, Any] = Field(default_factory=dict)
    expected: float | None = None
    """The reward that it should get; None: any."""
    finish_reason: str = "stop"
    response_tokens: list[int] | None = None
    """For functions that ask for them; default: made-up ones."""


class Scored(StrictModel):
    """An example with the outcome of its scoring."""

    name: str
    """Line of the file, or id of the rollout."""
    task: str
    response: str
    data: dict[str, Any]
    expected: float | None
    """Of a rollout: the stored reward."""
    took_s: float
    result: ScoreResult

    @property
    def is_mismatch(self) -> bool:
        """Whether it got another reward than expected."""
        reward = self.result.reward
        if self.expected is None or reward is None:
            return False
        return not math.isclose(reward, self.expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def score_command(args: argparse.Namespace) -> int:
    """Score every example and print a table; return 1 where one has another reward than expected, or none."""
    if args.file is None and args.from_run is None:
        raise ConfigError("name a FILE with examples, or a run with --from-run RUN")
    recipe = _recipe(args)
    examples = dict(_examples_of_run(args) if args.file is None else _examples_of_file(Path(args.file)))
    if not examples:
        raise ConfigError(f"there are no examples in {args.file or args.from_run}; one is enough")
    from tba_cli.local.reward_trial import ask_scorers  # no image holds the launcher

    scored = ask_scorers(recipe, lambda client: [_score(client, recipe, *pair) for pair in examples.items()])
    wrong = [each for each in scored if each.is_mismatch]
    num_errors = sum(each.result.error is not None for each in scored)
    if args.json:
        rows = [{**each.model_dump(mode="json"), "mismatch": each.is_mismatch} for each in scored]
        print(json.dumps({"examples": rows, "num_mismatches": len(wrong), "num_errors": num_errors}, indent=1))
    else:
        of_run = args.file is None
        lines = [*table_lines(scored, of_run=of_run), *(mismatch_line(each, of_run=of_run) for each in wrong)]
        lines.append(_counts_line(len(scored) - num_errors, len(wrong), num_errors))
        print("\n".join(map(escape_controls, lines)))
    return EXIT_FAILED if wrong or num_errors else 0


def _recipe(args: argparse.Namespace) -> Recipe:
    """Return the recipe of --recipe, or that of the run."""
    if args.recipe is not None:
        return with_absolute_paths(load_recipe(args.recipe, sets=args.set))
    if args.from_run is None:
        raise ConfigError("name the recipe whose scorers to try: --recipe RECIPE")
    path = run_folder(_target(args)).recipe_path
    if not path.exists():
        raise ConfigError(f"there is no run {args.from_run!r}: {path} does not exist")
    # the run did not begin with the variables of this shell
    return with_absolute_paths(load_recipe(path, sets=args.set, environ={}))


def _target(args: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(url=None, run_dir=None, run=args.from_run, token_file=None, ca_file=None)


def _examples_of_file(path: Path) -> Iterator[tuple[str, Example]]:
    """Yield name and content of each line.

    Raises:
        ConfigError: the file cannot be read, or a line is no example.
    """
    for row in jsonl_rows(path):
        try:
            yield row.where.rpartition(", ")[2], Example.model_validate(row.values)
        except ValidationError as error:
            raise ConfigError(
                f"{row.where}: {first_problem(error)}; an example is "
                '{"task": TEXT, "prompt": TEXT, "response": TEXT, "data": {...}, "expected": NUMBER}, the last two '
                "where there are any"
            ) from None


def _examples_of_run(args: argparse.Namespace) -> Iterator[tuple[str, Example]]:
    """Yield id and content of the newest stored rollouts, with the stored reward as expected.

    Raises:
        ConfigError: --num is out of range, or the run no longer has the prompt of a rollout.
    """
    if not 1 <= args.num <= MAX_PER_PAGE:
        raise ConfigError(f"--num {args.num} is out of range; give 1 to {MAX_PER_PAGE}")

    def read(client: BufferClient) -> list[RolloutDetail]:
        found = []
        for rollout in client.list_rollouts(limit=args.num, text_chars=1).rollouts:
            try:
                found.append(client.get_rollout(rollout.rollout_id))
            except NotFoundError:  # evicted meanwhile
                continue
        return found

    for rollout in with_run(_target(args), read):
        if rollout.prompt_text is None or rollout.prompt_data is None:
            raise ConfigError(
                f"the run no longer has the prompt {rollout.prompt_id} of rollout {rollout.rollout_id}, so it cannot "
                "be scored again; upload the prompt again, or take a smaller --num"
            )
        yield (
            rollout.rollout_id,
            Example(
                task=rollout.task,
                prompt=rollout.prompt_text,
                response=rollout.response_text,
                data=rollout.prompt_data,
                expected=rollout.reward,
                finish_reason=rollout.finish_reason,
                response_tokens=rollout.response_tokens,
            ),
        )


def _score(client: RewardClient, recipe: Recipe, name: str, example: Example) -> Scored:
    """Score one example in a request of its own, so that its time is known."""
    from tba_cli.local.reward_trial import made_up_tokens

    tokens = example.response_tokens if example.response_tokens is not None else made_up_tokens(example.response)
    try:
        item = ScoreItem(
            item_id=name,
            task=example.task,
            prompt=example.prompt,
            response=example.response,
            data=example.data,
            finish_reason=example.finish_reason,
            response_tokens=tokens if recipe.reward.takes_tokens(example.task) else None,
        )
    except ValidationError as error:
        raise ConfigError(f"{name}: {first_problem(error)}; correct the example") from None
    began_s = time.monotonic()
    (result,) = client.score([item]).results
    return Scored(
        name=name,
        task=example.task,
        response=example.response,
        data=example.data,
        expected=example.expected,
        took_s=time.monotonic() - began_s,
        result=result,
    )


def table_lines(scored: list[Scored], *, of_run: bool) -> list[str]:
    """Return a row per example below a head; columns are as wide as what stands in them.

    Args:
        of_run: the examples are rollouts, whose stored rewards and gold data are shown.
    """
    gold = ["gold data"] if of_run else []
    rows = [["example", "task", "response", *gold, "reward", _expected(of_run), "parts", "ms", "error"]]
    for each in scored:
        result = each.result
        parts = ", ".join(f"{name} {score:.4g}" for name, score in (result.parts or {}).items())
        error = "" if result.error is None else f"{result.error.reason}: {result.error.detail}"
        texts = [_short(each.response), *([_short(each.data)] if of_run else [])]
        numbers = [_number(result.reward), _number(each.expected)]
        rows.append([each.name, each.task, *texts, *numbers, parts, f"{each.took_s * 1e3:.0f}", error])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _counts_line(num_scored: int, num_wrong: int, num_errors: int) -> str:
    errors = "1 error" if num_errors == 1 else f"{num_errors} errors"
    if not num_scored:  # where nothing was scored, nothing could differ
        return f"0 scored, {errors}"
    return f"{num_scored} scored, {'1 mismatch' if num_wrong == 1 else f'{num_wrong} mismatches'}, {errors}"


def mismatch_line(each: Scored, *, of_run: bool) -> str:
    """Return what one example got, and what was expected, or stored."""
    return (
        f"mismatch, {each.name}: {_expected(of_run)} {_number(each.expected)}, got {_number(each.result.reward)} for "
        f"{_short(each.response)}"
    )


def _expected(of_run: bool) -> str:
    return "stored" if of_run else "expected"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= MAX_SHOWN_CHARS else f"{shown[: MAX_SHOWN_CHARS - 4]} ..."
