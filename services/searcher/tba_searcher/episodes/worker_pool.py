"""The worker processes of one environment, as the searcher sees them (tba/environments/worker.py is the other side).

    open      an episode gets a session in the worker with the fewest episodes; a missing worker is started
    called    the answer, or EpisodeError: the environment failed, its deadline passed, or its worker died
    closed    always, whatever happened

A worker that misses a deadline gets no more episodes, as a thread cannot be stopped: another worker takes its place. It
is killed when its last episode has ended, or at once if it does not even answer a ping.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import Any

from tba.config.environments import EnvironmentSection
from tba.environments import EpisodeError, Outcome, Policy, Reply, Step
from tba.errors import ConfigError
from tba.logs import get_logger

START_S = 120.0
"""Deadline for the import of an environment."""
PING_S = 5.0
CLOSE_S = 5.0
MAX_ANSWER_BYTES = 64 * 1024 * 1024
log = get_logger("episodes")


class WorkerPool:
    """Starts, calls and replaces the worker processes of the environment of a task."""

    def __init__(self, task: str, section: EnvironmentSection) -> None:
        self._task, self._section = task, section
        self._workers: list[_Worker] = []
        self._starting = asyncio.Lock()
        self.version = ""
        """Of the environment; known once a worker has started."""
        self.is_agent = False
        """Whether it asks for its replies itself; known then too."""

    async def start(self) -> None:
        """Start all workers; raise ConfigError if the environment cannot be loaded."""
        while len(self._workers) < self._section.num_workers:
            worker = _Worker(self._task, self._section)
            try:
                self.version, self.is_agent = await worker.start()
            except BaseException:
                worker.kill("it was not started")
                await worker.ended()
                raise
            self._workers.append(worker)

    async def open(self, episode_id: str) -> Session:
        """Return a session for an episode; raise EpisodeError if no worker can be started."""
        async with self._starting:  # one start for all that wait
            for worker in [each for each in self._workers if each.is_over]:
                self._workers.remove(worker)
            try:
                await self.start()
            except (ConfigError, OSError) as error:
                raise EpisodeError(str(error)) from None
            worker = min(self._workers, key=lambda each: each.num_open)
            worker.num_open += 1
        return Session(worker, episode_id, self._section.turn_timeout_s)

    async def close(self) -> None:
        """Kill all workers."""
        for worker in self._workers:
            worker.kill("the searcher ends")
        await asyncio.gather(*(worker.ended() for worker in self._workers))
        self._workers.clear()


class Session:
    """One episode in a worker."""

    def __init__(self, worker: _Worker, episode_id: str, timeout_s: float) -> None:
        self._worker, self._episode_id, self._timeout_s = worker, episode_id, timeout_s
        self.environment_s = 0.0
        """Time that the environment and its tools have taken so far."""
        self.tool_s = 0.0
        """Time of the tools in it."""
        self.num_answers = 0

    async def reset(self, seed: int, data: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Begin the episode; return its messages and the JSON schemas of its tools."""
        messages, tools = await self._call("reset", [seed, data])
        return messages, tools

    async def step(self, reply: Reply) -> Step:
        """Answer a reply."""
        calls = [[call.raw, call.status, call.name, call.arguments] for call in reply.tool_calls]
        step = Step(*await self._call("step", [reply.content, reply.reasoning, calls]))
        self.tool_s += step.info.get("tool_s", 0.0)
        return step

    async def play(self, seed: int, data: Any, policy: Policy) -> Outcome:
        """Let the agent play; the caller sets the deadline, and cancels."""
        arguments = [seed, data, [policy.url, policy.secret, policy.tokenizer]]
        return Outcome(*await self._worker.call("play", self._episode_id, arguments, None))

    def give_up(self, reason: str) -> None:
        """Give the worker no more episodes: it has missed a deadline."""
        self._worker.condemn(f"{self._episode_id}: {reason}")

    async def close(self) -> None:
        """Close the environment; a failure is logged."""
        try:
            await self._worker.call("close", self._episode_id, None, CLOSE_S)
        except EpisodeError as error:
            log.warning("environment not closed", episode_id=self._episode_id, detail=str(error))
        finally:
            self._worker.leave()

    async def _call(self, method: str, arguments: Any) -> Any:
        begun_s = asyncio.get_running_loop().time()
        try:
            return await self._worker.call(method, self._episode_id, arguments, self._timeout_s)
        finally:
            self.num_answers += 1
            self.environment_s += asyncio.get_running_loop().time() - begun_s


