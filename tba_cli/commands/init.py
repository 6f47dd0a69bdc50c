"""`tba init`: make a folder with working example files for a new task, for the user to change."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from tba.config.reward import BUILT_IN_TASKS
from tba.errors import ConfigError
from tba_cli.console import print_answer
from tba_cli.task_files import task_files

NAME = re.compile("[a-z][a-z0-9_-]{0,40}")


def init_command(args: argparse.Namespace) -> int:
    """Write the files, and print what to do next."""
    task = args.task
    if not NAME.fullmatch(task):
        raise ConfigError(
            f"TASK {task!r} is no name of a task; take up to 41 small letters, digits, - and _, and begin with a letter"
        )
    if task in BUILT_IN_TASKS:
        raise ConfigError(f"TASK {task!r} is scored by tba itself ({', '.join(BUILT_IN_TASKS)}); take another name")
    folder = Path(args.folder or task)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already, and nothing in it is overwritten; name another one with --folder")
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for name, text in task_files(task).items():
        with (folder / name).open("x", encoding="utf-8") as file:
            file.write(text)
        names.append(str(folder / name))
    steps = [f"tba score examples.jsonl --recipe {task}.toml", f"tba config check {task}.toml", f"tba run {task}.toml"]
    shown = [f"  {step}" for step in (f"cd {shlex.quote(str(folder))}", *steps)]
    lines = [f"wrote {', '.join(names)}", "next:", *shown]
    print_answer({"folder": str(folder), "files": names, "next": steps}, lines, as_json=args.json)
    return 0
