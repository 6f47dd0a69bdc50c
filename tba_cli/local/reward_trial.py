"""Try the scorers of a recipe before a run starts, through a reward service like the run's.

The service runs in a temporary folder, and changes nothing of a run.
"""

from __future__ import annotations

import asyncio
import importlib.util
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar

from tba.api import Prompt, ScoreItem, ScoreResult
from tba.clients import RewardClient
from tba.config import Recipe, parse_recipe
from tba.config.reward import REASONING, ModelScorerSpec, TaskReward
from tba.errors import ChildError, ConfigError, WaitTimeoutError, not_installed
from tba_cli.console import Console
from tba_cli.doctor.checks.recipe import Alike, Trial
from tba_cli.local.processes import ProcessManager, run_with_processes
from tba_cli.local.reward_service import reward_client, start_reward, with_own_reward
from tba_cli.run_folder import RunFolder

T = TypeVar("T")
_Try = tuple[list[tuple[str, ScoreResult]], Prompt, str, str]
"""Where the result goes, the prompt, what the response is, and the response."""
SERVICE = "tba_reward"
LARGE_BYTES = 2**30
"""Models above this size are not loaded only for the trial."""
MAX_VALUES, MAX_VALUE_CHARS = 8, 10_000
"""Most values of a prompt's data that are tried as responses, and the longest such value."""
MAX_SHOWN_CHARS = 30
MAX_ALIKE = 16
"""Most different sets of data columns that are tried for each task."""
ODD = ("", "I do not know.", "\u00b2")
"""Responses that a model may give, and that break functions: without any text, without a number; a digit for
`isdigit`, and none for `int`."""
NUM_OTHERS, MAX_ODD = 8, 24
"""Other prompts whose answers are tried, and most odd responses in all."""
SLOW_S = 3.0
"""Odd responses, which are more, are not tried if the others took this long: a scorer may ask a judge."""
STOP_TIMEOUT_S = 5.0


def try_scorers(recipe: Recipe, prompts: Sequence[Prompt], *, http: bool) -> Trial:
    """Start a reward service, let it score made-up responses, stop it, and return the results.

    Args:
        recipe: the recipe with absolute paths.
        prompts: all prompts; the first one of each task and set of data columns is used.
        http: whether to try scorers of kind `http` too, which ask endpoints on other machines.
    """
    trial = Trial()
    tried = _without(recipe, trial.left_out, http=http)
    untried = {*trial.left_out, *recipe.paid_by_environment}
    alike = _alike([prompt for prompt in prompts if prompt.task not in untried])
    first: list[_Try] = []
    odd: list[_Try] = []
    for task, sets in alike.items():
        trial.num_untried += Counter({task: sum(len(other.prompts) for other in sets[MAX_ALIKE:])})
        reward, prompt = tried.reward.tasks.get(task), sets[0].prompts[0]
        found = list(_responses(prompt, reward))
        first += [(sets[0].results, prompt, *each) for each in found]
        # which columns it needs shows with any response
        for other in sets[1:MAX_ALIKE]:
            first.append((other.results, other.prompts[0], *next(_responses(other.prompts[0], reward))))
        if tried.reward.takes_tokens(task):  # a function; other scorers are made for all responses
            these = _odd_responses(sets[0].prompts, recipe.searcher.max_response_tokens)
            odd += [(sets[0].odd_results, *each) for each in islice(these, MAX_ODD)]
        # an answer alone should score more than another response: not in reasoning or behind a gate
        is_reasoning = prompt.text.rstrip().endswith(tuple(begin for begin, _ in REASONING))
        if reward is not None and found[-1][0].startswith("data.") and not is_reasoning:
            others = [spec for spec in reward.scorers if not spec.reads_data]
            if len(others) < len(reward.scorers) and all(spec.gate is None for spec in others):
                trial.right.add(task)

    def ask(client: RewardClient) -> None:
        begun_s = time.monotonic()
        _score(client, tried, first)
        trial.is_slow = bool(odd) and time.monotonic() - begun_s > SLOW_S
        if not trial.is_slow:
            _score(client, tried, odd)

    ask_scorers(tried, ask)
    trial.tried = {task: sets[:MAX_ALIKE] for task, sets in alike.items()}
    return trial


def _score(client: RewardClient, recipe: Recipe, tries: Sequence[_Try]) -> None:
    """Score the responses, and append each result to the list of its try."""
    items = [
        ScoreItem(
            item_id=str(number),
            task=prompt.task,
            prompt=prompt.text,
            response=response,
            data=prompt.data,
            response_tokens=made_up_tokens(response) if recipe.reward.takes_tokens(prompt.task) else None,
        )
        for number, (_, prompt, _, response) in enumerate(tries)
    ]
    for (results, _, what, _), result in zip(tries, client.score(items).results if items else (), strict=True):
        results.append((what, result))


