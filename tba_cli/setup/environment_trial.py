"""`python -m tba_cli.setup.environment_trial`: begin an episode of a task, and close it, before a run starts.

Environment and tools are foreign code, so they run in a process of their own. The answer is JSON on stdout; an error is
one sentence on stderr, exit code 2.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from pydantic import TypeAdapter, ValidationError

from tba import plugins
from tba.api.prompts import Prompt, PromptTools, checked_messages
from tba.config import Recipe
from tba.config.environments import EnvironmentSection
from tba.environments import Play, open_play
from tba.errors import ConfigError, TbaError, did_you_mean
from tba.fields import first_problem
from tba_cli.child_processes import ask_program

PROGRAM = "tba_cli.setup.environment_trial"
EXIT_SLACK_S = 10.0
STDOUT, STDERR = 1, 2
ANSWER, ERROR = 101, 102
"""Descriptors of stdout and stderr that an environment, and what it starts, do not know: both would be held open."""
MAX_ERROR_CHARS = 2000


def try_environment(recipe: Recipe, task: str, prompts: Sequence[Prompt]) -> str:
    """Reset and close the environment of a task for its first prompt; return what was found.

    Raises:
        ConfigError: the environment or a tool cannot be loaded, fails, or gives what is no conversation.
    """
    what, section = f"environments.{task}", recipe.environments[task]
    prompt = next((prompt for prompt in prompts if prompt.task == task), None)
    asked = {
        "what": what,
        "section": section.model_dump(mode="json"),
        "prompt": None if prompt is None else prompt.document(),
        "start_timeout_s": recipe.local.start_timeout_s,
    }
    try:
        found = ask_program(PROGRAM, asked=json.dumps(asked))
    except (ConfigError, json.JSONDecodeError) as error:
        if str(error).startswith(what):
            raise
        how = error if isinstance(error, ConfigError) else "exit code 0"
        raise ConfigError(f"{what}: the process that tried it ended early ({how}); correct the environment") from None
    name = "tools" if section.environment is None else f"environment {section.environment!r}"
    if found is None:
        return f"{name} can be loaded; there is no prompt to begin with"
    of_prompt = "a prompt has" if section.environment is None else "an episode begins with"
    return f"{name}: {of_prompt} {_num(found['messages'], 'message')} and {_num(found['tools'], 'tool')}"


def most_s(recipe: Recipe) -> float:
    """Return the most seconds that the trials of all environments take, one after another."""
    return sum(
        recipe.local.start_timeout_s + 2 * section.turn_timeout_s + EXIT_SLACK_S
        for section in recipe.environments.values()
    )


def _num(num: int, what: str) -> str:
    return f"{num} {what}{'' if num == 1 else 's'}"


# ---- in the process of its own --------------------------------------------------------------------------------------


def main() -> NoReturn:
    """Try one environment, and end this process, whatever its threads do."""
    asked = json.loads(Path(sys.argv[-1]).read_bytes())
    section, what = EnvironmentSection.model_validate(asked["section"]), asked["what"]
    prompt = None if asked["prompt"] is None else Prompt.model_validate(asked["prompt"])
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream, kept in ((STDOUT, ANSWER), (STDERR, ERROR)):
        os.dup2(stream, kept, inheritable=False)
        os.dup2(nothing, stream)
    os.register_at_fork(after_in_child=lambda: os.closerange(ANSWER, ERROR + 1))
    signal.signal(signal.SIGTERM, lambda *_: None)  # it is for what the environment has started: `_end`
    with _step(what, "loading", section, asked["start_timeout_s"], "local.start_timeout_s"):
        make, _ = open_play(section.environment, section.tools, section.settings, what=what)
        play = make()
    found = None if prompt is None else asyncio.new_event_loop().run_until_complete(_begin(play, prompt, section, what))
    _end(ANSWER, json.dumps(found), 0)


async def _begin(play: Play, prompt: Prompt, section: EnvironmentSection, what: str) -> dict[str, int]:
    limit = section.turn_timeout_s, f"{what}.turn_timeout_s"
    with _step(what, f"reset for prompt {prompt.prompt_id!r}", section, *limit):
        given, schemas = await play.reset(prompt.environment_seed, prompt.data)
        try:
            messages = checked_messages([*(prompt.messages or []), *given])
            tools = TypeAdapter(PromptTools).validate_python(schemas)
        except ValueError as error:
            said = first_problem(error, whole="tools") if isinstance(error, ValidationError) else f"messages: {error}"
            raise ConfigError(
                f"it gives what is no conversation: {said}; docs/environments.md has an example"
            ) from None
    with _step(what, "close", section, *limit):
        await play.close()
    # without any, the text of the prompt is the message of the user
    return {"messages": len(messages) or 1, "tools": len(tools)}


@contextmanager
def _step(what: str, step: str, section: EnvironmentSection, timeout_s: float, limit: str) -> Iterator[None]:
    """Run the block; if it fails or does not end in time, end this process with a sentence that begins with `what`."""
    late = f"{what}: {step} took more than {timeout_s:g} s; make it faster, or raise {limit}"
    timer = threading.Timer(timeout_s, _fail, [late])
    timer.daemon = True
    timer.start()
    try:
        yield
    except BaseException as error:  # foreign code raises anything, and may call sys.exit
        cause, place = error.__cause__ or error, None
        with suppress(ConfigError):  # there is no such module
            place = plugins.place_of(cause, section.environment or section.tools[0], what="environment")
        is_ours = isinstance(error, TbaError)
        said = str(error) if is_ours else f"{type(error).__name__}: {error}; correct it, or the data of the prompt"
        found, _, fix = said.rpartition("; ")
        text = f"{found or said}{'' if place is None else f' ({place})'}{f'; {fix}' if found else ''}"
        if isinstance(cause, AttributeError) and cause.name is not None:
            text += did_you_mean(cause.name, dir(cause.obj))
        _fail(text if text.startswith(what) else f"{what}: {step}: {text}")
    finally:
        timer.cancel()


def _fail(text: str) -> NoReturn:
    _end(ERROR, f"error: {' '.join(text.split())[:MAX_ERROR_CHARS]}\n", 2)


def _end(to: int, text: str, code: int) -> NoReturn:
    os.write(to, text.encode(errors="backslashreplace"))
    os.killpg(0, signal.SIGTERM)
    os._exit(code)


if __name__ == "__main__":
    main()
