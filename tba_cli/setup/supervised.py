"""`tba sft` and `tba train-reward`: make the models of `[[sft]]` and `[[reward_training]]` that are missing.

The trainer's package does the training, as a child: `python -m tba_trainer.supervised`. A folder appears whole or not
at all; until then a checkpoint lies beside it, from which the same command goes on.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tba.config import Recipe
from tba.config.supervised import REPORT_FILE, SftSection, SupervisedItem, origin_digest
from tba.errors import ChildError, ConfigError
from tba.temporary_folders import temporary_folder
from tba_cli.artifacts.prepared import ANEW, check_trained
from tba_cli.child_processes import follow_program
from tba_cli.console import Console
from tba_cli.resolve import with_absolute_paths
from tba_cli.setup.examples import write_examples

EXAMPLES_PREFIX = "tba-supervised-"
"""Of the names of the temporary folders that hold examples."""
PLAIN_INTERVAL_S = 5.0
MAX_TAIL_LINES = 30
"""Lines of a training that failed without an explanation, which are shown."""


def key_of(recipe: Recipe, item: SupervisedItem) -> str:
    """Return the place of an item in the recipe, such as `sft.0`."""
    if isinstance(item, SftSection):
        return f"sft.{recipe.sft.index(item)}"
    return f"reward_training.{recipe.reward_training.index(item)}"


def train(recipe: Recipe, path: str, console: Console) -> None:
    """Train the model of an item; go on from a checkpoint that is there. An older model stays until this one is whole.

    Args:
        path: the item's key in `recipe.supervised`.

    Raises:
        ConfigError: the base or the examples are missing or wrong, or the trainer is not installed.
        ChildError: the training failed.
        KeyboardInterrupt: it was interrupted, and can go on.
    """
    item = recipe.supervised[path]
    key = key_of(recipe, item)
    if importlib.util.find_spec("tba_trainer") is None:
        raise ConfigError(f"{key} needs the trainer, which is not installed here: pip install 'tba[trainer]'")
    if item.base is not None and not (Path(item.base).expanduser() / "config.json").is_file():
        is_made = item.base in recipe.supervised or any(other.path == item.base for other in recipe.prepare)
        raise ConfigError(
            f"{key}: there is no model at its base {item.base}; "
            + (
                "run `tba data prepare` with the same recipe, which makes everything in order"
                if is_made
                else "give a folder in Hugging Face format, or fetch one there by an item of [[prepare]]"
            )
        )
    folder = Path(path).expanduser()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(EXAMPLES_PREFIX) as place:
        files = write_examples(item, key, place)
        console.info(
            f"{path}: {item.num_steps:,} steps on {files.num_train:,} examples; held out: {files.num_heldout:,}"
        )
        config = place / "recipe.json"
        # the resolved recipe: the child must not read the variables of this shell again
        config.write_text(with_absolute_paths(recipe).model_dump_json(), encoding="utf-8")
        kind, _, number = key.rpartition(".")
        words = ["sft" if kind == "sft" else "reward", "--config", str(config), "--item", number]
        words += ["--examples", str(files.train), "--out", str(folder)]
        words += [] if files.heldout is None else ["--heldout", str(files.heldout)]
        try:
            _run(words, item, recipe, kind, console)
        except KeyboardInterrupt:
            console.result(f"{path}: interrupted; the same command goes on from the last checkpoint, if there is one")
            raise
    console.result(f"{path}: trained, {_result(path)}")


def _run(words: list[str], item: SupervisedItem, recipe: Recipe, name: str, console: Console) -> None:
    tail: deque[str] = deque(maxlen=MAX_TAIL_LINES)

    def on_line(line: str) -> None:
        tail.append(line)
        console.child_line(name, line)

    def on_progress(values: dict[str, Any]) -> None:
        for sentence in _absent_labels(values):
            console.result(f"{name}: {sentence}")
        show(values)

    try:
        with _progress(console, item.num_steps) as show:
            follow_program(
                "tba_trainer.supervised",
                words,
                on_progress=on_progress,
                on_line=on_line,
                num_threads=item.num_threads,
                gpus=recipe.local.gpus.trainer,
                stop_timeout_s=recipe.local.stop_timeout_s,
            )
    except ChildError:
        # there is no log file that could be read afterwards
        for line in tail:
            console.result(f"{name} | {line}")
        raise


def _absent_labels(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence where no example has one of the labels; the first values of a training count them."""
    for key, which, effect in (
        ("num_of_label", "example", "the model cannot learn it"),
        ("num_heldout_of_label", "held-out example", "the metrics say nothing of it"),
    ):
        counts = values.get(key, {})
        # without any example nothing is evaluated, and nothing is said
        if any(counts.values()) and (absent := [label for label, num in counts.items() if not num]):
            found = ", ".join(f"{label} {num:,}" for label, num in counts.items())
            yield f"no {which} has the label {', '.join(map(repr, absent))} ({found}): {effect}"


