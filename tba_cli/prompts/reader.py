"""The prompts of a run: read from code, a file or a data set, checked, and uploaded in chunks."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tba.api import Prompt, PromptUploadReply, RewardInfo, Split
from tba.api.scores import STARTING
from tba.clients import BufferClient
from tba.config import Recipe
from tba.config.data import DataSet
from tba.config.reward import BUILT_IN_TASKS, GoldSpec
from tba.errors import ConfigError, did_you_mean
from tba_cli.child_processes import ask_program
from tba_cli.generators import load_prompt_source
from tba_cli.prompts.columns import (
    TOOLS_COLUMN,
    Chat,
    Gold,
    RowError,
    check_gold,
    prompt_of,
    template_parts,
    text_of,
    validated,
)
from tba_cli.prompts.sources import Row, dataset_rows, jsonl_rows

GYM_PROGRAM = "tba_cli.prompts.reasoning_gym"
COLUMNS_HINT = "; rows of another shape are for [[data.sets]] in a recipe, which says what their columns are"
MAX_CHUNK_PROMPTS = 1000
DEFAULT_CHUNK_BYTES = 4 * 1024 * 1024
NOT_FAILED = frozenset({"ok", "idle", STARTING})
"""Health of a scorer that works, or whose first attempt to start has not ended."""


def prompts_of(recipe: Recipe) -> list[Prompt]:
    """Return every prompt of the recipe; if no data set names held-out rows, hold out `data.num_heldout` of them."""
    data = recipe.data
    if data.generator is not None:
        where = f"generator {data.generator!r}"
        prompts = load_prompt_source(data.generator)(data.num_train, data.num_heldout, recipe.run.seed)
        for prompt in prompts:
            try:
                check_gold(prompt, gold_keys(recipe))
            except RowError as error:
                raise ConfigError(f"{where}, prompt {prompt.prompt_id!r}: {error}") from None
    elif data.path is not None:
        where, prompts = f"file {data.path}", prompts_of_file(Path(data.path), gold_keys(recipe))
    else:
        where, prompts = "[[data.sets]]", _prompts_of_sets(recipe, ("train", "heldout"))
        if not _names_heldout(recipe):
            if data.num_heldout >= len(prompts):
                raise ConfigError(
                    f"data.num_heldout {data.num_heldout} of {len(prompts)} prompts leaves none to train on; hold out "
                    "fewer"
                )
            # by digest: more rows later leave most of the held-out prompts as they are
            digests = {prompt.prompt_id: hashlib.sha256(prompt.prompt_id.encode()).digest()[:8] for prompt in prompts}
            ids = set(heapq.nsmallest(data.num_heldout, digests, key=digests.__getitem__))
            held_out = {"split": "heldout"}
            prompts = [one.model_copy(update=held_out) if one.prompt_id in ids else one for one in prompts]
    # found here, before anything is started or uploaded
    for split in ("train", "heldout"):
        if not any(prompt.split == split for prompt in prompts):
            raise ConfigError(f"{where} holds no prompt with split {split!r}; a run needs prompts of both splits")
    return prompts


def heldout_prompts(recipe: Recipe) -> list[Prompt]:
    """Return the held-out prompts, in order; if `[[data.sets]]` names held-out rows, read only these."""
    # a data set to train on may have millions of rows
    if _names_heldout(recipe):
        return _prompts_of_sets(recipe, ("heldout",))
    return [prompt for prompt in prompts_of(recipe) if prompt.split == "heldout"]


def prompts_of_file(path: Path, gold: Gold | None = None) -> list[Prompt]:
    """Return the prompts of a JSONL file whose rows have the fields of a prompt."""
    found: dict[str, Prompt] = {}
    for row in jsonl_rows(path):
        try:
            prompt = validated(dict(row.values))
            check_gold(prompt, gold or {})
        except RowError as error:
            # a row of another data set, and no prompt with an error
            is_other = not {"prompt_id", "task", "text"} & set(row.values)
            hint = f"; its columns are {', '.join(row.values)}{COLUMNS_HINT}" if is_other else ""
            raise ConfigError(f"{row.where}: {error}{hint}") from None
        if prompt.prompt_id in found:
            raise ConfigError(f"{row.where}: prompt_id {prompt.prompt_id!r} appears twice")
        found[prompt.prompt_id] = prompt
    if not found:
        raise ConfigError(f"file {path} holds no prompts")
    return list(found.values())


def _names_heldout(recipe: Recipe) -> bool:
    return any("heldout" in section.splits for section in recipe.data.sets)


def _prompts_of_sets(recipe: Recipe, splits: Sequence[Split]) -> list[Prompt]:
    """Return the prompts of `[[data.sets]]`; rows with equal content become one prompt."""
    gold, sets = gold_keys(recipe), recipe.data.sets
    chosen: list[tuple[Split, DataSet]] = [(split, each) for split in splits for each in sets if split in each.splits]
    gyms = _gym_entries([section for _, section in chosen])
    read: list[tuple[Split, DataSet, list[Row], list[str | Chat]]] = []
    for split, section in chosen:
        rows = list(_rows_of(section, section.splits[split], gyms))
        if not rows:
            raise ConfigError(f"data set {section.dataset} holds no rows of split {section.splits[split]!r}")
        read.append((split, section, rows, _texts_of(section, rows)))
    _render_chats(recipe, [(section, rows, texts) for _, section, rows, texts in read])
    found: dict[str, Prompt] = {}
    for split, section, rows, texts in read:
        for row, text in zip(rows, texts, strict=True):
            try:
                prompt = prompt_of(section, split, text, row.values)
                check_gold(prompt, gold)
            except RowError as error:
                raise ConfigError(f"{row.where}: {error}") from None
            found.setdefault(prompt.prompt_id, prompt)
    return list(found.values())


def _gym_entries(sections: Sequence[DataSet]) -> Iterator[list[dict[str, Any]]]:
    """Yield the entries of each data set of reasoning-gym. One program makes all, for its start takes seconds."""
    asked = [
        {"name": each.reasoning_gym, "options": each.options, "num_rows": each.num_rows or 500}
        for each in sections
        if each.reasoning_gym is not None
    ]
    if asked:
        for settings, entries in zip(asked, ask_program(GYM_PROGRAM, [json.dumps(asked)]), strict=True):
            yield [{**settings, **entry} for entry in entries]


def _rows_of(section: DataSet, split: str, gyms: Iterator[list[dict[str, Any]]]) -> Iterator[Row]:
    if section.texts is not None:
        yield from (Row(f"texts, item {number}", {"text": text}) for number, text in enumerate(section.texts, start=1))
    elif section.reasoning_gym is not None:
        for number, entry in enumerate(next(gyms), start=1):
            prompt = [{"role": "user", "content": entry["question"]}]
            yield Row(f"reasoning_gym {section.reasoning_gym}, row {number}", {**entry, "prompt": prompt})
    elif section.dataset is not None and section.dataset.endswith(".jsonl"):
        if split != "train" or section.subset is not None:
            raise ConfigError(f"file {section.dataset} has the split `train` alone, and no subsets")
        yield from jsonl_rows(Path(section.dataset))
    else:
        names = [name for _, name in template_parts(section.template)] if section.template else [section.column]
        # columns that are read, or paths into nested ones
        columns = [name for name in (*names, *(rule.column for rule in section.data.values())) if name]
        more = [TOOLS_COLUMN] if section.column else []
        yield from dataset_rows(section.dataset or "", split, subset=section.subset, columns=columns, optional=more)


def _texts_of(section: DataSet, rows: Sequence[Row]) -> list[str | Chat]:
    """Return the text of each row, or its chat."""
    if section.texts is not None:
        return [row.values["text"] for row in rows]
    texts: list[str | Chat] = []
    for row in rows:
        try:
            texts.append(text_of(section, row.values))
        except RowError as error:
            raise ConfigError(f"{row.where}: {error}") from None
    if section.chat_template_kwargs and not any(isinstance(text, Chat) for text in texts):
        raise ConfigError(
            f"{rows[0].where}: column {section.column!r} holds no messages that chat_template_kwargs are for; "
            "remove them"
        )
    return texts


def _render_chats(recipe: Recipe, read: Sequence[tuple[DataSet, list[Row], list[str | Chat]]]) -> None:
    """Give each chat its text, by the model's chat template, in one program for equal arguments."""
    folder, chats = recipe.model.path, dict[str, list[tuple[DataSet, Row, Chat]]]()
    for section, rows, texts in read:
        for row, text in zip(rows, texts, strict=True):
            if isinstance(text, Chat):
                chats.setdefault(json.dumps(section.chat_template_kwargs), []).append((section, row, text))
    if chats and not (Path(folder) / "config.json").is_file():
        raise ConfigError(
            f"prompts are messages, which the chat template of the model makes text of, and model.path {folder} "
            "holds no model yet; make or fetch it first (tba data prepare RECIPE), or give prompts as text"
        )
    for kwargs, places in chats.items():
        words = ["chat", folder, *["--trust"] * recipe.model.trust_remote_code, "--template-kwargs", kwargs]
        asked = json.dumps([{"messages": chat.messages, "tools": chat.tools} for _, _, chat in places])
        answers = ask_program("tba_cli.starter_models.convert", words, texts=asked)
        for (section, row, chat), answer in zip(places, answers, strict=True):
            if "error" in answer:
                raise ConfigError(f"{row.where}: column {section.column!r}: {answer['error']}")
            chat.text = answer["text"]


