"""Ask the scorers of a recipe before a run starts, through a reward service like the run's.

The service runs in a temporary folder; nothing of a run changes.
"""

from __future__ import annotations

import asyncio
import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tba.api import Prompt, ScoreItem
from tba.clients import RewardClient
from tba.config import Recipe, parse_recipe
from tba.config.reward import THINK, ModelScorerSpec, TaskReward
from tba.errors import ChildError, ConfigError, WaitTimeoutError
from tba_cli.console import Console
from tba_cli.doctor.checks.recipe import Trial
from tba_cli.local.evaluate import CONFIG_NAME, reward_client, start_reward, with_own_tokens, with_reward
from tba_cli.local.processes import ProcessManager, run_with_processes
from tba_cli.run_folder import RunFolder

T = TypeVar("T")
SERVICE = "tba_reward"
LARGE_BYTES = 2**30
"""Models above this size are not loaded only for the trial."""
ANSWER_FIELD = "answer"
WRONG_ANSWERS = ("1", "2")
"""The second one is for prompts whose answer is the first one."""
BARE_ANSWER_KINDS = frozenset({"exact", "last_number", "python"})
"""Scorers for which the bare answer is a right response, as far as anyone can know; `math` asks for a box."""
STOP_TIMEOUT_S = 5.0


def try_scorers(recipe: Recipe, prompts: Sequence[Prompt], *, networks: bool, http: bool) -> Trial:
    """Start a reward service, ask it for the rewards of two responses per task, stop it.

    Args:
        recipe: with absolute paths.
        prompts: the first one of every task is used.
        networks: also load large models.
        http: also ask endpoints on other machines.

    Raises:
        ConfigError: a scorer cannot be built or did not start; or the reward service is not installed.
        ServiceError: the service did not answer.
    """
    trial = Trial()
    tried = _without(recipe, trial.left_out, networks=networks, http=http)
    # reversed, so that the first prompt of a task wins
    firsts = {prompt.task: prompt for prompt in reversed(prompts) if prompt.task not in trial.left_out}
    items = [
        item for prompt in firsts.values() for item in _items(prompt, has_tokens=tried.reward.takes_tokens(prompt.task))
    ]
    for prompt in firsts.values():
        answer, reward = _answer_of(prompt), tried.reward.tasks.get(prompt.task)
        if answer is not None and reward is not None and _takes_bare_answers(reward, prompt):
            trial.right[prompt.task] = answer
    results = ask_scorers(tried, lambda client: client.score(items).results if items else [])
    for item, result in zip(items, results, strict=True):
        trial.scored.setdefault(item.task, []).append(result)
    return trial


def ask_scorers(recipe: Recipe, ask: Callable[[RewardClient], T]) -> T:
    """Start a reward service with the scorers of the recipe, return what `ask` gets from it, stop it.

    Args:
        recipe: with absolute paths.

    Raises:
        ConfigError: a scorer cannot be built or did not start; or the reward service is not installed.
        ServiceError: the service did not answer.
    """
    if importlib.util.find_spec(SERVICE) is None:
        raise ConfigError("the reward service is not installed here: pip install 'tba[reward]'")
    config = with_reward(recipe, None)

    async def work(processes: ProcessManager) -> T:
        await start_reward(processes, config, folder, console)
        # the deadline of the service itself: it answers before
        client = reward_client(config, timeout_s=config.reward.request_deadline_s)
        try:
            return await asyncio.to_thread(ask, client)
        finally:
            client.close()

    console = Console("quiet")
    with tempfile.TemporaryDirectory(prefix="tba-check-") as place:
        folder = RunFolder(Path(place))
        folder.logs_path.mkdir()
        config = with_own_tokens(config, folder)
        folder.write_json(folder.path / CONFIG_NAME, config.model_dump(mode="json"))
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


def _items(prompt: Prompt, *, has_tokens: bool) -> list[ScoreItem]:
    """Return a response that is hardly right, and the answer where the prompt has one, with made-up token ids."""
    answer = _answer_of(prompt)
    first, second = WRONG_ANSWERS
    # two responses: one that raises for both is broken; one that scores both the same is too, if it reads the answer
    responses = [first] if answer is None else [second if answer.strip() == first else first, answer]
    return [
        ScoreItem(
            item_id=f"{prompt.task}-{number}",
            task=prompt.task,
            prompt=prompt.text,
            response=response,
            data=prompt.data,
            response_tokens=made_up_tokens(response) if has_tokens else None,
        )
        for number, response in enumerate(responses)
    ]


def _answer_of(prompt: Prompt) -> str | None:
    answer = prompt.data.get(ANSWER_FIELD)
    return str(answer) if isinstance(answer, str | int) else None


def _takes_bare_answers(reward: TaskReward, prompt: Prompt) -> bool:
    """Return whether the answer alone should be a right response: not in reasoning, and for every scorer."""
    if prompt.text.rstrip().endswith(tuple(begin for begin, _ in THINK)):
        return False
    return all(
        spec.kind in BARE_ANSWER_KINDS and getattr(spec, "field", ANSWER_FIELD) == ANSWER_FIELD
        for spec in reward.scorers
    )


def _without(recipe: Recipe, left_out: dict[str, str], *, networks: bool, http: bool) -> Recipe:
    """Return the recipe without the tasks that are not tried; put the reason for each into `left_out`."""
    document = recipe.model_dump(mode="json")
    tasks: dict[str, Any] = document["reward"]["tasks"]
    for task, reward in recipe.reward.tasks.items():
        why = _why_not(recipe, reward, networks=networks, http=http)
        if why is not None:
            left_out[task] = why
            del tasks[task]
    return parse_recipe(document, where="recipe") if left_out else recipe


def _why_not(recipe: Recipe, reward: TaskReward, *, networks: bool, http: bool) -> str | None:
    for spec in reward.scorers:
        if spec.kind == "http" and not http:
            return f"scorer {spec.part!r} asks an endpoint elsewhere"
        if isinstance(spec, ModelScorerSpec) and not networks:
            # small models are loaded in any case: only so an error in their settings is found
            size_bytes = _size_bytes(spec)
            if size_bytes > LARGE_BYTES:
                return f"scorer {spec.part!r} would load networks of {size_bytes / 2**30:.1f} GiB"
    return None


def _size_bytes(spec: ModelScorerSpec) -> int:
    """Return the bytes of the weights in the folders that a scorer names; a missing folder counts 0."""
    names = [getattr(spec, field) for field in ("model", "victim", "classifier") if hasattr(spec, field)]
    return sum(file.stat().st_size for name in names for file in Path(name).expanduser().glob("*.safetensors"))
