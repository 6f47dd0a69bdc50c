"""Scorer functions that misbehave in every possible way; an item's `response` names the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tba_reward.scorer import AmbiguousError, BadDataError, Item, Params

LOADED: list[Params] = []


class StubbornError(Exception):
    """An error that cannot be pickled: its constructor wants two arguments, and it holds a lock."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self.lock = threading.Lock()


def prepare(params: Params) -> None:
    """Sleep for `load_s` of the params, then record the call in LOADED."""
    time.sleep(params.get("load_s", 0.0))
    LOADED.append(params)


def prepare_badly(params: Params) -> None:
    """Misbehave as `how` of the params says, instead of loading."""
    misbehave(Item(prompt="", response=params["how"], data=params), {})


def num_loaded(item: Item, params: Params) -> float:
    """Return how often `prepare` was called before."""
    return float(len(LOADED))


def misbehave_together(items: Sequence[Item], params: Params) -> list[Any]:
    """Misbehave for each item as its `response` says, one after the other."""
    return [misbehave(item, params) for item in items]


def misbehave(item: Item, params: Params) -> Any:
    """Misbehave as `response` says; return 0.5 for an unknown word. Append the process id to `pid_file` if given."""
    if "pid_file" in item.data:
        with Path(item.data["pid_file"]).open("a") as file:
            file.write(f"{os.getpid()}\n")
    match item.response:
        case "hang":
            while True:
                pass
        case "sleep":
            time.sleep(item.data["for_s"])
        case "crash":
            os._exit(7)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            raise SystemExit(3)
        case "raise":
            raise StubbornError("broken scorer", "x")
        case "timeout":
            raise TimeoutError("the scorer's own timeout")
        case "bad_data":
            raise BadDataError("no such thing")
        case "ambiguous":
            raise AmbiguousError("this or that")
        case "surrogate":
            raise ValueError("lone \ud800 surrogate")
        case "eat":
            held = [bytearray(50_000_000) for _ in range(10_000)]
            return float(len(held))
        case "fork":
            os.fork()  # and both come back
        case "child":
            _start_child(item.data["child_file"], detached=False)
            while True:
                pass
        case "daemon":
            _start_child(item.data["child_file"], detached=True)
            while True:
                pass
        case "stranger":
            _start_child(item.data["child_file"], detached=True, env={})
            while True:
                pass
        case "print":
            print("printed by a rule", flush=True)
        case "nan":
            return float("nan")
        case "inf":
            return -float("inf")
        case "text":
            return "1.0"
        case "none":
            return None
        case "pid":
            return os.getpid()
    return 0.5


def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[Any]:
    """`misbehave` with the signature of TRL."""
    data = {name: values[0] for name, values in columns.items()}
    return [misbehave(Item(prompt=prompts[0], response=completions[0], data=data), {})]


def _start_child(pid_file: str, *, detached: bool, env: dict[str, str] | None = None) -> None:
    code = f"import os, pathlib, time; pathlib.Path({pid_file!r}).write_text(str(os.getpid())); time.sleep(600)"
    subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=detached, env=env)
    while not (Path(pid_file).exists() and Path(pid_file).read_text()):
        time.sleep(0.01)
