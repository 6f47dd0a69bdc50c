"""`tba data prepare`: fetch or make the models and data sets of a recipe, then check that a run can begin.

Idempotent: a folder that is there is only checked. Programs of their own do the work that needs torch or transformers.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tba.api import Prompt
from tba.config import Recipe
from tba.config.data import PrepareItem
from tba.config.reward import ModelScorerSpec
from tba.errors import ConfigError
from tba_cli.artifacts.huggingface import download
from tba_cli.artifacts.prepared import (
    begin,
    check_prepared,
    is_there,
    needed,
    publish,
    read_record,
)
from tba_cli.child_processes import run_program
from tba_cli.console import Console
from tba_cli.prompts.reader import in_both_splits, prompts_of
from tba_cli.setup import trl_training

MAX_MEASURED_PROMPTS = 20_000
"""At most this many prompts are measured in tokens; data sets of the recipes have up to about 100,000."""
MAX_SHOWN_CHARS = 1000


def prepare_recipe(recipe: Recipe, console: Console) -> None:
    """Get what is missing of `[[prepare]]`. Then check models, columns and lengths.

    Raises:
        ConfigError: something cannot be fetched, made or read, or does not fit the recipe.
        ChildError: TRL failed.
    """
    wanted = needed(recipe)
    missing = [item for item in wanted if not is_there(item)]
    get_items(missing, console)
    for item in wanted:
        record = read_record(Path(item.path))
        state = "here already" if item not in missing else "fetched" if item.hub else "made"
        commit = f", commit {record['commit'][:12]}" if record and record["commit"] else ""
        source = item.hub or ("of TRL" if item.trl_file else "of your own")
        console.result(f"{item.path}: {item.kind} {source}, {state}{commit}")
    trl_training.check_scorers(recipe)
    prompts = prompts_of(recipe)
    _check_models(recipe, prompts, console)
    _show_prompts(recipe, prompts, console)


def prepare_at_start(recipe: Recipe, console: Console) -> None:
    """Fetch or make the missing items that `tba run` takes care of (`at_start`).

    Raises:
        ConfigError: something cannot be fetched or made, or TRL needs what `tba data prepare` has to get.
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
            console.info(f"fetched {item.hub} at commit {record['commit']}; model.revision pins it")


def get_items(missing: Sequence[PrepareItem], console: Console) -> None:
    """Fetch or train items of `[[prepare]]`.

    Raises:
        ConfigError: one cannot be fetched or trained.
    """
    # before anything large is fetched: such an item ends the command in any case
    for item in missing:
        if item.manual is not None:
            raise ConfigError(f"{item.path} ({item.kind}) cannot be fetched: {item.manual}")
    to_train = [item for item in missing if item.trl_file is not None]
    trl_training.check_installed(to_train)
    for item in missing:
        if item.hub is not None:
            console.info(f"fetching {item.kind} {item.hub} to {item.path}")
            _fetch(item)
    # last, and in the order of the recipe: base models and data sets come before
    for item in to_train:
        trl_training.train(item, console)


def _fetch(item: PrepareItem) -> None:
    folder = begin(item)
    try:
        commit = download(item, folder)
    except ConfigError:
        with contextlib.suppress(OSError):  # something was fetched
            folder.rmdir()
        raise
    if item.kind == "model" and any(folder.glob("pytorch_model*.bin")):
        run_program("tba_cli.starter_models.convert", ["convert", str(folder)])
    publish(item, folder, commit=commit)


def _check_models(recipe: Recipe, prompts: Sequence[Prompt], console: Console) -> None:
    """Load config and tokenizer of every model folder, and measure the prompts with those of the starting model."""
    made = [item.path for item in needed(recipe) if item.kind == "model"]
    # a model that was only made to train others from may be absent
    others = [path for path in made if path != recipe.model.path and Path(path).is_dir()]
    has_own = recipe.model.path not in made
    if recipe.model.warm_start is not None or (has_own and not Path(recipe.model.path).is_dir()):
        console.result(
            f"{recipe.model.path}: the starting model is not an item of [[prepare]], and is not checked here"
        )
        measured, folders = [], others
    else:
        measured, folders = list(prompts[:MAX_MEASURED_PROMPTS]), [recipe.model.path, *others]
    if not folders:
        return
    answers = _measured(recipe, folders, measured)
    for folder, answer in zip(folders, answers, strict=True):
        console.result(
            f"{folder}: {answer['architecture']}, {answer['num_parameters']:,} parameters, vocabulary of "
            f"{answer['vocab_size']:,}"
        )
    if measured:
        console.result(_lengths(recipe, answers[0], len(measured)))