def ask_scorers(recipe: Recipe, ask: Callable[[RewardClient], T]) -> T:
    """Start a reward service with the scorers of the recipe, return what `ask` returns for its client, and stop it.

    Args:
        recipe: the recipe with absolute paths.
    """
    if importlib.util.find_spec(SERVICE) is None:
        raise not_installed("asking scorers", "tba-reward")

    async def work(processes: ProcessManager) -> T:
        await start_reward(processes, config, folder, console)
        # the deadline of the service itself: it answers before
        with closing(reward_client(config, timeout_s=config.reward.request_deadline_s)) as client:
            return await asyncio.to_thread(ask, client)

    console = Console("quiet")
    with tempfile.TemporaryDirectory(prefix="tba-check-") as place:
        folder = RunFolder(Path(place))
        folder.logs_path.mkdir()
        config = with_own_reward(recipe, folder)
        folder.write_json(folder.config_path, config.model_dump(mode="json"))
        try:
            return asyncio.run(run_with_processes(work, folder, console, None, STOP_TIMEOUT_S))
        except ChildError as error:  # the folder of the log that it names is deleted
            raise ConfigError(str(error).partition(f" [{folder.path}")[0]) from None
        except WaitTimeoutError as error:
            what = str(error).partition(f"; see {folder.path}")[0]
            raise ConfigError(
                f"{what}; its log ends with: {folder.end_of_log('reward')}; fix what the scorers wait for, or raise "
                "local.start_timeout_s"
            ) from None


def made_up_tokens(response: str) -> list[int]:
    """Return token ids for a response that no model has made: its bytes."""
    return list(response.encode())


def _alike(prompts: Sequence[Prompt]) -> dict[str, list[Alike]]:
    """Group the prompts of each task by the non-null columns of their data; the most frequent columns come first."""
    found: dict[str, dict[frozenset[str], list[Prompt]]] = {}
    for prompt in prompts:
        columns = frozenset(name for name, value in prompt.data.items() if value is not None)
        found.setdefault(prompt.task, {}).setdefault(columns, []).append(prompt)
    return {
        task: [
            Alike(columns=tuple(sorted(columns)), prompts=alike, num_of_task=sum(map(len, sets.values())))
            for columns, alike in sorted(sets.items(), key=lambda each: -len(each[1]))
        ]
        for task, sets in found.items()
    }


def _responses(prompt: Prompt, reward: TaskReward | None) -> Iterator[tuple[str, str]]:
    """Yield (description, response): first one that should be wrong, then texts and numbers of the prompt's data."""
    values = {
        f"data.{name}": str(value)
        for name, value in prompt.data.items()
        if isinstance(value, str | int | float) and not isinstance(value, bool)
    }
    values = {name: text for name, text in values.items() if text.strip() and len(text) <= MAX_VALUE_CHARS}
    known = {text.strip() for text in values.values()}
    # two responses and more: a scorer that raises for all is broken, and one that scores all the same often is
    wrong = next(str(number) for number in count(1) if str(number) not in known)
    yield repr(wrong), wrong
    in_box = reward is not None and any(spec.kind == "math" for spec in reward.scorers)
    for name, text in islice(values.items(), MAX_VALUES):
        shown = text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]} ..."
        yield f"{name} {shown!r}", text
        if in_box and "boxed" not in text:
            yield f"{name} in a box", f"\\boxed{{{text}}}"
    if not values:
        # one score is a list of the right length for one response
        yield "'2'", "2"


def _odd_responses(prompts: Sequence[Prompt], max_tokens: int) -> Iterator[tuple[Prompt, str, str]]:
    """Yield (prompt, description, response): odd ones to the first prompt, then values of the data of other prompts."""
    for text in ODD:
        yield prompts[0], repr(text), text
    yield prompts[0], f"{max_tokens} times '9'", "9" * max_tokens
    step = max(1, len(prompts) // NUM_OTHERS)
    for prompt in prompts[1::step][:NUM_OTHERS]:
        for what, text in _responses(prompt, None):
            if what.startswith("data."):
                yield prompt, f"{what} of prompt {prompt.prompt_id!r}", text


def _without(recipe: Recipe, left_out: dict[str, str], *, http: bool) -> Recipe:
    """Return the recipe without the tasks that are not tried; put the reason for each into `left_out`."""
    document = recipe.model_dump(mode="json")
    tasks: dict[str, Any] = document["reward"]["tasks"]
    for task, reward in recipe.reward.tasks.items():
        for spec in reward.scorers:
            if spec.kind == "http" and not http:
                left_out.setdefault(task, f"scorer {spec.part!r} asks an endpoint elsewhere")
            if not isinstance(spec, ModelScorerSpec):
                continue
            # a missing folder counts 0; small models are loaded: only so an error in their settings is found
            names = [getattr(spec, field) for field in ("model", "victim", "classifier") if hasattr(spec, field)]
            files = (file for name in names for file in Path(name).expanduser().glob("*.safetensors"))
            if (size_bytes := sum(file.stat().st_size for file in files)) > LARGE_BYTES:
                left_out.setdefault(task, f"scorer {spec.part!r} would load networks of {size_bytes / 2**30:.1f} GiB")
        if task in left_out:
            del tasks[task]
    # each worker imports what its scorers need; more workers than scorers would have nothing to do
    num_scorers = sum(len(recipe.reward.tasks[task].scorers) for task in tasks)
    document["reward"]["num_workers"] = max(1, min(recipe.reward.num_workers, num_scorers))
    return parse_recipe(document, where="recipe")
