"""One episode in the process of its environment: the environment, its tools, and the calls that replies make."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from hashlib import sha256
from typing import Any, cast

from tba import plugins
from tba.environments.protocol import Agent, Environment, EpisodeError, Outcome, Policy, Reply, Reset, Step, ToolCall
from tba.environments.remote import RemoteEnvironment, ask
from tba.environments.tools import Tool, failure_of, text_of, tool_of
from tba.errors import ConfigError
from tba.fields import MAX_NUMBER, is_bounded

NAMES = {
    "invalid_json": "the call is no valid JSON",
    "unclosed_block": "the call has no end",
    "missing_name": "the call names no tool",
    "malformed_structure": 'a call is {"name": ..., "arguments": {...}}',
    "unknown_tool": "there is no such tool",
}
MAX_THREADS = 1024
MAX_MESSAGES = MAX_CALLS = 64
"""Most messages of one answer, and calls of one reply: a template is rendered once more for each."""
MAX_CHARS = 100_000
"""Most characters of a message; what a tool answers is cut."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_VERSION_CHARS = 100
_threads = cache(lambda: ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="environment"))


def call_id(turn: int, number: int) -> str:
    """Return the id of call `number` of a turn: nine letters and digits, as some chat templates ask for."""
    return f"call{turn % 1000:03}{number % 100:02}"


def user_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages as dicts; a plain text is one of the user. Raise EpisodeError for what no message may be."""
    if isinstance(messages, str | Mapping):
        messages = [messages]
    if not isinstance(messages, Sequence):
        raise EpisodeError(f"{messages!r:.100} are no messages; give a list of texts or dicts")
    if len(messages) > MAX_MESSAGES:
        raise EpisodeError(f"{len(messages)} messages at once; at most {MAX_MESSAGES} are taken")
    found = [{"role": "user", "content": each} if isinstance(each, str) else each for each in messages]
    for each in found:
        content = each.get("content") if isinstance(each, Mapping) else None
        if not isinstance(content, str) or each.get("role") not in ROLES:
            raise EpisodeError(f"{each!r:.100} is no message; give a text, or a dict with role and content")
        if len(content) > MAX_CHARS:
            raise EpisodeError(f"a message has {len(content)} characters; at most {MAX_CHARS} are taken")
    return [dict(each) for each in found]


def by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Return tools by their names; raise ConfigError if two have the same."""
    found = {tool.name: tool for tool in tools}
    for number, tool in enumerate(tools):
        if found[tool.name] is not tool:
            raise ConfigError(f"two tools are called {tool.name!r} (number {number + 1} is one); rename it")
    return found


async def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of others; a plain one runs in a thread, so that it does not stop the other episodes.

    What would end the process, the thread or the task (SystemExit, StopIteration, a cancellation of its own) is raised
    as RuntimeError: it must not cost other episodes.
    """
    try:
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        run = partial(contextvars.copy_context().run, _plain, function, *arguments)
        found = await asyncio.get_running_loop().run_in_executor(_threads(), run)
        return await found if inspect.isawaitable(found) else found
    except (asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def _plain(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except (StopIteration, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


class Play:
    """One episode: an environment, or tools alone, whose episode ends with the first reply that calls none.

    Args:
        environment: None with tools alone.
        tools: those of the recipe; an environment may add others in `reset`.
    """

    def __init__(self, environment: Environment | Agent | None, tools: Sequence[Tool] = ()) -> None:
        self.agent = environment if isinstance(environment, Agent) else None
        self._environment = environment if isinstance(environment, Environment) else None
        self._tools = by_name(tools)
        self._turn = 0

    async def play(self, seed: int, data: Mapping[str, Any], policy: Policy) -> Outcome:
        """Let the agent play the whole episode."""
        assert self.agent is not None
        reward, session, stop_condition, truncated = _tuple(Outcome, await call(self.agent.play, seed, data, policy))
        return Outcome(_checked_reward(reward, "play"), str(session), str(stop_condition or "done"), bool(truncated))

    async def reset(self, seed: int, data: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Begin the episode; return its messages and the schemas of all tools."""
        messages, own = (
            Reset() if self._environment is None else _tuple(Reset, await call(self._environment.reset, seed, data))
        )
        schemas = [tool for tool in own if isinstance(tool, Mapping)]
        if schemas and (self._tools or len(schemas) < len(own)):
            raise ConfigError("an environment gives functions as tools, or schemas whose calls it answers; not both")
        self._tools = by_name([*self._tools.values(), *map(tool_of, own if not schemas else ())])
        return user_messages(messages), [*map(dict, schemas), *(tool.schema for tool in self._tools.values())]

    async def step(self, reply: Reply) -> Step:
        """Answer a reply: its tool calls, or else by the environment."""
        turn, self._turn = self._turn, self._turn + 1
        if reply.tool_calls and (self._tools or self._environment is None):
            if (num := len(reply.tool_calls)) > MAX_CALLS:
                text = f"error: {num} calls in a reply, and none was made; make at most {MAX_CALLS}"
                message = {"role": "tool", "name": "unknown", "content": text, "tool_call_id": call_id(turn, 0)}
                return Step([message], info={"num_tool_errors": num})
            begun_s = time.monotonic()
            answers = [await self._answer(each) for each in reply.tool_calls]
            tool_s = time.monotonic() - begun_s
            messages = [
                {"role": "tool", "name": each.name or "unknown", "content": text, "tool_call_id": call_id(turn, number)}
                for number, (each, (text, _)) in enumerate(zip(reply.tool_calls, answers, strict=True))
            ]
            info = {"num_tool_errors": sum(is_error for _, is_error in answers), "tool_s": tool_s}
            return Step(messages, info=info)
        if self._environment is None:
            return Step(done=True, info={"stop_condition": "no_tool_call"})
        messages, reward, done, told = _tuple(Step, await call(self._environment.step, reply))
        # the rest of what it tells, such as arrays of Gymnasium, is of no use here
        info = told or {}
        known = {"truncated": bool(info.get("truncated")), "stop_condition": str(info.get("stop_condition") or "done")}
        return Step(user_messages(messages), _checked_reward(reward, "step"), bool(done), known)

    async def close(self) -> None:
        """Close the environment or the agent."""
        if (played := self.agent or self._environment) is not None:
            await call(played.close)

    async def _answer(self, tool_call: ToolCall) -> tuple[str, bool]:
        """Return the text that answers a call, and whether it is an error; raise EpisodeError if a tool failed."""
        name = str(tool_call.name or "")
        if tool_call.status != "ok":
            names = f" (tools: {', '.join(self._tools)})" if tool_call.status == "unknown_tool" else ""
            return f"error: {NAMES[tool_call.status]}{names}", True
        try:
            text = text_of(await call(self._tools[name].bound(tool_call.arguments or {})))
            return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}\n[cut: {len(text)} characters]", False
        except Exception as error:  # a tool of others raises anything
            failure = failure_of(name, error)
            if isinstance(failure, EpisodeError):
                raise failure from error
            return f"error: {failure}", True