def gold_keys(recipe: Recipe) -> Gold:
    """Return for each task the data keys in which its scorers look for a gold answer."""
    keys = {task: ["answer"] for task in BUILT_IN_TASKS if task not in recipe.paid_by_environment}
    own = {
        task: [spec.field for spec in reward.scorers if isinstance(spec, GoldSpec)]
        for task, reward in recipe.reward.tasks.items()
    }
    return keys | own


def prompt_warnings(recipe: Recipe, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield a warning for each setting that does not go with the prompts; the remedy stands after the last `; `."""
    num = Counter(prompt.split for prompt in prompts)
    # `texts` are in both on purpose: red-teaming has one prompt
    written = {text for section in recipe.data.sets for text in section.texts or ()}
    # by text, since ids may differ
    trained = {prompt.text for prompt in prompts if prompt.split == "train"} - written
    num_both = sum(prompt.text in trained for prompt in prompts if prompt.split == "heldout")
    if num_both:
        yield (
            f"{num_both} of {num['heldout']} held-out prompts have the text of a prompt that is trained on, so "
            "evaluations of them measure memory; take them out of one split"
        )
    batch, section = recipe.sampling.prompts_per_batch, recipe.eval
    if batch > num["train"] > 0:
        yield (
            f"sampling.prompts_per_batch is {batch:,}, above the number of prompts to train on ({num['train']:,}): a "
            f"batch draws each of them {batch / num['train']:.1f} times on average; lower it, or take more prompts"
        )
    for name in ("num_prompts", "num_prompts_final"):
        value = getattr(section, name)
        # resolved recipes name every setting, so a default is no choice of a person
        if value > num["heldout"] > 0 and value != type(section).model_fields[name].default:
            yield (
                f"eval.{name} is {value:,}, above the number of held-out prompts ({num['heldout']:,}): no evaluation "
                "has more; lower it, or hold out more"
            )


def upload_prompts(client: BufferClient, prompts: Iterable[Prompt], *, max_chunk_bytes: int) -> PromptUploadReply:
    """Upload prompts in chunks; this is idempotent. The reply has the counts of new and known prompts of all chunks."""
    num_new = num_same = num_train = num_heldout = 0
    for chunk in chunks(prompts, max_chunk_bytes=max_chunk_bytes):
        reply = client.upload_prompts(chunk)
        num_new, num_same = num_new + reply.num_new, num_same + reply.num_same
        num_train, num_heldout = reply.num_train, reply.num_heldout
    return PromptUploadReply(num_new=num_new, num_same=num_same, num_train=num_train, num_heldout=num_heldout)


def chunks(prompts: Iterable[Prompt], *, max_chunk_bytes: int) -> Iterator[list[Prompt]]:
    """Yield lists of at most 1,000 prompts and `max_chunk_bytes` of JSON; a larger prompt gets its own list."""
    chunk: list[Prompt] = []
    num_bytes = 0
    for prompt in prompts:
        size_bytes = len(prompt.model_dump_json().encode()) + 1
        if chunk and (len(chunk) == MAX_CHUNK_PROMPTS or num_bytes + size_bytes > max_chunk_bytes):
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append(prompt)
        num_bytes += size_bytes
    if chunk:
        yield chunk


def tasks_of_recipe(recipe: Recipe) -> list[str]:
    """Return the tasks that a reward service with this recipe scores, or an environment pays."""
    return sorted({*BUILT_IN_TASKS, *recipe.reward.tasks, *recipe.environments})


def check_tasks(prompts: Sequence[Prompt], known: Iterable[str]) -> None:
    """Raise ConfigError if nothing pays for a prompt: its rollouts would be generated, and never trained on."""
    known = list(known)
    for prompt in prompts:
        if prompt.task not in known:
            raise ConfigError(
                f"prompt {prompt.prompt_id!r} has the task {prompt.task!r}, which no reward scores and no environment "
                f"plays; known are {', '.join(known)}: correct the prompt, or give the task an entry in reward.tasks "
                f"or environments{did_you_mean(prompt.task, known)}"
            )


def check_healthy(rewards: Iterable[RewardInfo]) -> None:
    """Raise ConfigError if a scorer failed to start: the service would retry forever, while a person waits."""
    for reward in rewards:
        for scorer in reward.scorers:
            if scorer.health not in NOT_FAILED:
                raise ConfigError(
                    f"the reward service cannot score the task {reward.task!r}: scorer {scorer.name!r}: "
                    f"{scorer.health}; correct reward.tasks.{reward.task}, or fix what the scorer needs"
                )
