"""The child processes of one run: start, log, watch and stop them.

Every child has its own process group, and its output is copied to a log file line by line. The manager decides what
the end of a child means, and in which order children are stopped. systemd, SLURM and containers may send SIGTERM to
every process at once. So children that other children need are started with SIGTERM blocked, and stopped by SIGINT.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from tba.early_signals import EXIT_STOPPED
from tba.errors import ChildError, ServiceError
from tba.service_main import EXIT_CONFIG
from tba.store.file import explain_no_space
from tba_cli.console import Console
from tba_cli.orphan_reaper import OrphanReaper
from tba_cli.run_folder import RunFolder

TAIL_LINES = 15
READ_BYTES = 64 * 1024
OUTPUT_END_TIMEOUT_S = 2.0
RESTART_DELAY_S = 1.0
MAX_SEARCHER_RESTARTS = 3
"""Most restarts of dead searchers in one start of a run, all together; then the run continues with the others."""
DYING_S = 1.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rules for all processes of one kind."""

    ends: Literal["never", "by itself", "with the run"] = "never"
    """When the process may end with exit code 0 without a failure."""
    is_restarted: bool = False
    """Whether a process that dies is started again. Otherwise its death ends the run."""
    awaits_its_turn: bool = False
    """Whether SIGTERM is blocked, also for its own children unless they unblock it; SIGINT then asks it to end."""
    is_chatty: bool = False
    """Whether its output goes to its log file only, and not to the console."""


PARTS = {
    "warm-start": Part(ends="by itself"),
    "evaluator": Part(ends="by itself"),
    "trainer": Part(ends="with the run"),
    # a second SIGTERM would have it leave its processes in the middle of their checkpoint
    "torchrun": Part(ends="with the run", awaits_its_turn=True),
    "searcher": Part(ends="with the run", is_restarted=True),
    "reward": Part(awaits_its_turn=True),
    "buffer": Part(awaits_its_turn=True),
    "redis": Part(awaits_its_turn=True, is_chatty=True),
}
"""The kinds of processes, in the order in which they are stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """How to start a child."""

    name: str
    kind: str
    command: Sequence[str]
    environ: Mapping[str, str] = field(repr=False)

    @property
    def part(self) -> Part:
        """The rules for processes of its kind."""
        return PARTS[self.kind]


class ChildProcess:
    """A child that was started.

    Waits: the copy of the log waits for output (unblocked by the child, or by its end). `exit_code` waits for the end
    of the process, then at most 2 s for the end of its output.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        process: asyncio.subprocess.Process,
        log_path: Path,
        on_line: Callable[[str, str], None],
        reaper: OrphanReaper,
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process = process
        self._reaper = reaper
        self._copy = asyncio.create_task(self._copy_output(log_path, on_line), name=f"log of {spec.name}")
        self.exit_code = asyncio.create_task(self._wait(), name=f"end of {spec.name}")

    @classmethod
    async def start(
        cls, spec: ProcessSpec, *, log_path: Path, on_line: Callable[[str, str], None], reaper: OrphanReaper
    ) -> ChildProcess:
        """Start the process; `on_line(name, line)` is called with its output.

        Raises:
            ChildError: the program cannot be started.
        """
        blocked = (signal.SIGHUP, signal.SIGTERM) if spec.part.awaits_its_turn else (signal.SIGHUP,)
        # A child inherits the mask, and no handler of its own (Redis has one for SIGTERM) undoes that. It is forked
        # before the first wait. Another start may begin in that wait, so the mask of before would be that one's.
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(spec.environ),
                # Ctrl-C of the terminal must reach the supervisor alone: it stops the children in order
                start_new_session=True,
            )
        except OSError as error:
            raise ChildError(f"{spec.name} could not be started ({spec.command[0]}: {error.strerror})") from None
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        try:
            # nothing else would end this child after a kill of the supervisor
            reaper.add(process.pid)
        except OSError:
            os.killpg(process.pid, signal.SIGKILL)
            raise ChildError(
                f"{spec.name} was not started: the process that kills children with `tba run` is gone"
            ) from None
        return cls(spec, process, log_path, on_line, reaper)

    @property
    def pid(self) -> int:
        """Process id, which is also the id of the process group."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process.returncode is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process if it runs; SIGKILL goes to its whole process group."""
        if not self.is_running:
            return
        try:
            if number == signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            return

    async def stop(self, timeout_s: float) -> int:
        """Ask the process to end, wait up to `timeout_s`, then send SIGKILL; return the exit code."""
        self.send(signal.SIGINT if self.spec.part.awaits_its_turn else signal.SIGTERM)
        return await self.wait_or_kill(timeout_s)

    async def wait_or_kill(self, timeout_s: float) -> int:
        """Wait up to `timeout_s` for the process to end, then send SIGKILL; return the exit code."""
        await asyncio.wait({self.exit_code}, timeout=timeout_s)
        self.send(signal.SIGKILL)
        return await asyncio.shield(self.exit_code)  # a cancelled waiter must not cancel the wait of the others

    async def _wait(self) -> int:
        code = await self._process.wait()
        # a grandchild may hold the pipe open
        await asyncio.wait({self._copy}, timeout=OUTPUT_END_TIMEOUT_S)
        self._copy.cancel()
        # processes that the child started must not outlive it
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):  # the reaper is gone: it has nothing to forget
            self._reaper.discard(self.pid)
        return code

    async def _copy_output(self, log_path: Path, on_line: Callable[[str, str], None]) -> None:
        output = self._process.stdout
        assert output is not None
        rest = b""
        with log_path.open("ab", buffering=0) as log:
            while data := await output.read(READ_BYTES):
                with contextlib.suppress(OSError):  # a full disk must not block the child; Redis reports the disk
                    log.write(data)
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._see(line, on_line)
                if len(rest) > READ_BYTES:  # a line without end must not fill the memory
                    self._see(rest, on_line)
                    rest = b""
        if rest:
            self._see(rest, on_line)

    def _see(self, line: bytes, on_line: Callable[[str, str], None]) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        self.tail.append(text)
        if not self.spec.part.is_chatty:
            on_line(self.name, text)


