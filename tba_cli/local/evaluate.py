"""`tba evaluate` on this machine: start a reward service and the evaluator, as child processes.

evaluations/NAME/WHAT/evaluation.json    every number; there when the evaluation is complete
                      evaluation.md      the same as tables
                      completions.jsonl  every completion with its scores
                      config.json job.json logs/    input and logs of the children
"""

from __future__ import annotations

import asyncio
import time
from contextlib import closing

from tba.config import Recipe, parse_recipe
from tba.errors import ConfigError, WaitTimeoutError
from tba.evaluation.evaluation_job import PROGRESS, EvaluationJob, EvaluationReport, load_report
from tba_cli.console import Console, Loudness
from tba_cli.local.processes import ProcessManager, run_with_processes
from tba_cli.local.reward_service import reward_client, start_reward, with_own_reward
from tba_cli.local.services import process_spec
from tba_cli.reports.comparison import evaluation_markdown
from tba_cli.run_folder import RunFolder

SILENCE_S = 600.0
"""The evaluator is killed after this long without a line of progress; it is silent longest while it loads a model."""


class EvaluationConsole(Console):
    """A console that also shows the progress of the evaluator, and records the time of its last line of progress."""

    def __init__(self, loudness: Loudness) -> None:
        super().__init__(loudness)
        self.progress_at_s = time.monotonic()

    def child_line(self, name: str, line: str) -> None:
        """Print a line of a child's output; print a line of progress without the child's name in front."""
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
    """Run the evaluation and return its report; all children are stopped before this returns or raises.

    Args:
        recipe: the recipe with absolute paths.
        folder: the folder for all output; the caller holds its lock as `lock_fd`.
        reward_url: a reward service to score with; None: start one.

    Raises:
        ChildError: a child could not start, or died.
        WaitTimeoutError: the reward service did not become ready within `local.start_timeout_s`, or the evaluator
            was silent for `SILENCE_S`.
    """
    if reward_url is None:
        config = with_own_reward(recipe, folder)
    else:
        document = recipe.model_dump(mode="json")
        document["reward"]["url"] = reward_url
        config = parse_recipe(document, where="recipe")
    job_path = folder.path / "job.json"
    folder.write_json(folder.config_path, config.model_dump(mode="json"))
    folder.write_json(job_path, job.model_dump(mode="json"))

    async def work(processes: ProcessManager) -> None:
        if reward_url is None:
            await start_reward(processes, config, folder, console)
        await asyncio.to_thread(_check_tasks, config, job)
        child = await processes.start(process_spec(config, folder, "evaluator", words=["--job", str(job_path)]))
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


def _check_tasks(config: Recipe, job: EvaluationJob) -> None:
    """Raise ConfigError if the reward service cannot score a task, ServiceError if it does not answer."""
    with closing(reward_client(config)) as client:
        known = {info.task for info in client.rewards()}
    wanted = config.eval.published.tasks or sorted({prompt.task for prompt in job.prompts})
    missing = [task for task in wanted if task not in known]
    if missing:
        raise ConfigError(
            f"the reward service at {config.reward_url} does not score task {missing[0]!r}, but "
            f"{', '.join(sorted(known))}; add it to [reward.tasks], or change eval.published.tasks"
        )