class _Worker:
    def __init__(self, task: str, section: EnvironmentSection) -> None:
        self._task, self._section = task, section
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self.num_open = 0
        """Sessions here."""
        self.is_over = False
        """It is dead, or gets no more episodes."""

    async def start(self) -> tuple[str, bool]:
        """Start the process; return the version of the environment, and whether it is an agent."""
        keys = {"environment", "tools", "settings"}
        section = {**self._section.model_dump(mode="json", include=keys), "what": f"environments.{self._task}"}
        self._process = await asyncio.create_subprocess_exec(
            # the task is for people who look at the processes
            *(sys.executable, "-m", "tba.environments.worker", self._task),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            # its secrets and prompts are for no proxy
            env=os.environ | {name: f"{os.environ.get(name, '')},127.0.0.1" for name in ("NO_PROXY", "no_proxy")},
            limit=MAX_ANSWER_BYTES,
        )
        assert self._process.stdout is not None
        self._write(section)
        try:
            async with asyncio.timeout(START_S):
                line = await self._process.stdout.readline()
        except TimeoutError:
            line = json.dumps({"error": f"environments.{self._task} was not loaded in {START_S:g} s"}).encode()
        hello = json.loads(line or b'{"error": "the process ended while it loaded the environment; its log says why"}')
        if "error" in hello:
            self.kill(hello["error"])
            raise ConfigError(hello["error"])
        self._tasks = [asyncio.create_task(each) for each in (self._read(self._process.stdout), self._watch())]
        log.info("environment worker started", task=self._task, pid=self._process.pid, version=hello["version"])
        return hello["version"], hello["is_agent"]

    async def call(self, method: str, episode_id: str, arguments: Any, timeout_s: float | None) -> Any:
        """Return the answer to a call; raise EpisodeError if there is none in time."""
        if self._process is None or self._process.returncode is not None or self._process.stdin is None:
            raise EpisodeError("its worker process is gone")
        self._num_calls += 1
        number = self._num_calls
        self._calls[number] = future = asyncio.get_running_loop().create_future()
        self._write([number, method, episode_id, arguments])
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except asyncio.CancelledError:
            if method == "play":  # the others end by themselves
                self._write([0, "cancel", "", number])
            raise
        except TimeoutError:
            self._write([0, "cancel", "", number])
            if method != "ping":
                self.condemn(f"{method} of {episode_id} took more than {timeout_s:g} s")
            raise EpisodeError(
                f"{method} took more than {timeout_s:g} s (environments.{self._task}.turn_timeout_s)"
            ) from None
        finally:
            self._calls.pop(number, None)

    def leave(self) -> None:
        """End a session."""
        self.num_open -= 1
        if self.is_over and not self.num_open:
            self.kill("it has missed a deadline")

    def kill(self, reason: str) -> None:
        """Kill the process with all that it has started; its calls fail."""
        self.is_over = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._fail(f"its worker process was killed: {reason}")

    async def ended(self) -> None:
        """Wait for the end of the process."""
        if self._process is not None:
            await self._process.wait()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def condemn(self, reason: str) -> None:
        """Give it no more episodes, and kill it at once if it does not even answer a ping."""
        if self.is_over:
            return
        self.is_over = True
        log.warning("environment worker is replaced", task=self._task, reason=reason, num_open=self.num_open)
        self._ping = asyncio.create_task(self._kill_if_blocked())

    async def _kill_if_blocked(self) -> None:
        try:
            await self.call("ping", "", None, PING_S)
        except EpisodeError:
            self.kill("its event loop is blocked")

    def _write(self, call: Any) -> None:
        process = self._process
        if process is not None and process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(json.dumps(call).encode() + b"\n")

    async def _read(self, answers: asyncio.StreamReader) -> None:
        try:
            while line := await answers.readline():
                number, failure, value = json.loads(line)
                future = self._calls.get(number)
                if future is None or future.done():  # its deadline has passed
                    continue
                if failure is None:
                    future.set_result(value)
                else:
                    future.set_exception(EpisodeError(failure[1], boundary=failure[0]))
        except (ValueError, TypeError) as error:  # a line beyond the limit, or what foreign code wrote
            self.kill(f"an answer is too large or none ({error})")

    async def _watch(self) -> None:
        """Wait for the end of the process; kill what it has left, and fail its calls."""
        assert self._process is not None
        code = await self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._tasks[0].cancel()  # a child that is left may hold the pipe
        if not self.is_over:
            log.error("environment worker died", task=self._task, exit_code=code, num_open=self.num_open)
        self.is_over = True
        self._fail(f"its worker process died with exit code {code}")

    def _fail(self, text: str) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EpisodeError(text))
