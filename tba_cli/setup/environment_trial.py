"""Begins an episode of a task, and closes it, before a run starts: in a worker process, as searchers do."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tba.api.prompts import Prompt, PromptTools, checked_messages
from tba.config import Recipe
from tba.environments.play import user_messages
from tba.errors import ConfigError
from tba.fields import first_problem
from tba_cli.child_processes import ask_program, child_environ

EXIT_SLACK_S = 10.0
MAX_ERROR_CHARS = 2000


def try_environment(recipe: Recipe, task: str, prompts: Sequence[Prompt]) -> str:
    """Reset and close the environment of a task for its first prompt; return what was found.

    Raises:
        ConfigError: the environment or a tool cannot be loaded, fails, or gives what is no conversation.
    """
    section = recipe.environments[task]
    prompt = next((prompt for prompt in prompts if prompt.task == task), None)
    name = "tools" if section.environment is None else f"environment {section.environment!r}"
    worker = _Worker(task)
    try:
        loaded = section.model_dump(mode="json", include={"environment", "tools", "settings"})
        limit = recipe.local.start_timeout_s, "local.start_timeout_s"
        hello = worker.ask({**loaded, "what": worker.what}, "loading", *limit)
        if "error" in hello:
            raise worker.error("loading", hello["error"])
        if hello["is_agent"]:
            return f"{name} is an agent, which begins an episode when it is played"
        if prompt is None:
            return f"{name} can be loaded; there is no prompt to begin with"
        limit = section.turn_timeout_s, f"{worker.what}.turn_timeout_s"
        step = f"reset for prompt {prompt.prompt_id!r}"
        given, schemas = worker.call("reset", [prompt.environment_seed, prompt.data], step, *limit)
        try:
            messages = checked_messages([*(prompt.messages or []), *given])
            tools = TypeAdapter(PromptTools).validate_python(schemas)
        except ValueError as error:
            said = first_problem(error, whole="tools") if isinstance(error, ValidationError) else f"messages: {error}"
            raise worker.error(step, f"it gives what is no conversation: {said}; see docs/environments.md") from None
        worker.call("close", None, "close", *limit)
    finally:
        worker.end()
    of_prompt = "a prompt has" if section.environment is None else "an episode begins with"
    messages = messages or user_messages(prompt.text)
    found = f"{name}: {of_prompt} {_num(len(messages), 'message')} and {_num(len(tools), 'tool')}"
    if not Path(recipe.model.path, "config.json").is_file() or find_spec("transformers") is None:
        return found
    words = ["chat", recipe.model.path, "--count", *["--trust"] * recipe.model.trust_remote_code]
    words += ["--template-kwargs", json.dumps(prompt.chat_template_kwargs)]
    asked = json.dumps([{"messages": messages, "tools": given} for given in (tools or prompt.tools, [])])
    answer, bare = ask_program("tba_cli.starter_models.convert", words, texts=asked)
    answer = bare if (is_bare := "no place for tools" in answer.get("error", "")) else answer
    if "error" in answer:
        raise worker.error(step, answer["error"])
    num_tokens, most = answer["num_tokens"], recipe.searcher.max_prompt_tokens
    if num_tokens > most:
        raise worker.error(step, f"its first prompt has {num_tokens} tokens; raise searcher.max_prompt_tokens ({most})")
    return f"{found}, {num_tokens} tokens{'; the chat template shows the policy no tools' * is_bare}"


def most_s(recipe: Recipe) -> float:
    """Return the most seconds that the trials of all environments take, one after another."""
    return sum(
        recipe.local.start_timeout_s + 2 * section.turn_timeout_s + EXIT_SLACK_S
        for section in recipe.environments.values()
    )


def _num(num: int, what: str) -> str:
    return f"{num} {what}{'' if num == 1 else 's'}"


class _Worker:
    """A worker process of one environment (tba/environments/worker.py), asked one thing at a time."""

    def __init__(self, task: str) -> None:
        self.what = f"environments.{task}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tba.environments.worker", task],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=child_environ(os.environ, num_threads=1),
        )

    def call(self, method: str, arguments: Any, step: str, timeout_s: float, limit: str) -> Any:
        """Return the answer to a call of the environment's methods."""
        _, failure, value = self.ask([1, method, "trial", arguments], step, timeout_s, limit)
        if failure is not None:
            raise self.error(step, f"{failure[1]}; correct it, or the data of the prompt")
        return value

    def ask(self, question: Any, step: str, timeout_s: float, limit: str) -> Any:
        """Write a line of JSON and return the one that answers it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        until_s, line, pipe = time.monotonic() + timeout_s, b"", self._process.stdout.fileno()
        while not line.endswith(b"\n"):
            if not select.select([pipe], [], [], max(0.0, until_s - time.monotonic()))[0]:
                raise ConfigError(
                    f"{self.what}: {step} took more than {timeout_s:g} s; make it faster, or raise {limit}"
                )
            if not (part := os.read(pipe, 1 << 16)):
                code = self._process.wait()
                raise self.error(step, f"the process that tried it ended early (exit code {code})")
            line += part
        return json.loads(line)

    def error(self, step: str, text: str) -> ConfigError:
        """Return an error of one line that begins with the section."""
        text = " ".join(text.split())[:MAX_ERROR_CHARS]
        return ConfigError(text if text.startswith(self.what) else f"{self.what}: {step}: {text}")

    def end(self) -> None:
        """Kill the process with all that the environment has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
