"""One child process: started in its own process group, its output copied to a log file line by line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tba.errors import ChildError
from tba.local.guard import Guard

TAIL_LINES = 15
READ_BYTES = 64 * 1024
OUTPUT_END_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """How to start a child. `niceness` above 0 lets others go first; `is_chatty` output stays in the log file."""

    name: str
    command: Sequence[str]
    environ: Mapping[str, str] = field(repr=False)
    niceness: int = 0
    is_chatty: bool = False


class Child:
    """A running child.

    Waits: the log copy waits for output (unblocked by the child, or by its end); `exit_code` waits for the end of the
    process, then at most 2 s for the end of its output (a grandchild may hold the pipe open).
    """

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, guard: Guard) -> None:
        self.spec = spec
        self.name = spec.name
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process = process
        self._guard = guard
        self._copy: asyncio.Task[None] | None = None
        self.exit_code: asyncio.Task[int] | None = None

    @classmethod
    async def start(
        cls, spec: ChildSpec, *, log_path: Path, on_line: Callable[[str, str], None], guard: Guard
    ) -> Child:
        """Start the process; `on_line(name, line)` sees its output.

        Raises:
            ChildError: the program cannot be started.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(spec.environ),
                start_new_session=True,
            )
        except OSError as error:
            raise ChildError(f"{spec.name} could not be started ({spec.command[0]}: {error.strerror})") from None
        try:
            guard.add(process.pid)
        except OSError:
            os.killpg(process.pid, signal.SIGKILL)
            raise ChildError(
                f"{spec.name} was not started: the guard process that ends children with `tba run` is gone"
            ) from None
        if spec.niceness:
            os.setpriority(os.PRIO_PROCESS, process.pid, spec.niceness)
        child = cls(spec, process, guard)
        child._copy = asyncio.create_task(child._copy_output(log_path, on_line), name=f"log of {spec.name}")
        child.exit_code = asyncio.create_task(child._wait(), name=f"end of {spec.name}")
        return child

    @property
    def pid(self) -> int:
        """Process id, which is also the process group."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process.returncode is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process; SIGKILL goes to its whole group."""
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
        """SIGTERM, up to `timeout_s` to end, then SIGKILL; returns the exit code."""
        self.send(signal.SIGTERM)
        return await self.wait_or_kill(timeout_s)

    async def wait_or_kill(self, timeout_s: float) -> int:
        """Up to `timeout_s` to end by itself, then SIGKILL; returns the exit code."""
        assert self.exit_code is not None
        await asyncio.wait({self.exit_code}, timeout=timeout_s)
        self.send(signal.SIGKILL)
        return await asyncio.shield(self.exit_code)  # a cancelled waiter must not cancel the wait of the others

    async def _wait(self) -> int:
        code = await self._process.wait()
        assert self._copy is not None
        await asyncio.wait({self._copy}, timeout=OUTPUT_END_TIMEOUT_S)
        self._copy.cancel()
        # what the child started itself must not outlive it
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):  # the guard is gone: nothing to forget
            self._guard.discard(self.pid)
        return code

    async def _copy_output(self, log_path: Path, on_line: Callable[[str, str], None]) -> None:
        output = self._process.stdout
        assert output is not None
        rest = b""
        with log_path.open("ab", buffering=0) as log:
            while data := await output.read(READ_BYTES):
                with contextlib.suppress(OSError):  # a full disk must not block the child; Redis reports it
                    log.write(data)
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._see(line, on_line)
                if len(rest) > READ_BYTES:
                    self._see(rest, on_line)
                    rest = b""
        if rest:
            self._see(rest, on_line)

    def _see(self, line: bytes, on_line: Callable[[str, str], None]) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        self.tail.append(text)
        if not self.spec.is_chatty:
            on_line(self.name, text)


def describe_exit(code: int) -> str:
    """An exit code in words: `exit code 2`, or `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
