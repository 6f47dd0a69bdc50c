"""`python -m tba.environments.worker`: the process that plays the episodes of one environment.

It reads calls from its standard input and writes answers to its standard output, a line of JSON each:

    {"environment", "tools", "settings", "what"}
                                              first: the section of the recipe
    {"version", "is_agent"} or {"error"}      its answer, when the environment is loaded, or cannot be
    [number, method, episode_id, arguments]   a call: `reset`, `step`, `play`, `close`, `ping`, or `cancel` of another
    [number, failure, value]                  its answer; failure: None, or [boundary, text]

All episodes share one event loop; plain functions run in threads. The process is the leader of a group, so that it can
be killed with all that its tools have started. When its input ends, because the searcher is gone, it kills the group.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

from tba import plugins
from tba.environments import EpisodeError, Play, Policy, Reply, ToolCall, open_play
from tba.environments.play import call
from tba.errors import ConfigError, TbaError


def main() -> None:
    """Load an environment and play until the input ends."""
    # buffered: a signal may cut a write to the pipe itself
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    section = json.loads(calls.readline() or sys.exit())  # nothing: its searcher was killed meanwhile
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what foreign code prints is no answer
    try:
        make, version = open_play(section["environment"], section["tools"], section["settings"], what=section["what"])
        is_agent = make().agent is not None  # a class that cannot be made is found at once
    except TbaError as error:
        write(answers, {"error": str(error)})
        return
    write(answers, {"version": version, "is_agent": is_agent})
    asyncio.run(_serve(make, calls, answers, section["environment"] or section["tools"][0]))


def write(answers: BinaryIO, value: Any) -> None:
    """Write a line of JSON."""
    try:
        answers.write(json.dumps(value).encode() + b"\n")
        answers.flush()
    except BrokenPipeError:  # the searcher is gone, as at the end of the input
        os.killpg(0, signal.SIGKILL)


async def _serve(make: Callable[[], Play], calls: BinaryIO, answers: BinaryIO, name: str) -> None:
    loop, plays = asyncio.get_running_loop(), _Plays(make, answers, name)

    def read() -> None:
        for line in calls:
            loop.call_soon_threadsafe(plays.begin, line)
        # the loop may be blocked by an environment that never comes back
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=read, name="calls", daemon=True).start()
    await asyncio.Event().wait()


class _Plays:
    """The episodes in progress, and the calls that are being answered."""

    def __init__(self, make: Callable[[], Play], answers: BinaryIO, name: str) -> None:
        self._make, self._answers, self._name = make, answers, name
        self._plays: dict[str, Play] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def begin(self, line: bytes) -> None:
        """Begin to answer a call."""
        number, method, episode_id, arguments = json.loads(line)
        if method == "cancel":
            if (task := self._tasks.get(arguments)) is not None:
                task.cancel()
            return
        task = asyncio.get_running_loop().create_task(self._answer(number, method, episode_id, arguments))
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _answer(self, number: int, method: str, episode_id: str, arguments: Any) -> None:
        try:
            value = await self._value(method, episode_id, arguments)
            json.dumps(value, allow_nan=False)
            answer = [number, None, value]
        except EpisodeError as error:
            boundary = error.boundary if error.boundary in ("tool", "sandbox", "judge") else "environment"
            answer = [number, [boundary, str(error)], None]
        except Exception as error:  # an environment of others raises anything
            traceback.print_exc()
            text, place = f"{method} raised {type(error).__name__}: {error}", None
            with suppress(ConfigError):  # an address has no module
                place = plugins.place_of(error, self._name, what="environment")
            text += "" if place is None else f" ({place})"
            answer = [number, ["environment", text], None]
        write(self._answers, answer)

    async def _value(self, method: str, episode_id: str, arguments: Any) -> Any:
        if method == "ping":
            return None
        if method == "close":
            play = self._plays.pop(episode_id, None)
            return None if play is None else await play.close()
        if method == "reset":
            self._plays[episode_id] = play = await call(self._make)
            return await play.reset(*arguments)
        if method == "play":
            seed, data, policy = arguments
            self._plays[episode_id] = play = await call(self._make)
            return await play.play(seed, data, Policy(*policy))
        content, reasoning, tool_calls = arguments
        reply = Reply(content, reasoning, tuple(ToolCall(*each) for each in tool_calls))
        return await self._plays[episode_id].step(reply)


if __name__ == "__main__":
    main()
