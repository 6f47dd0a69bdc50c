"""A model process and the two pipes to it: started, written to, read from, killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys

import msgspec

from tba.api.scores import ScoreReason
from tba_reward.models.messages import LENGTH_BYTES, FromChild, ModelSet, frame

_ENVIRONMENT = {
    "DISABLE_SAFETENSORS_CONVERSION": "1",  # transformers would ask the hub for other files in a thread
    "TOKENIZERS_PARALLELISM": "false",
}


class DeathError(Exception):
    """The process has ended, or has to; `reason` is what its asks fail with."""

    def __init__(self, message: str, reason: ScoreReason = "crashed") -> None:
        super().__init__(message)
        self.reason: ScoreReason = reason


class Channel:
    """One process. Use `open_channel`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._verdict: DeathError | None = None

    @property
    def pid(self) -> int:
        """The process, and the group of all that it starts."""
        return self._process.pid

    def send(self, message: bytes) -> None:
        """Write a frame. To a process that is gone it goes nowhere; `receive` tells."""
        self._stdin.write(message)

    async def receive(self) -> FromChild:
        """The next message.

        Raises:
            DeathError: there is none, because the process has ended.
        """
        try:
            length = int.from_bytes(await self._stdout.readexactly(LENGTH_BYTES), "big")
            return msgspec.msgpack.decode(await self._stdout.readexactly(length), type=FromChild)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._stdin.close()  # asyncio waits for the pipes, too
            code = await self._process.wait()
            raise self._verdict or DeathError(_describe(code)) from None
        except msgspec.MsgspecError as error:
            raise DeathError(f"it said something that is no message ({error})") from error

    def condemn(self, verdict: DeathError) -> None:
        """Kill the process with all that it has started; `receive` raises the verdict."""
        self._verdict = verdict
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Kill the process if it still runs, and wait until it is gone."""
        self.condemn(self._verdict or DeathError("it was closed"))
        self._stdin.close()
        while await self._stdout.read(2**16):  # to its end: only then does asyncio let the pipe go
            pass
        await self._process.wait()


async def open_channel(models: ModelSet) -> Channel:
    """Start a process that loads the models.

    Raises:
        DeathError: there is no process to be had.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tba_reward.models.child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,  # a process group of its own, so that what it starts is killed with it
        )
    except OSError as error:
        raise DeathError(f"it cannot be started ({error})") from error
    channel = Channel(process)
    channel.send(frame(models))
    return channel


def _describe(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code}"
    hint = "; the kernel does that when memory runs out" if code == -signal.SIGKILL else ""
    return f"it was killed by {signal.Signals(-code).name}{hint}"
