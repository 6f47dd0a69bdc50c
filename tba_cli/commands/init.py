"""`tba init`: make a folder with working files for a new task: an example, or fitted to a model and rows."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path

from tba.errors import ConfigError
from tba_cli.console import print_answer
from tba_cli.doctor.checks.machine import this_machine
from tba_cli.setup.model_recipe import check_task_name, model_task_files
from tba_cli.task_files import task_files


def init_command(args: argparse.Namespace) -> int:
    """Write the files, and print what to do next."""
    task = args.task
    check_task_name(task)
    if (args.model is None) != (args.data is None):
        raise ConfigError("--model and --data belong together, since a recipe is fitted to both; give both or neither")
    folder = Path(args.folder or task)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already, and nothing in it is overwritten; name another one with --folder")
    if args.model is not None and not args.json:
        print(
            "measuring rows and model, some seconds; a minute where memory is scarce and a step is traced", flush=True
        )
    files = task_files(task) if args.model is None else model_task_files(task, args.model, args.data, this_machine())
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for name, text in files.items():
        with (folder / name).open("x", encoding="utf-8", newline="") as file:
            file.write(text)
        names.append(str(folder / name))
    steps = [f"tba score examples.jsonl --recipe {task}.toml"] if "examples.jsonl" in files else []
    steps += [f"tba config check {task}.toml", f"tba run {task}.toml"]
    is_found = shutil.which("tba") or Path(sys.argv[0]).name != "tba"  # in a clone it is not on PATH
    program = "tba" if is_found else shlex.quote(os.path.abspath(sys.argv[0]))
    shown = [f"  {step.replace('tba ', f'{program} ', 1)}" for step in (f"cd {shlex.quote(str(folder))}", *steps)]
    lines = [f"wrote {', '.join(names)}", "next:", *shown]
    print_answer({"folder": str(folder), "files": names, "next": steps}, lines, as_json=args.json)
    return 0