def describe_exit(code: int) -> str:
    """Return an exit code in words: `exit code 2`, or `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


@dataclass(kw_only=True, eq=False)
class ProcessManager:
    """Starts, watches and stops the children of a run."""

    folder: RunFolder
    console: Console
    reaper: OrphanReaper
    stop_timeout_s: float
    """Seconds from SIGTERM to SIGKILL, for each stage of the stop order."""
    is_over: Callable[[], Awaitable[bool]] | None = None
    """Asks the buffer service whether the run is over; only then may a trainer or searcher end with code 0."""
    _children: dict[str, ChildProcess] = field(default_factory=dict, init=False)
    _ended: asyncio.Queue[ChildProcess] = field(default_factory=asyncio.Queue, init=False)
    _num_searcher_restarts: int = field(default=0, init=False)
    _run_is_over: bool = field(default=False, init=False)
    _retired: set[ChildProcess] = field(default_factory=set, init=False)
    """Searchers that are no longer desired: their end is no failure, and they are not restarted."""
    _given_up: set[ChildProcess] = field(default_factory=set, init=False)
    """Searchers that died after the last allowed restart."""

    async def start(self, spec: ProcessSpec) -> ChildProcess:
        """Start a child and watch it from now on.

        Raises:
            ChildError: it cannot be started.
        """
        child = await ChildProcess.start(
            spec, log_path=self.folder.log_path(spec.name), on_line=self.console.child_line, reaper=self.reaper
        )
        self._children[spec.name] = child
        child.exit_code.add_done_callback(lambda _: self._ended.put_nowait(child))
        return child

    async def watch(self) -> None:
        """Wait for children to end, forever; restart searchers that die, up to MAX_SEARCHER_RESTARTS times in all.

        Raises:
            ChildError: a child without which the run cannot continue has ended.
        """
        while True:
            child = await self._ended.get()
            code, part = child.exit_code.result(), child.spec.part
            if child in self._retired or (self._run_is_over and part.ends == "with the run"):
                continue
            if code == 0 and part.ends == "by itself":
                continue
            if code == 0 and part.ends == "with the run" and self.is_over is not None and await self.is_over():
                continue
            end = self._describe_end(child, code)
            if not part.is_restarted:
                raise ChildError(end)
            if code != EXIT_CONFIG and self._num_searcher_restarts < MAX_SEARCHER_RESTARTS:
                self._num_searcher_restarts += 1
                count = f"{self._num_searcher_restarts} of {MAX_SEARCHER_RESTARTS}"
                self.console.result(f"warning: {end}; starting it again ({count} restarts)")
                await asyncio.sleep(RESTART_DELAY_S)
                # both may have changed during the delay
                if child not in self._retired and not self._run_is_over:
                    await self.start(child.spec)
                continue
            self._given_up.add(child)
            num_left = sum(other.is_running and other not in self._retired for other in self._of("searcher"))
            if not num_left:
                raise ChildError(f"{end}, and no searcher is left")
            self.console.result(f"warning: {end}; the run continues with {num_left}")

    def run_is_over(self) -> None:
        """Note that the run is over: from now on the end of a trainer or searcher is no failure."""
        self._run_is_over = True

    def searchers(self) -> list[str]:
        """Return the names of all searchers that were ever started."""
        return [child.name for child in self._of("searcher")]

    def retire(self, name: str) -> bool:
        """Mark a searcher as no longer desired; return whether the caller has to stop it."""
        child = self._children[name]
        is_new = child not in self._retired
        self._retired.add(child)
        return is_new and child.is_running

    async def stop_one(self, name: str, timeout_s: float) -> int:
        """Stop one child with SIGTERM, and SIGKILL after the timeout; return its exit code."""
        child = self._children[name]
        code = await child.stop(timeout_s)
        self.console.info(f"{name} was stopped ({describe_exit(code)})")
        return code

    def may_start(self, name: str, *, even_if_given_up: bool) -> bool:
        """Return whether a searcher may start: it is new, or retired and ended (or given up, if `even_if_given_up`)."""
        child = self._children.get(name)
        if child is None:
            return True
        if child.is_running or self._run_is_over:
            return False
        return child in self._retired or (even_if_given_up and child in self._given_up)

    async def wait_for(self, name: str) -> int:
        """Wait for a child to end by itself, and kill it after the stop timeout; return its exit code."""
        return await self._children[name].wait_or_kill(self.stop_timeout_s)

    async def stop(self) -> None:
        """Stop in order: the trainer writes a checkpoint, searchers drain, then the services end, Redis last."""
        self.run_is_over()
        # without buffer or Redis no other child can finish its work, so the others are killed at once
        if any(child.name in ("redis", "buffer") and not child.is_running for child in self._children.values()):
            self.kill(except_for=("redis",))
        for kind in PARTS:
            await asyncio.gather(*(child.stop(self.stop_timeout_s) for child in self._of(kind)))

    def kill(self, *, except_for: tuple[str, ...] = ()) -> None:
        """Send SIGKILL to every child that still runs, except for the named ones."""
        for child in self._children.values():
            if child.name not in except_for:
                child.send(signal.SIGKILL)

    def _of(self, kind: str) -> list[ChildProcess]:
        return [child for child in self._children.values() if child.spec.kind == kind]

    def _describe_end(self, child: ChildProcess, code: int) -> str:
        """Return how a child ended, with the `error:` line of its log. Without such a line, print its last lines."""
        log_path = self.folder.log_path(child.name)
        if child.name == "trainer" and code == EXIT_STOPPED:
            return f"trainer was stopped (SIGTERM) before the run was over [{log_path}]"
        reason = next((line for line in reversed(child.tail) if line.startswith("error: ")), None)
        if reason is not None:
            sentence = reason.removeprefix("error: ").removeprefix(f"{child.name}: ")
            return f"{child.name} ended ({describe_exit(code)}): {sentence} [{log_path}]"
        full = explain_no_space(self.folder.path)
        more = "" if full is None else f"; {full}"
        if not child.tail:
            return f"{child.name} died ({describe_exit(code)}) and wrote nothing to {log_path}{more}"
        for line in child.tail:
            self.console.result(f"{child.name} | {line}")
        where = f"its last log lines are above, all of them in {log_path}"
        return f"{child.name} died ({describe_exit(code)}); {where}{more}"


async def until_first_end(work: Coroutine[Any, Any, T], *others: Coroutine[Any, Any, None]) -> T:
    """Run all coroutines until `work` returns or one of them raises; return the result of `work`, or raise the error.

    The `others` never return. If one fails along with `work`, its error is raised, because a child's death explains it.
    """
    task, rest = asyncio.create_task(work), [asyncio.create_task(each) for each in others]
    try:
        await asyncio.wait({task, *rest}, return_when=asyncio.FIRST_COMPLETED)
        if task.done() and isinstance(task.exception(), ServiceError):  # a child may be dying right now
            await asyncio.wait(rest, timeout=DYING_S, return_when=asyncio.FIRST_COMPLETED)
        for each in (*rest, task):
            if each.done():
                each.result()
        return task.result()
    finally:
        for each in (task, *rest):
            each.cancel()
        await asyncio.gather(task, *rest, return_exceptions=True)


async def run_with_processes(
    work: Callable[[ProcessManager], Coroutine[Any, Any, T]],
    folder: RunFolder,
    console: Console,
    lock_fd: int | None,
    stop_timeout_s: float,
) -> T:
    """Run `work` with a process manager that watches its children; stop all children at the end, also after an error.

    Raises:
        ChildError: a child died; this takes precedence over an error of the work.
    """
    reaper = OrphanReaper(lock_fd)
    processes = ProcessManager(folder=folder, console=console, reaper=reaper, stop_timeout_s=stop_timeout_s)
    try:
        return await until_first_end(work(processes), processes.watch())
    finally:
        await processes.stop()
        reaper.close()
