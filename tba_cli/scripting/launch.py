"""`tba.run`: run a recipe on this machine from a script or a notebook."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from tba_cli.scripting.command import EXIT_INTERRUPTED, Command
from tba_cli.scripting.inputs import Function, RecipeLike, prepare
from tba_cli.scripting.run_handle import Run

SHELL_ADVICE = "resume with: "
PYTHON_ADVICE = "the same tba.run(...) with resume=True continues it"
LINES_ABOVE = "log lines are above"
"""Part of an error of `tba run` that refers to lines printed before it."""
if TYPE_CHECKING:
    import datasets

    from tba.api import Prompt

    Prompts = Iterable[Mapping[str, Any] | Prompt] | datasets.Dataset


def run(
    recipe: RecipeLike | None = None,
    objective: Function | str | None = None,
    rewards: Iterable[Function | Mapping[str, Any]] | None = None,
    prompts: Prompts | None = None,
    sets: Sequence[str] = (),
    name: str | None = None,
    fresh: bool = False,
    resume: bool = False,
    progress: bool = True,
    *,
    environment: Function | str | None = None,
    tools: Iterable[Function | str] | None = None,
    model: str | os.PathLike[str] | None = None,
    steps: int | None = None,
    lora: bool | None = None,
) -> Run:
    """Run a recipe as `tba run` does, and wait for its end. Ctrl-C, or the interrupt of a notebook, stops it cleanly.

    Without a recipe, `model` and `prompts` get the one that `tba init --model --data` writes for them.

    Errors name the flags of `tba run`, which are arguments here: --fresh is `fresh=True`.

    Functions and classes run in other processes. One of a module is imported from there. One of a notebook or script
    is written to a file beside the run, so it must import what it uses inside itself.

    Args:
        recipe: a file, the name of a recipe that ships with tba (`quickstart`), or a dict of sections.
        objective: a function `(sequences, tokens, settings, beta)` (docs/extending.md), or the name of a preset; in
            place of `objective.preset`.
        rewards: the scorers of every task of the run, in place of the recipe's: functions
            `(prompts, completions, **columns)` as in TRL (docs/rewards.md), or dicts as the recipe has them
            (`{"kind": "format", "pattern": "####", "gate": 1.0}`). The reward is their weighted sum.
        prompts: in place of the recipe's: rows `{"prompt_id", "task", "text", "data", "split"}`, as a list of dicts or
            a `datasets.Dataset`. With `model`, rows as TRL has them: `prompt` is a text or messages, and the functions
            of `rewards` get the other columns. Without `rewards` and `environment`, the column `answer`
            decides the scorer.
        sets: overrides, such as "trainer.num_steps=50".
        name: the name of the run, instead of `run.name` of the recipe, or of the model.
        fresh: delete the run of this name first.
        resume: continue the run of this name; give the same arguments again.
        progress: show what `tba run` shows; without it nothing is printed.
        environment: the class of the environment that every task of the run is played in (docs/environments.md), or
            its name "module:Class". Then `rewards` may be left out: it pays. What the recipe says of the task's
            environment else, such as its limits, stays.
        tools: functions with types and a docstring that the policy may call, or their names "module:function".
        model: without a recipe: a folder in Hugging Face format, or ORG/NAME on the hub.
        steps: optimizer steps, with an evaluation after each third; None: as the recipe says.
        lora: with `model`: train an adapter, or all weights; None: all weights where they fit into memory.

    Returns:
        The run, done or interrupted. After an interrupt, the same call with `resume=True` continues it.

    Raises:
        ConfigError: something is wrong or in use; nothing was begun.
        ChildError: the run failed. `tba.Run(name)` shows what it made.
        KeyboardInterrupt: it was interrupted before training began, so there is nothing to resume.

    Examples:
        >>> run = tba.run("quickstart", name="first", sets=["trainer.num_steps=100"])
        >>> print(run.summary().text)
        >>> run = tba.run(model="org/chat-model", prompts=rows, rewards=[contains], steps=60)
    """
    all_sets = [*sets, *([] if name is None else [f"run.name={json.dumps(name)}"])]
    if steps is not None:
        all_sets = [f"trainer.num_steps={steps}", f"eval.every_steps={max(1, steps // 3)}", *all_sets]
    if model is not None and progress:
        print(
            "measuring rows and model, some seconds; a minute where memory is scarce and a step is traced", flush=True
        )
    inputs = prepare(
        recipe,
        model=model,
        name=name,
        lora=lora,
        objective=objective,
        rewards=rewards,
        environment=environment,
        tools=tools,
        prompts=prompts,
        sets=all_sets,
        resume=resume,
        fresh=fresh,
    )
    words = ["run", inputs.recipe, *(word for item in all_sets for word in ("--set", item))]
    words += ["--fresh"] if fresh else []
    words += ["--resume"] if resume else []
    on_error_line = partial(print, file=sys.stderr, flush=True) if progress else lambda _: None
    with closing(Command(words, on_error_line=on_error_line, import_folders=inputs.import_folders)) as command:
        with _interruptible():
            code = _until_end(command, progress=progress)
        if code not in (0, EXIT_INTERRUPTED):
            error = command.failure(code)
            text, advice, _ = str(error).partition(f"; {SHELL_ADVICE}")
            text += f"; {PYTHON_ADVICE}" if advice else ""
            # with the last lines of what was not shown, where the error refers to them
            if not progress and LINES_ABOVE in text:
                text = f"{''.join(command.last_lines)}{text}"
            raise type(error)(text)
    if code == EXIT_INTERRUPTED and not inputs.folder.has_begun:
        raise KeyboardInterrupt
    if code == EXIT_INTERRUPTED and progress:
        print(f"interrupted; {PYTHON_ADVICE}", flush=True)
    return Run(inputs.folder.path)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt in the `with` block.

    Under `asyncio.run` the first SIGINT would only cancel a task, which a blocking call does not notice.
    """
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or before in (signal.SIG_IGN, signal.default_int_handler, None):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _until_end(command: Command, *, progress: bool) -> int:
    """Print the command's output until it ends, pass interrupts on to it, and return its exit code."""
    while True:
        try:
            while line := command.next_line():
                # the services would not find the functions that are named in the recipe of that command
                if progress and not line.startswith(SHELL_ADVICE):
                    print(line, end="", flush=True)
            return command.wait()
        except KeyboardInterrupt:
            command.interrupt()
            if progress:
                print("stopping cleanly; a second interrupt kills it (it can be resumed then too)", flush=True)
