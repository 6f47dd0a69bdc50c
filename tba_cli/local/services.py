"""Start the services of a local run: the command of every child, the wait for readiness, and the pool of searchers."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from tba.api import SearchersInfo
from tba.clients import RewardClient
from tba.clients.service_client import ServiceClient
from tba.config import Recipe
from tba.errors import ServiceError, UnavailableError
from tba_cli.child_processes import child_environ
from tba_cli.local.processes import ProcessManager, ProcessSpec
from tba_cli.prompts.reader import check_healthy
from tba_cli.redis_server import find_redis_server, redis_command
from tba_cli.run_folder import RunFolder

READY_POLL_S = 0.1
READY_TIMEOUT_S = 2.0
QUIET_START_S = 2.0
"""Reasons why a service is not ready are shown only after this time."""
DRAIN_SLACK_S = 10.0
WITH_TOKENS = ("buffer", "reward", "searcher", "trainer")


def process_spec(
    recipe: Recipe, folder: RunFolder, kind: str, number: int = 0, *, words: Sequence[str] = ()
) -> ProcessSpec:
    """Return the name, command and environment of a child process.

    Args:
        kind: a key of `processes.PARTS`; a trainer of several processes is started by torchrun.
        number: index of the searcher; the other kinds have no number.
        words: arguments before `--config`.
    """
    if kind == "redis":
        command = redis_command(
            find_redis_server(), socket=folder.redis_socket_path, folder=folder.redis_path, conf=folder.redis_conf_path
        )
        environ = child_environ(os.environ, num_threads=1) | {"BLOCK_WITH": sys.executable}
        return ProcessSpec(name="redis", kind="redis", command=command, environ=environ)
    trainer, gpus = recipe.trainer, recipe.local.gpus
    if kind == "trainer" and trainer.num_processes > 1:
        kind, words = "torchrun", [str(trainer.num_processes)]
    # `tba scale` may ask for more searchers than the recipe lists GPUs for
    searcher_gpus = None if gpus.searchers is None else gpus.searchers[number % len(gpus.searchers)]
    # one thread: services wait most of the time, and searchers may be many; OMP_NUM_THREADS gives these more
    module, num_threads, own_gpus = {
        "warm-start": ("tba_cli.starter_models.warm_start", trainer.torch_num_threads, None),
        "buffer": ("tba_buffer", 1, None),
        "reward": ("tba_reward", 1, gpus.reward),
        "trainer": ("tba_trainer", trainer.torch_num_threads, gpus.trainer),
        "torchrun": ("tba_trainer.distributed.launch", trainer.torch_num_threads, gpus.trainer),
        "searcher": ("tba_searcher", None, searcher_gpus),
        "evaluator": ("tba_searcher.evaluation", None, searcher_gpus),
    }[kind]
    # a child gets only the tokens that it needs; a tokens file of the recipe is for everyone
    has_own = recipe.auth.tokens_file == str(folder.tokens_path("all"))
    role = "trainer" if kind == "torchrun" else kind
    environ = child_environ(
        os.environ,
        num_threads=num_threads,
        searcher_id=f"searcher-{number}" if kind == "searcher" else None,
        tokens_file=folder.tokens_path(role) if has_own and role in WITH_TOKENS else None,
        gpus=own_gpus,
    )
    return ProcessSpec(
        name=f"searcher-{number}" if kind == "searcher" else role,
        kind=kind,
        command=[sys.executable, "-m", module, *words, "--config", str(folder.config_path)],
        environ=environ,
    )


class SearcherPool:
    """Starts and stops searchers, so that as many run as are desired.

    Searcher i runs while i is below the desired number. Too many: the highest numbers get SIGTERM and drain (finish,
    push, give leases back). Too few: the lowest missing ones are started. The manager restarts a searcher that dies
    (`MAX_SEARCHER_RESTARTS`); one that it gave up is started only after the next request for a number.

        waits for                       unblocked by     deadline
        a searcher that drains          its end          the longer of local.stop_timeout_s and searcher.drain_s + 10 s,
                                                         then SIGKILL; meanwhile the run continues

    Args:
        recipe: its number of searchers is desired until somebody asks for another number.
    """

    def __init__(self, recipe: Recipe, processes: ProcessManager) -> None:
        self._recipe, self._processes = recipe, processes
        self._stop_s = max(recipe.local.stop_timeout_s, recipe.searcher.drain_s + DRAIN_SLACK_S)
        self._revision = 0
        self._desired: int | None = None
        self._stopping: set[asyncio.Task[int]] = set()

    async def keep(self, searchers: SearchersInfo | None) -> None:
        """Start missing searchers and stop superfluous ones, without waiting until these have drained.

        Args:
            searchers: the desired number, as the buffer service has it; None: the number of the recipe.

        Raises:
            ChildError: a searcher cannot be started.
        """
        desired = None if searchers is None else searchers.desired
        desired = self._recipe.searcher.num_searchers if desired is None else desired
        revision = 0 if searchers is None else searchers.revision
        is_new_request, self._revision = revision != self._revision, revision
        if self._desired not in (None, desired):
            self._processes.console.result(f"searchers: {self._desired} -> {desired}")
        self._desired = desired
        for name in sorted(self._processes.searchers(), key=_number, reverse=True):
            if _number(name) >= desired and self._processes.retire(name):
                stop = self._processes.stop_one(name, self._stop_s)
                self._stopping.add(task := asyncio.create_task(stop, name=f"stop {name}"))
                task.add_done_callback(self._stopping.discard)
        for number in range(desired):
            spec = process_spec(self._recipe, self._processes.folder, "searcher", number)
            if self._processes.may_start(spec.name, even_if_given_up=is_new_request):
                await self._processes.start(spec)


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


async def wait_until_ready(
    url: str,
    ca_file: str | None = None,
    *,
    on_progress: Callable[[str], None] | None = None,
    is_enough: Callable[[], bool] = lambda: False,
) -> None:
    """Return when GET /readyz answers 200. The caller bounds the wait.

    Args:
        ca_file: the certificate authorities that are trusted for an https URL; None: the system's.
        on_progress: called with every new reason why the service is not ready, once QUIET_START_S have passed.
        is_enough: called in a thread each time that the service answers that it is not ready. True ends the wait. It
            raises if waiting cannot help.

    Raises:
        TlsError: the certificate there is not accepted.
    """
    client = ServiceClient(url, retry_s=0, timeout_s=READY_TIMEOUT_S, ca_file=ca_file)
    begun_s, shown = time.monotonic(), ""
    try:
        while (reason := await asyncio.to_thread(_why_not, client)) is not None:
            if reason and await asyncio.to_thread(is_enough):
                return
            if reason not in ("", shown) and on_progress is not None and time.monotonic() - begun_s > QUIET_START_S:
                on_progress(reason)
                shown = reason
            await asyncio.sleep(READY_POLL_S)
    finally:
        client.close()


async def wait_for_reward(
    client: RewardClient, ca_file: str | None = None, *, on_progress: Callable[[str], None]
) -> None:
    """Return when the reward service is ready; raise at once if a scorer did not start."""

    def is_enough() -> bool:
        with suppress(ServiceError):  # the service ends or becomes ready right now; the next check tells
            check_healthy(client.rewards())
        return False

    await wait_until_ready(client.base_url, ca_file, on_progress=on_progress, is_enough=is_enough)


def _why_not(client: ServiceClient) -> str | None:
    """Return why a service is not ready: None if it is ready, an empty text if it does not answer."""
    try:
        problem = client.not_ready()
    except UnavailableError:
        return ""
    return None if problem is None else str(problem)