def what_is_there(recipe: Recipe, path: str) -> str:
    """Check the folder of an item that is there, and say what it is.

    Examples and base are compared where they are on this machine.

    Raises:
        ConfigError: it was made with other settings, of other examples or from another training of its base, or a row
            of the data set is no example.
    """
    item, folder = recipe.supervised[path], Path(path).expanduser()
    if not (folder / REPORT_FILE).is_file():
        return f"a folder of your own (no {REPORT_FILE} in it), taken as it is"
    data = (folder / REPORT_FILE).read_bytes()
    made_of = check_trained(data, item, where=path)
    made_from, base = json.loads(data).get("base_origin"), origin_digest(item.base)
    if made_from is not None and base is not None and made_from != base:
        raise ConfigError(f"{path} was trained from {item.base} before that was trained anew; {ANEW}")
    if not Path(item.dataset).expanduser().exists():
        return f"here already; its examples were not compared, since {item.dataset} is not here"
    with temporary_folder(EXAMPLES_PREFIX) as place:
        found = write_examples(item, key_of(recipe, item), place).sha256
    if found != made_of:
        raise ConfigError(
            f"{path} was trained on other examples (sha256 {made_of[:12]}) than {item.dataset} gives now "
            f"({found[:12]}); {ANEW}"
        )
    return "here already"


def _result(path: str) -> str:
    """Return in a line what was made and measured, by its report."""
    report = json.loads((Path(path).expanduser() / REPORT_FILE).read_bytes())
    left_out = [
        f"{number:,} {reason}{where}"
        for key, where in (("num_left_out", ""), ("num_heldout_left_out", " of the held-out ones"))
        for reason, number in report[key].items()
    ]
    examples = f"{report['num_examples']:,} examples" + (f" (left out: {', '.join(left_out)})" if left_out else "")
    return f"{report['num_steps']:,} steps on {examples}: {_facts(report['metrics'])}"


@contextmanager
def _progress(console: Console, num_steps: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a function that shows the progress: a bar on a terminal, else a line every few seconds."""
    if not console.is_terminal:
        shown_at_s = float("-inf")

        def print_line(values: Mapping[str, Any]) -> None:
            nonlocal shown_at_s
            if values["step"] == num_steps or time.monotonic() - shown_at_s >= PLAIN_INTERVAL_S:
                shown_at_s = time.monotonic()
                eta = f"  ETA {values['eta_s']:.0f} s" if values.get("eta_s") else ""
                console.info(f"step {values['step']}/{num_steps}  {_facts(values)}{eta}".rstrip())

        yield print_line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    columns = (TextColumn("step"), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("ETA"))
    # on a narrow terminal the facts are cut, and nothing else
    facts = TextColumn("{task.fields[facts]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
    with Progress(*columns, TimeRemainingColumn(), facts, console=console.rich, expand=True) as bar:
        task = bar.add_task("step", total=num_steps, facts="starting")
        yield lambda values: bar.update(task, completed=values["step"], facts=_facts(values))


def _facts(values: Mapping[str, Any]) -> str:
    """Return what was measured; numbers of things are no measurement."""
    found = {name: value for name, value in values.items() if isinstance(value, float) and name != "eta_s"}
    return "  ".join(f"{name} {value:.4g}" for name, value in found.items())
