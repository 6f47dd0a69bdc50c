"""Environments and tools that tests play with; they run in worker processes, by their import paths."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from tba.api import Prompt
from tba.environments import EpisodeError, Outcome, Policy, Reply, Reset, Step
from tba.fields import Split


class Echo:
    """Says what it is told, and pays 0.5 a turn; what it does otherwise stands in the prompt's data."""

    version = "echo-1"

    def __init__(self, turns: int = 3) -> None:
        self.turns, self.turn = turns, 0
        self.data: Mapping[str, Any] = {}

    async def reset(self, seed: int, data: Mapping[str, Any]) -> Reset:
        """Open with the seed, after what `data.begin` says."""
        self.data = data
        self._act("begin")
        return Reset([f"seed {seed}"])

    async def step(self, reply: Reply) -> Step:
        """Echo, or do what `data.step` says in the turn `data.at`."""
        self.turn += 1
        if self.turn == self.data.get("at", 1):
            self._act("step")
        messages: list[Any] = [f"you said {reply.content}"]
        if self.data.get("silent"):
            messages = []
        if "says" in self.data:
            messages = self.data["says"]
        return Step(messages, self.data.get("pays", 0.5), self.turn == self.turns)

    async def close(self) -> None:
        """Leave a mark of the end."""
        if path := self.data.get("closed"):
            with Path(path).open("a") as file:
                file.write("closed\n")

    def _act(self, when: str) -> None:
        what, path = self.data.get(when), self.data.get("once")
        if what is None:
            return
        if path is not None:  # the first time alone, over all processes
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
        if what == "raise":
            raise ValueError("the environment is broken")
        if what in ("sandbox", "tool", "judge"):
            raise EpisodeError(f"the {what} is full", boundary=what)
        if what == "die":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # left-by-a-dead-worker"])
            os._exit(7)
        if what == "block":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # left-by-a-tool"])
            time.sleep(600)
        print("what an environment prints is no answer")


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a + b


def note(path: str) -> str:
    """Append a line to a file, so that a test can count calls."""
    with Path(path).open("a") as file:
        file.write("called\n")
    return "noted"


def away(what: str) -> str:
    """Fail as a network does."""
    raise ConnectionError(f"no route to {what}")


def long(num: int) -> str:
    """Return a long text that ends with the word end."""
    return "word " * num + "end"


def leave(how: str) -> str:
    """Return a text, or try to end the process, the thread or the task."""
    if how == "exit":
        sys.exit(3)
    if how == "next":
        return next(iter([]))
    if how == "cancel":
        raise asyncio.CancelledError
    return how


class NoEnvironment:
    """It has no methods."""


class Parity(Echo):
    """Takes its time, and pays for the turns whose replies have an odd number of characters."""

    async def step(self, reply: Reply) -> Step:
        """Answer a little later."""
        await asyncio.sleep(0.05)
        self.turn += 1
        return Step(["more"], float(len(reply.content) % 2), self.turn == self.turns)


def prompts(num_train: int, num_heldout: int, seed: int) -> list[Prompt]:
    """Return prompts of the tasks `talk` (an environment), `sum` (a tool, and a scorer) and `exact` (one turn)."""
    made = []
    splits: dict[Split, int] = {"heldout": num_heldout, "train": num_train}
    for split, num in splits.items():
        for number in range(num):
            task, name = ("talk", "sum", "exact")[number % 3], f"{split}-{number}"
            data = {"answer": str(2 * number)}
            made.append(Prompt(prompt_id=name, task=task, text=f"{number}+{number}=", data=data, split=split))
    return made


class Thread(Echo):
    """Plain functions, which run in threads; the second turn takes longer than a deadline."""

    def reset(self, seed: int, data: Mapping[str, Any]) -> Reset:  # type: ignore[override]
        """Open with the seed."""
        self.data = data
        return Reset([f"seed {seed}"])

    def step(self, reply: Reply) -> Step:  # type: ignore[override]
        """Sleep for as long as the data say."""
        time.sleep(self.data.get("sleep_s", 0.0))
        self.turn += 1
        return Step(["go on"], 1.0, self.turn == self.turns)


def worker_pids(searcher: int) -> list[int]:
    """Return the ids of the processes that play the episodes of a searcher, given its own."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_text().split("\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        if parent == searcher and "tba.environments.worker" in words:
            found.append(int(entry.name))
    return found


class Scripted:
    """An agent that does what `data.script` says, and ends with the texts that it got."""

    async def play(self, seed: int, data: Mapping[str, Any], policy: Policy) -> Outcome:
        """Talk to the policy by HTTP, as any OpenAI client would."""
        messages: list[dict[str, Any]] = []
        got: list[str] = []
        tokens: list[int] = []
        async with httpx.AsyncClient(base_url=policy.url, timeout=60) as client:

            async def ask(**extra: Any) -> dict[str, Any]:
                body = {"model": "any", "messages": messages, "tools": data.get("tools"), **extra}
                answer = await client.post("/v1/chat/completions", json=body, headers=headers)
                if answer.is_error:
                    raise ValueError(f"{answer.status_code}: {answer.json()['error']['message']}")
                choice = answer.json()["choices"][0]
                got.append(f"{choice['finish_reason']}:{choice['message']['content']}")
                return choice["message"]

            for op, *values in data["script"]:
                headers = {"Authorization": f"Bearer {policy.secret}", "X-Session-ID": data.get("session", "")}
                if op == "say":
                    messages += [{"role": "user", "content": values[0]}]
                    messages += [await ask(**(values[1] if len(values) > 1 else {}))]
                elif op == "again":  # the last reply was not taken
                    messages.pop()
                    messages.append(await ask())
                elif op == "same":
                    headers["Idempotency-Key"] = "k"
                    last = messages.pop()
                    first = await ask()
                    assert await ask() == first
                    messages += [first if values else last]
                elif op == "cut_history":
                    del messages[: values[0]]
                elif op == "back":
                    del messages[-values[0] :]
                elif op == "edit":
                    messages[values[0]]["content"] = values[1]
                elif op == "session":
                    data = {**data, "session": values[0]}
                elif op == "wrong_secret":
                    headers["Authorization"] = "Bearer other"
                    await ask()
                elif op == "tokens":  # as verifiers asks; the secret stands in the body
                    prompt = [*tokens, *values[0]]
                    body = {"token_ids": prompt, "cache_salt": policy.secret, "sampling_params": values[1]}
                    choice = (await client.post("/inference/v1/generate", json=body)).json()["choices"][0]
                    content = choice["logprobs"]["content"]
                    assert [each["token"] for each in content] == [f"token_id:{one}" for one in choice["token_ids"]]
                    got.append(f"{choice['finish_reason']}:{sum(each['logprob'] for each in content):g}")
                    tokens = [*prompt, *choice["token_ids"]]
                elif op == "wait":
                    await asyncio.sleep(values[0])
                elif op == "leave":
                    await asyncio.wait([asyncio.create_task(ask())], timeout=values[0])
                elif op == "block":
                    time.sleep(values[0])
                elif op == "raise":
                    raise EpisodeError("no judge", boundary="judge")
        return Outcome(data.get("pays", 1.0), data.get("stored", data.get("session", "")), "|".join(got) or "none")

    async def close(self) -> None:
        """Leave a mark of the end."""
