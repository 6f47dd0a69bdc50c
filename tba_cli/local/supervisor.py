"""The supervisor of a local run: starts the children in order, watches them, stops at the first failure.

                     +------------------------------ supervisor (this process) -----------------------------+
    Ctrl-C, SIGTERM ->  _stop_requested      _work: start ... poll ... collect      manager: ends of children |
                     +----+------------------------------+-----------------------------------------+--------+
                          | the first of the three that ends decides how the run ends              | exit codes
                          v                              | HTTP, once a second; searcher pool      |
       reaper (pipe; kills all                           v                                         |
       if the supervisor dies)   redis <--- buffer <--- trainer, searchers ---> reward   ----------+

    task                waits for                          unblocked by                deadline
    _work (start)       redis answers PING                 the append-only file read   local.start_timeout_s
    _work (start)       buffer, reward: /readyz is 200     the service; a scorer fails local.start_timeout_s
    _work (start)       the snapshot is loaded             the buffer                  silence: start_timeout_s
    _work (start)       the warm start's end               that child                  its own max_steps
    _work (run)         state done or failed               trainer, `tba stop`         the run; silence: start_timeout_s
    _work (end)         trainer and searchers end          state done                  stop_timeout_s, then SIGKILL
    manager.watch       any child ends                     that child                  none: it only reacts
    _stop_requested     a signal                           a person, the system        none: it only reacts
    manager.stop        a stage of children ends           SIGTERM, or SIGINT          stop_timeout_s, then SIGKILL

A second Ctrl-C, or the same signal again, kills everything at once while stopping.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing, suppress
from dataclasses import InitVar, dataclass
from typing import Any

from tba.api import LedgerEntry, Prompt, RunCommand, RunInfo
from tba.clients import BufferClient, RewardClient
from tba.config import Recipe
from tba.errors import ChildError, ConfigError, OlderRedisError, ServiceError, WaitTimeoutError
from tba.store import ObjectStore
from tba.tokens import operator_client_token
from tba.weights import check_redis_is_newest
from tba_cli.console import Console
from tba_cli.local.processes import ChildProcess, ProcessManager, until_first_end
from tba_cli.local.progress import until_over
from tba_cli.local.resume import this_program
from tba_cli.local.services import SearcherPool, process_spec, wait_for_reward, wait_until_ready
from tba_cli.orphan_reaper import OrphanReaper
from tba_cli.prompts.reader import check_healthy, check_tasks, upload_prompts
from tba_cli.redis_server import wait_for_redis
from tba_cli.reports.history import History, load_timing
from tba_cli.reports.ledger import ledger_lines
from tba_cli.reports.outputs import download_export, write_outputs
from tba_cli.reports.sample import first_batch, task_samples
from tba_cli.run_folder import RunFolder, view_hint
from tba_cli.setup.origin import until_loaded

CALL_RETRY_S = 5.0
CALL_TIMEOUT_S = 10.0
SAME_REQUEST_S = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequestedError(Exception):
    """Ctrl-C, SIGTERM or SIGHUP has asked the run to stop; it can be resumed later."""


@dataclass(kw_only=True, eq=False)
class Supervisor:
    """Starts, watches and stops the children of a local run, once."""

    recipe: Recipe
    """The recipe with real ports and addresses, as in config.json."""
    original: Recipe
    """The recipe as resolved before ports were chosen; a resume starts from it."""
    folder: RunFolder
    store: ObjectStore
    prompts: Sequence[Prompt]
    console: Console
    needs_warm_start: bool
    """Whether the starting model has to be made first."""
    lock_fd: InitVar[int]
    """Descriptor of the run folder's lock."""

    def __post_init__(self, lock_fd: int) -> None:
        recipe = self.recipe
        self._calls: dict[str, Any] = {
            "token": operator_client_token(recipe.auth.tokens_file),
            "timeout_s": CALL_TIMEOUT_S,
            "ca_file": recipe.tls.ca_file,
        }
        self._client = BufferClient(recipe.buffer_url, retry_s=CALL_RETRY_S, **self._calls)
        self._rewards = RewardClient(recipe.reward_url, retry_s=CALL_RETRY_S, **self._calls)
        self._stop_requested = asyncio.Event()
        self._first_signal, self._signalled_at_s = signal.SIGINT, 0.0
        self._reaper = OrphanReaper(lock_fd)
        self._processes = ProcessManager(
            folder=self.folder,
            console=self.console,
            reaper=self._reaper,
            is_over=self._is_over,
            stop_timeout_s=recipe.local.stop_timeout_s,
        )
        self._pool = SearcherPool(recipe, self._processes)
        self._began = self.folder.has_begun
        """Whether the first batch was described, or was that of an earlier start."""
        self._loss = ""
        """The last description of a loss of Redis that nobody has accepted, while the buffer is not ready."""

    async def run(self) -> dict[str, Any]:
        """Run to the end and return the summary; all children are stopped before this returns or raises.

        Raises:
            StopRequestedError: a signal asked for a stop; everything was stopped cleanly.
            ChildError: a child died, or the run failed.
            TbaError: a service could not be used.
        """
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            return await until_first_end(self._work(), self._wait_for_signal(), self._processes.watch())
        except ChildError as error:
            self.console.result(f"stopping: {error}")
            raise
        finally:
            # first: other commands must not find services that are about to end
            self.folder.endpoints_path.unlink(missing_ok=True)
            await self._processes.stop()
            self._reaper.close()
            self._client.close()
            self._rewards.close()
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop_requested.is_set():
            # the end of a login session sends SIGTERM and SIGHUP at once: that is one request
            is_pair = {number, self._first_signal} == {signal.SIGTERM, signal.SIGHUP}
            if is_pair and time.monotonic() - self._signalled_at_s < SAME_REQUEST_S:
                return
            self.console.result("stopping at once: all children are killed")
            self._processes.kill()
            return
        self.console.result("stopping: the trainer writes a checkpoint, searchers drain (again: stop at once)")
        self._first_signal, self._signalled_at_s = number, time.monotonic()
        self._stop_requested.set()

    async def _wait_for_signal(self) -> None:
        await self._stop_requested.wait()
        raise StopRequestedError

    async def _work(self) -> dict[str, Any]:
        if self.needs_warm_start:
            # its time is not part of the run's
            self.console.info(f"making the starting model {self.recipe.model.path} (once; later runs reuse it)")
            begun_s = time.monotonic()
            child = await self._start("warm-start")
            if await asyncio.shield(child.exit_code) != 0:
                await asyncio.Event().wait()  # the watch of the manager explains the end, and cancels this
            warm_start_s = time.monotonic() - begun_s
            self._write_timing(warm_start_s=warm_start_s)
            self.console.info(f"starting model ready after {warm_start_s:.0f} s")
        await self._start_services()
        info = await self._prepare_run()
        # a supervisor that died between the run's last step and its summary leaves a run that only lacks the summary
        is_done = info.state == "done"
        if not is_done:
            await self._start("trainer")
            await self._pool.keep(info.searchers)
            await until_over(
                self._client,
                self.console,
                num_steps=self.recipe.trainer.num_steps,
                silence_s=self.recipe.local.start_timeout_s,
                failed_lineage=info.lineage if info.state == "failed" else None,
                on_run=self._on_run,
            )
        return await self._finish(trainer_ran=not is_done)

    async def _on_run(self, run: RunInfo) -> None:
        """Keep the searchers; once there is a first batch, say what its answers show."""
        await self._pool.keep(run.searchers)
        if self._began or not run.step:
            return
        with suppress(ServiceError):  # the next call asks again
            groups = await asyncio.to_thread(first_batch, self._client, group_size=self.recipe.sampling.group_size)
            self._began = groups is not None
            for sample in task_samples(groups or []):
                self.console.info(f"first batch: {sample.line(self.recipe)}")
                if (advice := sample.advice(self.recipe)) is not None:
                    self.console.result(f"warning: first batch: {'; '.join(advice)}")

    async def _start(self, kind: str) -> ChildProcess:
        return await self._processes.start(process_spec(self.recipe, self.folder, kind))

    async def _start_services(self) -> None:
        self.console.info(f"run {self.recipe.run.name!r} in {self.folder.path}")
        self._write_timing(starts=(*load_timing(self.folder).starts, time.time()))
        # in order: the buffer is not ready before Redis has read its file
        await self._start("redis")
        await self._within("redis", wait_for_redis(self.folder.redis_socket_path, self.folder.redis_password_path))
        await self._start("buffer")
        ca_file = self.recipe.tls.ca_file
        ready = wait_until_ready(
            self.recipe.buffer_url, ca_file, on_progress=self._not_ready("buffer"), is_enough=self._explain_loss
        )
        await self._within("buffer", ready)
        self._loss = ""
        await self._start("reward")
        await self._within("reward", wait_for_reward(self._rewards, ca_file, on_progress=self._not_ready("reward")))

    def _not_ready(self, name: str) -> Callable[[str], None]:
        return lambda reason: self.console.info(f"{name} is not ready yet: {reason}")

    def _explain_loss(self) -> bool:
        """Print the command that accepts a loss of Redis, once per loss; return False, so that the caller waits on."""
        loss = None
        # one attempt, without the retries of the other calls
        with closing(BufferClient(self.recipe.buffer_url, retry_s=0, **self._calls)) as client, suppress(ServiceError):
            loss = client.run().loss
        if loss is None or loss == self._loss:
            return False
        self._loss = loss
        self._write_endpoints()  # the command finds the buffer by them
        command = [*this_program(), "buffer", "accept-loss", "--run-dir", os.path.relpath(self.folder.path)]
        self.console.result(f"buffer refuses to continue: {loss}")
        self.console.result(
            f"to continue without what is lost, type within {self.recipe.local.start_timeout_s:.0f} s in another "
            f"terminal: {shlex.join(command)}"
        )
        return False

    async def _prepare_run(self) -> RunInfo:
        """Prepare the run in the services, and return its state.

        Wait until a snapshot is loaded, check and upload the prompts, write the addresses, and resume a paused run.
        This writes recipe.json, so the run can be resumed from here on.
        """
        if self.recipe.run.snapshot is not None:
            origin = await until_loaded(self._client, self.console, silence_s=self.recipe.local.start_timeout_s)
            self.console.info(f"begun with {origin.num_rollouts} rollouts of {origin.source}")
        await asyncio.to_thread(self._check)
        # half: JSON escapes can lengthen a text
        max_chunk_bytes = self.recipe.buffer.max_body_bytes // 2
        # idempotent: a resume uploads the same prompts again
        await asyncio.to_thread(upload_prompts, self._client, self.prompts, max_chunk_bytes=max_chunk_bytes)
        self._write_endpoints()
        for path in (self.folder.ended_path, self.folder.summary_path):  # a finished run that trains on is not over
            path.unlink(missing_ok=True)
        self.folder.write_json(self.folder.recipe_path, self.original.model_dump(mode="json"))
        self.console.info(f"buffer {self.recipe.buffer_url}  reward {self.recipe.reward_url}")
        self.console.info(f"look:  {view_hint(self.folder)}")
        info = await asyncio.to_thread(self._client.run)
        if info.state == "paused" or (info.state == "done" and info.step < self.recipe.trainer.num_steps):
            return await asyncio.to_thread(self._client.command, "resume", RunCommand(reason="tba run --resume"))
        return info  # a run that is stopping or failed continues when the trainer takes a new lineage

    def _write_endpoints(self) -> None:
        """Write the addresses of the services, for other commands."""
        endpoints = {
            "run": self.recipe.run.name,
            "buffer_url": self.recipe.buffer_url,
            "reward_url": self.recipe.reward_url,
            "redis_url": self.recipe.buffer.redis_url,
            "store_url": self.recipe.store.url,
            "tokens_file": self.recipe.auth.tokens_file,
            "ca_file": self.recipe.tls.ca_file,
        }
        self.folder.write_json(self.folder.endpoints_path, endpoints)

    def _check(self) -> None:
        """Check that something pays for every prompt. If the run has begun, also check its Redis and its step.

        Raises:
            ConfigError: nothing pays for a prompt, or the run has made more steps than the recipe asks for.
            OlderRedisError: Redis does not hold the run, which would begin again.
        """
        rewards = self._rewards.rewards()
        paid = self.recipe.paid_by_environment
        check_tasks(self.prompts, sorted({*(reward.task for reward in rewards), *paid}))
        asked = {prompt.task for prompt in self.prompts} - paid
        check_healthy(reward for reward in rewards if reward.task in asked)
        if not self.folder.has_begun:
            return
        stats, run, num_steps = self._client.stats(), self.recipe.run.name, self.recipe.trainer.num_steps
        if not stats.num_prompts_train + stats.num_prompts_heldout:
            raise OlderRedisError(
                f"run {run!r} has begun, and its Redis ({self.folder.redis_path}) holds nothing of it: the files are "
                "gone, or another redis-server is used than before (PATH), which cannot read them. "
                "Nothing was changed. Put that right, or begin again with --fresh, or another run with --run-name"
            )
        check_redis_is_newest(self.store, run, self._client.run)
        if (made := self._client.run().step) > num_steps:
            raise ConfigError(f"run {run!r} has made {made} steps, and trainer.num_steps is {num_steps}: ask for more")

    async def _finish(self, *, trainer_ran: bool) -> dict[str, Any]:
        """Collect history, ledger and model from the services, and write the outputs; return the summary."""
        self._processes.run_is_over()
        if trainer_ran:
            code = await self._processes.wait_for("trainer")
            if code != 0:
                self.console.result(f"warning: the trainer ended with exit code {code} after the run was done")
        info, stats, said = await asyncio.to_thread(
            lambda: (self._client.run(), self._client.stats(), self._client.summary())
        )
        settings = await asyncio.to_thread(self._client.all_settings)
        ledger = await asyncio.to_thread(lambda: list(ledger_lines(self._client)))
        num_files = await asyncio.to_thread(download_export, self.store, run=self.recipe.run.name, folder=self.folder)
        if self.recipe.trainer.export and not num_files:
            self.console.result("warning: the trainer exported no model, so there is no model/ in the run folder")
        await asyncio.gather(*map(self._processes.wait_for, self._processes.searchers()))
        history = History(
            seed=self.recipe.run.seed,
            num_steps=self.recipe.trainer.num_steps,
            sync_interval_steps=self.recipe.trainer.sync_interval,
            is_offline=self.recipe.is_offline,
            info=info,
            # the ids would make most of the file, and nothing is computed from them
            ledger=[
                line.model_copy(update={"rollout_ids": []}) if isinstance(line, LedgerEntry) else line
                for line in ledger
            ],
            settings=settings,
            stats=stats,
            summary=said,
            timing=load_timing(self.folder),
        )
        return await asyncio.to_thread(write_outputs, self.folder, history)

    async def _is_over(self) -> bool:
        try:
            return (await asyncio.to_thread(self._client.run)).state in ("done", "failed")
        except ServiceError:
            return False

    async def _within(self, name: str, ready: Awaitable[None]) -> None:
        timeout_s = self.recipe.local.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await ready
        except TimeoutError:
            raise WaitTimeoutError(
                f"{name} was not ready within {timeout_s:.0f} s (local.start_timeout_s); "
                f"{self._loss or f'see {self.folder.log_path(name)}'}"
            ) from None

    def _write_timing(self, **changes: Any) -> None:
        timing = load_timing(self.folder).model_copy(update=changes)
        self.folder.write_json(self.folder.timing_path, timing.model_dump(mode="json"))
