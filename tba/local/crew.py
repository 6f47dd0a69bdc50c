"""The crew: every child of one run, what the end of each one means, and the order in which they are stopped."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from tba.errors import ChildError
from tba.local.children import Child, ChildSpec, describe_exit
from tba.local.console import Console
from tba.local.guard import Guard
from tba.local.run_folder import RunFolder
from tba.main import EXIT_STOPPED
from tba.store.file import out_of_space

RESTART_DELAY_S = 1.0
STOP_ORDER = ("warm-start", "evaluator", "trainer", "searcher", "reward", "buffer", "redis")
WORKERS = ("warm-start", "evaluator")
"""Children that end by themselves when their work is done."""
T = TypeVar("T")


class Crew:
    """Starts, watches and stops children.

    Args:
        is_over: asks the buffer service whether the run is over; then exit code 0 of a trainer or searcher is right.
        max_searcher_restarts: over all searchers together.
        stop_timeout_s: from SIGTERM to SIGKILL, per stage of the stop order.
    """

    def __init__(
        self,
        *,
        folder: RunFolder,
        console: Console,
        guard: Guard,
        is_over: Callable[[], Awaitable[bool]],
        max_searcher_restarts: int,
        stop_timeout_s: float,
    ) -> None:
        self._folder = folder
        self._console = console
        self._guard = guard
        self._is_over = is_over
        self._max_searcher_restarts = max_searcher_restarts
        self._stop_timeout_s = stop_timeout_s
        self._children: dict[str, Child] = {}
        self._ended: asyncio.Queue[Child] = asyncio.Queue()
        self._num_searcher_restarts = 0
        self._run_is_over = False
        self._retired: set[Child] = set()
        """Searchers that were told to end, or not to be started again, because fewer are wanted."""
        self._given_up: set[Child] = set()

    async def start(self, spec: ChildSpec) -> Child:
        """Start a child and watch it from now on.

        Raises:
            ChildError: it cannot be started.
        """
        child = await Child.start(
            spec, log_path=self._folder.log_path(spec.name), on_line=self._console.child_line, guard=self._guard
        )
        self._children[spec.name] = child
        assert child.exit_code is not None
        child.exit_code.add_done_callback(lambda _: self._ended.put_nowait(child))
        return child

    async def watch(self) -> None:
        """Wait for children to end, for ever; returns never.

        Raises:
            ChildError: a child without which the run cannot go on has ended.
        """
        while True:
            child = await self._ended.get()
            assert child.exit_code is not None
            await self._judge(child, child.exit_code.result())

    def run_is_over(self) -> None:
        """From now on trainer and searchers end on their own, and that is right."""
        self._run_is_over = True

    def searchers(self) -> list[str]:
        """The names of all searchers that were ever started."""
        return [child.name for child in self._of("searcher")]

    def retire(self, name: str) -> bool:
        """Fewer searchers are wanted: the end of this one is no loss. Whether it has to be stopped."""
        child = self._children[name]
        is_news = child not in self._retired
        self._retired.add(child)
        return is_news and child.is_running

    async def stop_one(self, name: str, timeout_s: float) -> int:
        """SIGTERM for one child, SIGKILL after the timeout; its exit code."""
        child = self._children[name]
        code = await child.stop(timeout_s)
        self._console.say(f"{name} was stopped ({describe_exit(code)})")
        return code

    def may_start(self, name: str, *, though_given_up: bool) -> bool:
        """Whether nobody has this name: it never started, it was retired and has ended, or it was given up."""
        child = self._children.get(name)
        if child is None:
            return True
        if child.is_running or self._run_is_over:
            return False
        return child in self._retired or (though_given_up and child in self._given_up)

    async def wait_for(self, name: str) -> int:
        """The exit code of a child that is to end by itself, killed after the stop timeout."""
        return await self._children[name].wait_or_kill(self._stop_timeout_s)

    async def wait_for_searchers(self) -> None:
        """Let searchers end by themselves, up to the stop timeout."""
        waits = [child.wait_or_kill(self._stop_timeout_s) for child in self._of("searcher")]
        await asyncio.gather(*waits)

    async def stop(self) -> None:
        """SIGTERM in order: the trainer writes a checkpoint, searchers drain, then the services, Redis last.

        Without buffer or Redis nobody could finish anything, so the others are killed at once.
        """
        self.run_is_over()
        if any(child.name in ("redis", "buffer") and not child.is_running for child in self._children.values()):
            self.kill(except_for=("redis",))
        for kind in STOP_ORDER:
            await asyncio.gather(*(child.stop(self._stop_timeout_s) for child in self._of(kind)))

    def kill(self, *, except_for: tuple[str, ...] = ()) -> None:
        """SIGKILL everything that still runs."""
        for child in self._children.values():
            if child.name not in except_for:
                child.send(signal.SIGKILL)

    def _of(self, kind: str) -> list[Child]:
        return [child for name, child in self._children.items() if name == kind or name.startswith(f"{kind}-")]

    async def _judge(self, child: Child, code: int) -> None:
        is_searcher = child.name.startswith("searcher-")
        if child in self._retired or (self._run_is_over and (is_searcher or child.name == "trainer")):
            return
        if code == 0 and child.name in WORKERS:
            return
        if code == 0 and (is_searcher or child.name == "trainer") and await self._is_over():
            return
        if not is_searcher:
            raise ChildError(self._obituary(child, code))
        if self._num_searcher_restarts < self._max_searcher_restarts:
            self._num_searcher_restarts += 1
            count = f"{self._num_searcher_restarts} of {self._max_searcher_restarts}"
            self._console.result(f"warning: {self._obituary(child, code)}; starting it again ({count} restarts)")
            await asyncio.sleep(RESTART_DELAY_S)
            if child not in self._retired and not self._run_is_over:
                await self.start(child.spec)
            return
        self._given_up.add(child)
        num_left = sum(other.is_running and other not in self._retired for other in self._of("searcher"))
        if not num_left:
            raise ChildError(f"{self._obituary(child, code)}, and no searcher is left")
        self._console.result(f"warning: {self._obituary(child, code)}; the run goes on with {num_left}")

    def _obituary(self, child: Child, code: int) -> str:
        """Who ended how; prints the last log lines, or takes the one that explains the end."""
        log_path = self._folder.log_path(child.name)
        if child.name == "trainer" and code == EXIT_STOPPED:
            return f"trainer was stopped (SIGTERM) before the run was over [{log_path}]"
        reason = next((line for line in reversed(child.tail) if line.startswith("error: ")), None)
        if reason is not None:
            sentence = reason.removeprefix("error: ").removeprefix(f"{child.name}: ")
            return f"{child.name} ended ({describe_exit(code)}): {sentence} [{log_path}]"
        full = out_of_space(self._folder.path)
        more = "" if full is None else f"; {full}"
        if not child.tail:
            return f"{child.name} died ({describe_exit(code)}) and wrote nothing to {log_path}{more}"
        for line in child.tail:
            self._console.result(f"{child.name} | {line}")
        where = f"its last log lines are above, all of them in {log_path}"
        return f"{child.name} died ({describe_exit(code)}); {where}{more}"


async def with_crew(
    work: Callable[[Crew], Coroutine[Any, Any, T]],
    folder: RunFolder,
    console: Console,
    lock_fd: int | None,
    stop_timeout_s: float,
) -> T:
    """Do the work while a crew is watched; whatever happens, no child is left. A dead child explains a failure."""

    async def never() -> bool:
        return False

    guard = Guard(lock_fd)
    crew = Crew(
        folder=folder,
        console=console,
        guard=guard,
        is_over=never,
        max_searcher_restarts=0,
        stop_timeout_s=stop_timeout_s,
    )
    watch = asyncio.create_task(crew.watch(), name="watch the children")
    task = asyncio.create_task(work(crew), name="work")
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if watch.done():
            watch.result()
        return task.result()
    finally:
        for running in (task, watch):
            running.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
        await crew.stop()
        guard.close()