def _checked_reward(reward: Any, method: str) -> float | None:
    if reward is not None and not (isinstance(reward, int | float) and is_bounded(reward)):
        raise EpisodeError(f"{method} returned the reward {reward!r:.60}; give a number up to {MAX_NUMBER:g}, or None")
    return None if reward is None else float(reward)


def _tuple(kind: Any, value: Any) -> Any:
    """Return what a method of an environment returned as a `Reset` or `Step`; messages alone are taken too."""
    if isinstance(value, kind):
        return value
    try:
        return kind(*value) if isinstance(value, tuple) else kind(value)
    except TypeError:
        raise EpisodeError(f"{kind.__name__} has the fields {', '.join(kind._fields)}; got {value!r:.100}") from None


def open_play(
    environment: str | None, tools: Sequence[str], settings: Mapping[str, Any], *, what: str
) -> tuple[Callable[[], Play], str]:
    """Load an environment and tools; return what makes the play of one episode, and the version of the environment.

    Args:
        environment: MODULE:CLASS, called with `settings`, or the address of one; None: tools alone.
        tools: MODULE:FUNCTION each.
        what: the section of the recipe, for errors.

    Raises:
        ConfigError: one of them cannot be imported, or is none.
    """
    functions = [tool_of(plugins.load(tool, what=f"{what}.tools")) for tool in tools]
    if environment is None:
        return lambda: Play(None, functions), _version_of(*(tool.function for tool in functions))
    if environment.startswith(("http://", "https://")):
        try:
            version = _checked_version(str(ask(environment.rstrip("/"), "GET", "/").get("version", "unknown")))
        except EpisodeError as error:
            raise ConfigError(f"{what}.environment: {error}") from None
        return lambda: Play(cast("Environment", RemoteEnvironment(environment)), functions), version
    factory = plugins.load(environment, what=f"{what}.environment")

    def make() -> Play:
        try:
            inspect.signature(factory).bind(**settings)
        except TypeError as error:
            raise ConfigError(f"{what}.settings do not fit {environment}: {error}; correct them") from None
        with plugins.explain_errors(environment, what=f"{what}.environment", verb="failed"):
            made = factory(**settings)
        if isinstance(made, Agent):
            if functions:
                raise ConfigError(f"{what}.tools: an agent calls its tools itself; remove them")
        elif not isinstance(made, Environment):
            raise ConfigError(
                f"{what}.environment {environment!r} made {made!r:.80}, which lacks reset, step or close, or play and "
                "close; add them (docs/environments.md)"
            )
        return Play(made, functions)

    return make, _version_of(factory, *(tool.function for tool in functions))


def _checked_version(version: str) -> str:
    """Return the version of an environment; raise ConfigError if no rollout can carry it."""
    if not (version.isprintable() and 0 < len(version) <= MAX_VERSION_CHARS):
        raise ConfigError(f"version is {version!r:.150}; give 1 to {MAX_VERSION_CHARS} printable characters")
    return version


def _version_of(*objects: Any) -> str:
    """Return the `version` of the first object, else a digest of the files that define all of them."""
    if objects and isinstance(version := getattr(objects[0], "version", None), str):
        return _checked_version(version)
    digest = sha256()
    for each in objects:
        try:
            digest.update(open(inspect.getfile(inspect.unwrap(each)), "rb").read())  # noqa: SIM115
        except (OSError, TypeError):  # built in: it has no file
            digest.update(repr(each).encode())
    return digest.hexdigest()[:12]
