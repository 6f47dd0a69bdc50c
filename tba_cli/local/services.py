"""The services of a local run: the command of every child, the wait until a service is ready, the pool of searchers."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tba.api import SearchersInfo
from tba.clients import RewardClient
from tba.config import Recipe
from tba.errors import ConfigError, ServiceError
from tba.tls import check_ca_file
from tba_cli.child_processes import child_environ
from tba_cli.console import Console
from tba_cli.local.processes import ProcessManager, ProcessSpec
from tba_cli.prompts.reader import check_healthy
from tba_cli.redis_server import redis_command
from tba_cli.run_folder import RunFolder

READY_POLL_S = 0.1
QUIET_START_S = 2.0
"""A reason that is gone by then is not worth a line."""
DRAIN_SLACK_S = 10.0
MAX_PROBLEM_BYTES = 64 * 1024


class Services:
    """Makes the specification of every child.

    Args:
        environ: the environment that children inherit, mostly.
        redis_binary: path of redis-server.
    """

    def __init__(self, recipe: Recipe, folder: RunFolder, *, environ: Mapping[str, str], redis_binary: str) -> None:
        self._recipe = recipe
        self._folder = folder
        self._environ = environ
        self._redis_binary = redis_binary

    def redis(self) -> ProcessSpec:
        """Return the run's own Redis."""
        folder: Path = self._folder.redis_path
        conf = self._folder.redis_conf_path
        command = redis_command(self._redis_binary, socket=self._folder.redis_socket_path, folder=folder, conf=conf)
        environ = child_environ(self._environ, num_threads=1) | {"BLOCK_WITH": sys.executable}
        return ProcessSpec(name="redis", command=command, environ=environ, is_chatty=True, awaits_its_turn=True)

    def warm_start(self) -> ProcessSpec:
        """Return the program that makes the starting model."""
        return self._python("warm-start", "tba_cli.starter_models.warm_start", self._recipe.trainer.torch_num_threads)

    def buffer(self) -> ProcessSpec:
        """Return the buffer service."""
        # one thread: it waits for Redis most of the time
        return replace(self._python("buffer", "tba_buffer", 1), awaits_its_turn=True)

    def reward(self) -> ProcessSpec:
        """Return the reward service."""
        reward = self._python("reward", "tba_reward", 1, gpus=self._recipe.local.gpus.reward)
        return replace(reward, awaits_its_turn=True)

    def trainer(self) -> ProcessSpec:
        """Return the trainer; torchrun starts it where it has several processes."""
        section, gpus = self._recipe.trainer, self._recipe.local.gpus.trainer
        if section.num_processes == 1:
            return self._python("trainer", "tba_trainer", section.torch_num_threads, gpus=gpus)
        module, num = "tba_trainer.distributed.launch", str(section.num_processes)
        torchrun = self._python("trainer", module, section.torch_num_threads, num, gpus=gpus)
        # a second SIGTERM would have it leave its processes in the middle of their checkpoint
        return replace(torchrun, awaits_its_turn=True)

    def searcher(self, index: int) -> ProcessSpec:
        """Return searcher number `index`, from 0."""
        searcher_id, gpus = f"searcher-{index}", self._recipe.local.gpus.searchers
        return ProcessSpec(
            name=searcher_id,
            command=self._command("tba_searcher"),
            environ=child_environ(
                self._environ,
                num_threads=self._recipe.searcher.torch_num_threads,
                searcher_id=searcher_id,
                tokens_file=self._tokens_file("searcher"),
                # `tba scale` may ask for more searchers than the recipe lists GPUs for
                gpus=None if gpus is None else gpus[index % len(gpus)],
            ),
        )

    def _python(
        self, name: str, module: str, num_threads: int, *arguments: str, gpus: Sequence[int] | None = None
    ) -> ProcessSpec:
        return ProcessSpec(
            name=name,
            command=self._command(module, *arguments),
            environ=child_environ(
                self._environ, num_threads=num_threads, gpus=gpus, tokens_file=self._tokens_file(name)
            ),
        )

    def _tokens_file(self, name: str) -> Path | None:
        """Return the tokens file that this run made for the child, or None where the recipe has its own."""
        # a child gets only the tokens that it needs; a tokens file of the recipe is for everyone
        own = self._recipe.auth.tokens_file == str(self._folder.tokens_path("all"))
        return self._folder.tokens_path(name) if own and name in ("buffer", "reward", "searcher", "trainer") else None

    def _command(self, module: str, *arguments: str) -> list[str]:
        return [sys.executable, "-m", module, *arguments, "--config", str(self._folder.config_path)]


