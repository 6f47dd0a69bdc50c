"""`tba data prepare`: fetch or make what a recipe needs, then check that a run could begin with it.

Idempotent: what is there is only checked. What needs torch or transformers is done by programs of the trainer service.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tba.api import Prompt
from tba.config import Recipe
from tba.config.prepare import PrepareItem
from tba.errors import ConfigError
from tba.local.console import Console
from tba.local.guard import Guard
from tba.local.hub import download
from tba.local.prepared import HALF_DONE, begin_record, is_there, read_record, write_record
from tba.local.prompts import prompts_of
from tba.local.resolve import child_environ

PROGRAM_TIMEOUT_S = 3600.0
"""Deadline of a program of the trainer service; converting a large model takes minutes."""
MAX_MEASURED_PROMPTS = 20_000
"""So many prompts are measured in tokens; data sets of the recipes have up to some 100,000."""
MAX_SHOWN_CHARS = 1000


def prepare_recipe(recipe: Recipe, console: Console) -> None:
    """Fetch or make every `[[prepare]]` item that is missing, then check models, columns, sizes and lengths.

    Raises:
        ConfigError: something cannot be fetched, made or read, or does not go with the recipe.
    """
    missing = [item for item in recipe.prepare if not is_there(item)]
    _get(missing, console)
    for item in recipe.prepare:
        record = read_record(Path(item.path))
        state = "here already" if item not in missing else "made" if item.maker else "fetched"
        commit = f", commit {record['commit'][:12]}" if record and record["commit"] else ""
        console.result(f"{item.path}: {item.kind} {item.hub or item.maker or 'of your own'}, {state}{commit}")
    prompts = prompts_of(recipe)
    _check_models(recipe, prompts, console)
    _show_prompts(prompts, console)


def prepare_at_start(recipe: Recipe, console: Console) -> None:
    """Fetch or make what is missing of the items that `tba run` takes care of (`at_start`).

    Raises:
        ConfigError: something cannot be fetched or made.
    """
    missing = [item for item in recipe.prepare if item.at_start and not is_there(item)]
    _get(missing, console)
    for item in missing:
        record = read_record(Path(item.path))
        if record is not None and record["commit"] and record["commit"] != item.revision:
            console.say(f"fetched {item.hub} at commit {record['commit']}; model.revision pins it")


def _get(missing: Sequence[PrepareItem], console: Console) -> None:
    for item in missing:
        if item.by_hand is not None:
            raise ConfigError(f"{item.path} ({item.kind}) cannot be fetched: {item.by_hand}")
    _make([item for item in missing if item.maker is not None])
    for item in missing:
        if item.hub is not None:
            console.say(f"fetching {item.kind} {item.hub} to {item.path}")
            _fetch(item)


def _make(items: Sequence[PrepareItem]) -> None:
    if not items:
        return
    words = [word for item in items for word in ("--make", item.maker or "", str(item.seed), item.path)]
    for item in items:
        Path(item.path).parent.mkdir(parents=True, exist_ok=True)
        if Path(item.path).is_dir():
            _remove_empty(Path(item.path))
    run_program("tba_trainer.tiny", words)
    for item in items:
        write_record(item, commit=None)


def _remove_empty(folder: Path) -> None:
    """Makers make folders that are not there."""
    try:
        folder.rmdir()
    except OSError as error:
        raise ConfigError(f"{folder} holds a part of something else ({error.strerror}); remove that folder") from None


def _fetch(item: PrepareItem) -> None:
    folder = Path(item.path)
    folder.mkdir(parents=True, exist_ok=True)
    begin_record(item)
    try:
        commit = download(item)
    except ConfigError:
        if {file.name for file in folder.iterdir()} == {HALF_DONE}:  # nothing came: leave nothing
            (folder / HALF_DONE).unlink()
            folder.rmdir()
        raise
    if item.kind == "model" and any(folder.glob("pytorch_model*.bin")):
        run_program("tba_trainer.model_files", ["convert", item.path])
    write_record(item, commit=commit)


def _check_models(recipe: Recipe, prompts: Sequence[Prompt], console: Console) -> None:
    """The starting model first, with the prompts, then the others."""
    others = [item.path for item in recipe.prepare if item.kind == "model" and item.path != recipe.model.path]
    has_own = not any(item.path == recipe.model.path for item in recipe.prepare)
    if recipe.model.warm_start is not None or (has_own and not Path(recipe.model.path).is_dir()):
        console.result(f"{recipe.model.path}: the starting model is no item of [[prepare]], and is not checked here")
        measured, folders = [], others
    else:
        measured, folders = list(prompts[:MAX_MEASURED_PROMPTS]), [recipe.model.path, *others]
    if not folders:
        return
    answers = _measured(folders, measured)
    for folder, answer in zip(folders, answers, strict=True):
        console.result(
            f"{folder}: {answer['architecture']}, {answer['num_parameters']:,} parameters, vocabulary of "
            f"{answer['vocab_size']:,}"
        )
    if measured:
        console.result(_lengths(recipe, answers[0], len(measured)))


def _lengths(recipe: Recipe, answer: dict[str, Any], num_prompts: int) -> str:
    """How long the prompts are in tokens, in a sentence.

    Raises:
        ConfigError: none of them would be used, or responses do not go into the model's context.
    """
    limit, room = recipe.searcher.max_prompt_tokens, answer["max_length_tokens"]
    total = limit + recipe.searcher.max_response_tokens
    if room is not None and total > room:
        raise ConfigError(
            f"searcher.max_prompt_tokens + max_response_tokens is {total}, and {recipe.model.path} takes at most {room}"
        )
    num_over = sum(tokens > limit for tokens in answer["text_tokens"])
    if num_over == num_prompts:
        raise ConfigError(f"every prompt is longer than searcher.max_prompt_tokens ({limit}); raise it")
    return (
        f"prompts have up to {max(answer['text_tokens'])} tokens; {num_over} of {num_prompts} are longer than "
        f"searcher.max_prompt_tokens ({limit}) and will be refused"
    )


def measure_model(recipe: Recipe, prompts: Sequence[Prompt]) -> tuple[dict[str, Any], str]:
    """Load config and tokenizer of the starting model and measure prompts with them.

    Returns:
        What the model folder holds, and how long the prompts are in a sentence.

    Raises:
        ConfigError: they cannot be loaded, or do not go with the recipe.
    """
    (answer,) = _measured([recipe.model.path], prompts)
    return answer, _lengths(recipe, answer, len(prompts))


def _measured(folders: Sequence[str], prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """What each model folder holds; the first one with the lengths of the prompts in tokens."""
    with tempfile.TemporaryDirectory(prefix="tba-prepare-") as place:
        texts = Path(place) / "texts.json"
        texts.write_text(json.dumps([prompt.text for prompt in prompts]))
        return json.loads(run_program("tba_trainer.model_files", ["check", *folders, "--texts", str(texts)]))


def _show_prompts(prompts: Sequence[Prompt], console: Console) -> None:
    for split in ("train", "heldout"):
        chosen = [prompt for prompt in prompts if prompt.split == split]
        console.result(f"{len(chosen):,} prompts of split {split}; the first:")
        shown = chosen[0].model_dump_json(indent=2)
        console.result(shown if len(shown) <= MAX_SHOWN_CHARS else f"{shown[:MAX_SHOWN_CHARS]} ...")
    texts = {prompt.text for prompt in prompts if prompt.split == "train"}
    both = sum(prompt.text in texts for prompt in prompts if prompt.split == "heldout")
    if both:
        console.result(f"{both} held-out prompts have the text of a prompt that is trained on")


def run_program(module: str, words: Sequence[str]) -> str:
    """Run a program of the trainer service and return what it wrote to stdout. It ends with this process, even when
    that is killed.

    Raises:
        ConfigError: it is not installed, ran into its deadline, or says what is wrong.
    """
    guard = Guard()
    program = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        env=child_environ(os.environ, num_threads=1),  # threads that spin make small models slower
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        guard.add(program.pid)
        out, err = program.communicate(timeout=PROGRAM_TIMEOUT_S)
        guard.discard(program.pid)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{module} did not end within {PROGRAM_TIMEOUT_S:.0f} s") from None
    finally:  # also at Ctrl-C, which does not reach another session
        if program.poll() is None:
            program.kill()
            program.wait()
        guard.close()
    if program.returncode == 0:
        return out
    last = (err.strip().splitlines() or [f"exit code {program.returncode}"])[-1]
    hint = (
        "; install the trainer service: pip install -e ./services/trainer"
        if "No module named 'tba_trainer" in last
        else ""
    )
    raise ConfigError(f"{last.removeprefix('error: ')}{hint}")