def _lengths(recipe: Recipe, answer: dict[str, Any], num_prompts: int) -> str:
    """Return a sentence about how long the prompts are in tokens.

    Raises:
        ConfigError: none of them would be used, or prompts and responses do not fit into the model's context.
    """
    limit, room = recipe.searcher.max_prompt_tokens, answer["max_length_tokens"]
    total = limit + recipe.searcher.max_response_tokens
    if room is not None and total > room:
        raise ConfigError(
            f"searcher.max_prompt_tokens + max_response_tokens is {total}, and {recipe.model.path} takes at most {room}"
        )
    # a few long prompts are normal, and only counted
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
        The answer of `convert check` about the model folder, and a sentence about the lengths of the prompts.

    Raises:
        ConfigError: they cannot be loaded, or do not fit the recipe.
    """
    (answer,) = _measured(recipe, [recipe.model.path], prompts)
    return answer, _lengths(recipe, answer, len(prompts))


def endless_warning(recipe: Recipe, prompts: Sequence[Prompt], answer: dict[str, Any] | None = None) -> str | None:
    """Return that no answer ends before its length limit, and behind the ; what to do; None where they end.

    Args:
        answer: of `convert check`; None: it is asked, where the files of the model leave room for doubt.
    """
    folder = Path(recipe.model.path)
    if answer is None:
        files = [folder / name for name in ("tokenizer_config.json", "generation_config.json", "config.json")]
        text = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
        has_template = '"chat_template"' in text or (folder / "chat_template.jinja").is_file()
        if not has_template and re.search(r'"eos_token(_id)?":\s*[^n\s]', text):
            return None
        (answer,) = _measured(recipe, [recipe.model.path], prompts[:100])
    token, tasks = answer["endless"], recipe.searcher.tasks
    stops = [tasks[prompt.task].stop if prompt.task in tasks else [] for prompt in prompts]
    if token is None or all(token in stop if token else stop for stop in stops):
        return None
    what = f"its chat template ends turns with {token!r}, which is none" if token else "none follows an answer"
    return (
        f"answers end with an end of sequence, and of {folder} {what}: every answer runs to its length limit; name it "
        "in eos_token_id of its generation_config.json, or as a stop string (searcher.tasks.NAME.stop)"
    )


def _measured(recipe: Recipe, folders: Sequence[str], prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """Return the answer of `convert check` for each folder; the first one has the lengths of the prompts in tokens."""
    with tempfile.TemporaryDirectory(prefix="tba-prepare-") as place:
        texts = Path(place) / "texts.json"
        texts.write_text(json.dumps([prompt.text for prompt in prompts]), encoding="utf-8")
        words = ["check", *folders, "--texts", str(texts), "--trust", *_trusted(recipe)]
        return json.loads(run_program("tba_cli.starter_models.convert", words))


def _trusted(recipe: Recipe) -> list[str]:
    """Return the model folders whose own code the recipe runs."""
    specs = [spec for task in recipe.reward.tasks.values() for spec in task.scorers]
    trusting = [spec for spec in specs if isinstance(spec, ModelScorerSpec) and spec.trust_remote_code]
    folders = [getattr(spec, name, None) for spec in trusting for name in ("model", "victim", "classifier")]
    return [*filter(None, folders), *[recipe.model.path] * recipe.model.trust_remote_code]


def _show_prompts(recipe: Recipe, prompts: Sequence[Prompt], console: Console) -> None:
    for split in ("train", "heldout"):
        chosen = [prompt for prompt in prompts if prompt.split == split]
        console.result(f"{len(chosen):,} prompts of split {split}; the first:")
        shown = chosen[0].model_dump_json(indent=2)
        console.result(shown if len(shown) <= MAX_SHOWN_CHARS else f"{shown[:MAX_SHOWN_CHARS]} ...")
    if (shared := in_both_splits(recipe, prompts)) is not None:
        console.result(f"warning: {shared}")