class SearcherPool:
    """Starts and stops searchers, so that as many run as are desired.

    Searcher i runs while i is below the desired number. Too many: the highest numbers get SIGTERM and drain (finish,
    push, give leases back). Too few: the lowest missing ones are started. The manager restarts a searcher that dies
    (`local.max_searcher_restarts`); one that it gave up is started only after the next request for a number.

        waits for                       unblocked by     deadline
        a searcher that drains          its end          the longer of local.stop_timeout_s and searcher.drain_s + 10 s,
                                                         then SIGKILL; meanwhile the run continues

    Args:
        recipe: its number holds until somebody asks for another one.
    """

    def __init__(self, recipe: Recipe, *, processes: ProcessManager, services: Services, console: Console) -> None:
        self._processes, self._services, self._console = processes, services, console
        self._recipe_num = recipe.searcher.num_searchers
        self._stop_s = max(recipe.local.stop_timeout_s, recipe.searcher.drain_s + DRAIN_SLACK_S)
        self._revision = 0
        self._desired: int | None = None
        self._stopping: set[asyncio.Task[int]] = set()

    async def keep(self, searchers: SearchersInfo | None) -> None:
        """Start missing searchers and stop superfluous ones, without waiting for those that drain.

        Args:
            searchers: the state in the buffer service; None: as the recipe says.

        Raises:
            ChildError: a searcher cannot be started.
        """
        desired = self._recipe_num if searchers is None or searchers.desired is None else searchers.desired
        revision = 0 if searchers is None else searchers.revision
        is_new_request, self._revision = revision != self._revision, revision
        if self._desired not in (None, desired):
            self._console.result(f"searchers: {self._desired} -> {desired}")
        self._desired = desired
        for name in sorted(self._processes.searchers(), key=_number, reverse=True):
            if _number(name) >= desired and self._processes.retire(name):
                stop = self._processes.stop_one(name, self._stop_s)
                self._stopping.add(task := asyncio.create_task(stop, name=f"stop {name}"))
                task.add_done_callback(self._stopping.discard)
        for number in range(desired):
            spec = self._services.searcher(number)
            if self._processes.may_start(spec.name, even_if_given_up=is_new_request):
                await self._processes.start(spec)


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


async def wait_until_ready(
    url: str,
    ca_file: str | None = None,
    *,
    on_progress: Callable[[str], None] | None = None,
    check: Callable[[], None] | None = None,
) -> None:
    """Return when GET /readyz answers 200. The caller bounds the wait.

    Args:
        ca_file: the authorities that are trusted for an https URL; None: the system's.
        on_progress: called with every new reason why the service is not ready, after its first moments.
        check: called in a thread each time that the service is not ready; it raises where waiting cannot help.

    Raises:
        ConfigError: the URL is https and `ca_file` cannot be used, or the certificate there is not accepted.
    """
    # the services are on this machine, whatever proxy the environment names
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if url.startswith("https://"):
        check_ca_file(ca_file)
        handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca_file)))
    opener, begun_s, shown = urllib.request.build_opener(*handlers), time.monotonic(), ""
    while (reason := await asyncio.to_thread(_why_not, opener, url)) is not None:
        if reason and check is not None:
            await asyncio.to_thread(check)
        if reason not in ("", shown) and on_progress is not None and time.monotonic() - begun_s > QUIET_START_S:
            on_progress(reason)
            shown = reason
        await asyncio.sleep(READY_POLL_S)


async def wait_for_reward(
    client: RewardClient, ca_file: str | None = None, *, on_progress: Callable[[str], None]
) -> None:
    """Return when the reward service is ready; a scorer that did not start ends the wait at once.

    Raises:
        ConfigError: a scorer did not start (says why), or as `wait_until_ready`.
    """

    def check() -> None:
        try:
            rewards = client.rewards()
        except ServiceError:  # the service ends or becomes ready right now; the next check tells
            return
        check_healthy(rewards)

    await wait_until_ready(client.base_url, ca_file, on_progress=on_progress, check=check)


def _why_not(opener: urllib.request.OpenerDirector, url: str) -> str | None:
    """Return why a service is not ready: None where it is, an empty text where it does not answer."""
    try:
        with opener.open(f"{url}/readyz", timeout=2.0):
            return None
    except urllib.error.HTTPError as error:
        with error:
            return _detail(error)
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):  # waiting cannot help
            raise ConfigError(
                f"{url}: its certificate is not accepted ({error.reason.verify_message}); correct tls.cert_file, or "
                "tls.ca_file"
            ) from None
        return ""
    except OSError:
        return ""


def _detail(error: urllib.error.HTTPError) -> str:
    """Return the sentence of a problem document."""
    try:
        return str(json.loads(error.read(MAX_PROBLEM_BYTES))["detail"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"it answers {error.code}"
