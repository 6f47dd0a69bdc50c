"""`tba evaluate` on this machine: start a reward service and the evaluator, as child processes.

evaluations/NAME/WHAT/evaluation.json    every number; there when the evaluation is complete
                      evaluation.md      the same as tables
                      completions.jsonl  every completion with its scores
                      config.json job.json prompts.jsonl logs/    input and logs of the children
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from tba.api import Prompt
from tba.clients import RewardClient
from tba.config import Recipe, parse_recipe
from tba.errors import ConfigError, WaitTimeoutError
from tba.evaluation.evaluation_job import PROGRESS, EvaluationJob, EvaluationReport, load_report, read_prompts
from tba.tokens import role_token
from tba_cli.console import Console, Loudness
from tba_cli.local.processes import ProcessManager, run_with_processes
from tba_cli.local.services import Services, wait_for_reward
from tba_cli.ports import PortRequest, choose_ports
from tba_cli.reports.comparison import evaluation_markdown
from tba_cli.run_folder import RunFolder

CONFIG_NAME, JOB_NAME, PROMPTS_NAME = "config.json", "job.json", "prompts.jsonl"
LOOPBACK = "127.0.0.1"
ASK_TIMEOUT_S = 5.0
SILENCE_S = 600.0
"""The evaluator is killed after so long without a report of its progress; loading a model is the longest silence."""


class EvaluationConsole(Console):
    """Shows the progress of the evaluator among the lines of `tba evaluate`, and remembers when it came last."""

    def __init__(self, loudness: Loudness) -> None:
        super().__init__(loudness)
        self.progress_at_s = time.monotonic()

    def child_line(self, name: str, line: str) -> None:
        """Print a line of a child's output; a line of progress without the name in front."""
        if line.startswith(PROGRESS):
            self.progress_at_s = time.monotonic()
            self.info(line.removeprefix(PROGRESS))
        else:
            super().child_line(name, line)


def evaluate_here(
    recipe: Recipe,
    job: EvaluationJob,
    *,
    folder: RunFolder,
    lock_fd: int,
    reward_url: str | None,
    console: EvaluationConsole,
) -> EvaluationReport:
    """Run the evaluation and return its report; whatever happens, no child is left.

    Args:
        recipe: with absolute paths.
        folder: where everything is written; its lock is held as `lock_fd`.
        reward_url: score there, and start no service.

    Raises:
        ConfigError: the reward service does not know a task, or none answers at `reward_url`.
        ChildError: a child could not start, or died; says why.
        WaitTimeoutError: the reward service did not become ready within `local.start_timeout_s`, or the evaluator
            was silent for `SILENCE_S`.
    """
    tasks = tasks_of(recipe, read_prompts(job.prompts))
    config = with_reward(recipe, reward_url)
    if reward_url is None:
        config = with_own_tokens(config, folder)
    folder.write_json(folder.path / CONFIG_NAME, config.model_dump(mode="json"))
    folder.write_json(folder.path / JOB_NAME, job.model_dump(mode="json"))

    async def work(processes: ProcessManager) -> None:
        if reward_url is None:
            await start_reward(processes, config, folder, console)
        await asyncio.to_thread(_check_tasks, config, tasks)
        services = Services(config, folder)
        child = await processes.start(services.spec("evaluator", words=["--job", str(folder.path / JOB_NAME)]))
        assert child.exit_code is not None
        console.progress_at_s = time.monotonic()
        # each line of progress moves the deadline: an evaluation may take hours, a step of it may not
        while not child.exit_code.done():
            if (left_s := console.progress_at_s + SILENCE_S - time.monotonic()) <= 0:
                raise WaitTimeoutError(f"wait 'evaluator': it reported nothing for {SILENCE_S:g} s; see its log")
            await asyncio.wait({child.exit_code}, timeout=left_s)
        if child.exit_code.result():
            await asyncio.Event().wait()  # the watch of the manager explains the end of the child, and cancels this

    asyncio.run(run_with_processes(work, folder, console, lock_fd, recipe.local.stop_timeout_s))
    report = load_report(folder.path / "evaluation.json")
    (folder.path / "evaluation.md").write_text(evaluation_markdown(report), encoding="utf-8")
    return report


async def start_reward(processes: ProcessManager, config: Recipe, folder: RunFolder, console: Console) -> None:
    """Start a reward service with the config.json of the folder, and wait until it is ready.

    Raises:
        ConfigError: a scorer did not start.
        WaitTimeoutError: it was not ready within `local.start_timeout_s`.
    """
    console.info(f"starting a reward service at {config.reward_url}")
    await processes.start(Services(config, folder).spec("reward"))
    timeout_s, client = config.local.start_timeout_s, reward_client(config)
    try:
        async with asyncio.timeout(timeout_s):
            await wait_for_reward(client, config.tls.ca_file, on_progress=console.info)
    except TimeoutError:
        raise WaitTimeoutError(
            f"wait 'reward-start': the reward service was not ready within {timeout_s:.0f} s (local.start_timeout_s); "
            f"see {folder.log_path('reward')}"
        ) from None
    finally:
        client.close()


def reward_client(config: Recipe, *, timeout_s: float = ASK_TIMEOUT_S) -> RewardClient:
    """Return a client of the recipe's reward service; every call is one attempt."""
    token = role_token(config.auth.tokens_file, "searcher")
    return RewardClient(config.reward_url, token=token, retry_s=0, timeout_s=timeout_s, ca_file=config.tls.ca_file)


def tasks_of(recipe: Recipe, prompts: Sequence[Prompt]) -> list[str]:
    """Return every task that completions will be scored under."""
    return recipe.eval.published.tasks or sorted({prompt.task for prompt in prompts})


def _check_tasks(config: Recipe, tasks: Sequence[str]) -> None:
    """Raise ConfigError where the reward service cannot score one of these tasks, ServiceError where none answers."""
    client = reward_client(config)
    try:
        known = {info.task for info in client.rewards()}
    finally:
        client.close()
    missing = [task for task in tasks if task not in known]
    if missing:
        raise ConfigError(
            f"the reward service at {config.reward_url} does not score task {missing[0]!r}, but "
            f"{', '.join(sorted(known))}; add it to [reward.tasks], or change eval.published.tasks"
        )


def with_reward(recipe: Recipe, url: str | None) -> Recipe:
    """Return the recipe that the children read: with the service at `url`, or with a free port for our own."""
    document = recipe.model_dump(mode="json")
    if url is None:
        (port,) = choose_ports([PortRequest("reward.port", LOOPBACK, 0)])
        document["reward"] |= {"host": LOOPBACK, "port": port}
        url = f"{recipe.tls.scheme}://{LOOPBACK}:{port}"
    document["reward"]["url"] = url
    return parse_recipe(document, where="recipe")


def with_own_tokens(config: Recipe, folder: RunFolder) -> Recipe:
    """Return the recipe with new tokens, unless it names a tokens file."""
    # other users of this machine can connect to our reward service
    if config.auth.tokens_file is not None:
        return config
    folder.make_secrets()
    document = config.model_dump(mode="json")
    document["auth"]["tokens_file"] = str(folder.tokens_path("all"))
    return parse_recipe(document, where="recipe")
