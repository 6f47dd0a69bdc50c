"""`tba score`: try the scorers of a recipe on examples of a file."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from tba.api import ScoreItem, ScoreResult
from tba.clients import RewardClient
from tba.config import load_recipe
from tba.errors import ConfigError
from tba.fields import StrictModel, first_problem
from tba_cli.console import print_answer
from tba_cli.prompts.sources import jsonl_rows
from tba_cli.resolve import with_absolute_paths

EXIT_FAILED = 1
TOLERANCE = 1e-6
"""Relative and absolute tolerance of `expected`: rewards of stored rollouts have single precision."""
MAX_SHOWN_CHARS = 24


class Example(StrictModel):
    """One line of the file."""

    task: str
    prompt: str
    response: str
    data: dict[str, Any] = Field(default_factory=dict)
    expected: float | None = None
    """The reward that the example should get; None: any reward."""
    finish_reason: str = "stop"


class Scored(StrictModel):
    """An example with the outcome of its scoring."""

    name: str
    """The example's line in the file, such as `line 3`."""
    example: Example
    took_s: float
    result: ScoreResult

    @property
    def is_mismatch(self) -> bool:
        """Whether its reward differs from the expected one; False if either is missing."""
        reward, expected = self.result.reward, self.example.expected
        if expected is None or reward is None:
            return False
        return not math.isclose(reward, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def score_command(args: argparse.Namespace) -> int:
    """Score every example and print a table; return 1 if an example has an unexpected reward or no reward."""
    recipe = with_absolute_paths(load_recipe(args.recipe, sets=args.set))
    examples: dict[str, Example] = {}
    for row in jsonl_rows(Path(args.file)):
        try:
            examples[row.where.rpartition(", ")[2]] = Example.model_validate(row.values)
        except ValidationError as error:
            raise ConfigError(
                f"{row.where}: {first_problem(error)}; an example is "
                '{"task": TEXT, "prompt": TEXT, "response": TEXT, "data": {...}, "expected": NUMBER}, the last two '
                "where there are any"
            ) from None
    if not examples:
        raise ConfigError(f"there are no examples in {args.file}; one is enough")
    from tba_cli.local.reward_trial import ask_scorers, made_up_tokens  # no image holds the launcher

    for name, example in examples.items():
        if example.task in recipe.paid_by_environment:
            raise ConfigError(f"{name}: task {example.task!r} is paid by its environment alone; leave the example out")

    def score(client: RewardClient) -> list[Scored]:
        scored = []
        # each in a request of its own, so that its time is known
        for name, example in examples.items():
            tokens = made_up_tokens(example.response) if recipe.reward.takes_tokens(example.task) else None
            try:
                item = ScoreItem(item_id=name, response_tokens=tokens, **example.model_dump(exclude={"expected"}))
            except ValidationError as error:
                raise ConfigError(f"{name}: {first_problem(error)}; correct the example") from None
            began_s = time.monotonic()
            (result,) = client.score([item]).results
            scored.append(Scored(name=name, example=example, took_s=time.monotonic() - began_s, result=result))
        return scored

    scored = ask_scorers(recipe, score)
    wrong = [each for each in scored if each.is_mismatch]
    num_errors = sum(each.result.error is not None for each in scored)
    rows = [{**each.model_dump(mode="json"), "mismatch": each.is_mismatch} for each in scored]
    lines = table_lines(scored)
    for each in wrong:
        expected, got = _number(each.example.expected), _number(each.result.reward)
        lines.append(f"mismatch, {each.name}: expected {expected}, got {got} for {_short(each.example.response)}")
    lines.append(f"{len(scored) - num_errors} scored, mismatches: {len(wrong)}, errors: {num_errors}")
    document = {"examples": rows, "num_mismatches": len(wrong), "num_errors": num_errors}
    print_answer(document, lines, as_json=args.json)
    return EXIT_FAILED if wrong or num_errors else 0


def table_lines(scored: Sequence[Scored]) -> list[str]:
    """Return the lines of a table with a header and one row per example."""
    rows = [["example", "task", "response", "reward", "expected", "parts", "ms", "error"]]
    for each in scored:
        result, example = each.result, each.example
        parts = ", ".join(f"{name} {score:.4g}" for name, score in (result.parts or {}).items())
        error = "" if result.error is None else f"{result.error.reason}: {result.error.detail}"
        numbers = [_number(result.reward), _number(example.expected)]
        rows.append(
            [each.name, example.task, _short(example.response), *numbers, parts, f"{each.took_s * 1e3:.0f}", error]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= MAX_SHOWN_CHARS else f"{shown[: MAX_SHOWN_CHARS - 4]} ..."
