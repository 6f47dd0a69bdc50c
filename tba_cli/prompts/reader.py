"""The prompts of a run: read from code, a file or a data set, checked, and uploaded in chunks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tba.api import Prompt, PromptUploadReply, RewardInfo, Split
from tba.api.scores import STARTING
from tba.clients import BufferClient
from tba.config import Recipe
from tba.config.data import RowsSection
from tba.config.reward import BUILT_IN_TASKS, ExactSpec, LastNumberSpec, MathSpec
from tba.errors import ConfigError
from tba_cli.generators import load_prompt_source
from tba_cli.prompts.columns import (
    NATIVE_COLUMNS,
    Columns,
    Gold,
    RowError,
    SplitRule,
    TextColumn,
    TextTemplate,
    check_gold,
    native_prompt,
    stored_columns,
)
from tba_cli.prompts.sources import ChatSource, HubSource, Render, Row, Source, TextsSource, open_file

COLUMNS_HINT = (
    "; say what they are: [data.columns] in the recipe; for an upload --task, --text (or --text-template), --id and "
    "--data"
)
MAX_CHUNK_PROMPTS = 1000
DEFAULT_CHUNK_BYTES = 4 * 1024 * 1024
NOT_FAILED = frozenset({"ok", "idle", STARTING})
"""Health of a scorer that works, or whose first attempt to start has not ended."""


def prompts_of(recipe: Recipe) -> list[Prompt]:
    """Return every prompt of the recipe.

    Raises:
        ConfigError: unknown generator, unreadable file, or a split without prompts.
    """
    data, gold = recipe.data, gold_keys(recipe)
    if data.generator is not None:
        prompts = load_prompt_source(data.generator)(data.num_train, data.num_heldout, recipe.run.seed)
        where = f"generator {data.generator!r}"
        for prompt in prompts:
            try:
                check_gold(prompt, gold)
            except RowError as error:
                raise ConfigError(f"{where}, prompt {prompt.prompt_id!r}: {error}") from None
    elif data.train is not None:
        where = "[data.train] and [data.heldout]"
        prompts = [*_dataset_prompts(recipe, "train"), *_dataset_prompts(recipe, "heldout")]
    else:
        source = open_file(Path(data.path or ""))
        prompts, where = list(_file_prompts(recipe, source)), source.name
    # found here, before anything is started or uploaded
    for split in ("train", "heldout"):
        if not any(prompt.split == split for prompt in prompts):
            raise ConfigError(f"{where} holds no prompt with split {split!r}; a run needs prompts of both splits")
    return prompts


def heldout_prompts(recipe: Recipe) -> list[Prompt]:
    """Return the held-out prompts, in order; a data set to train on is not even read.

    Raises:
        ConfigError: as `prompts_of`.
    """
    # a data set to train on may have millions of rows
    if recipe.data.heldout is not None:
        return list(_dataset_prompts(recipe, "heldout"))
    return [prompt for prompt in prompts_of(recipe) if prompt.split == "heldout"]


def _file_prompts(recipe: Recipe, source: Source) -> PromptReader:
    section, gold = recipe.data.columns, gold_keys(recipe)
    if section is None:
        return PromptReader(source, gold=gold)
    source, text = _with_text(recipe, section, source, "data.columns")
    columns = Columns(task=section.task, text=text, data=section.data)
    return PromptReader(source, columns, SplitRule(num_heldout=section.num_heldout), gold=gold)


def _dataset_prompts(recipe: Recipe, split: Split) -> PromptReader:
    section, where = recipe.data.heldout if split == "heldout" else recipe.data.train, f"data.{split}"
    assert section is not None, "the recipe was checked"
    if section.dataset is None:
        source, text = TextsSource(f"{where}.texts", section.texts or []), TextColumn("text")
    else:
        source = HubSource(section.dataset, section.split, subset=section.subset)
        source.name = f"{where}: {source.name}"
        source, text = _with_text(recipe, section, source, where)
    # a text that is in both splits gives two prompts
    prefix = section.task if split == "train" else f"{section.task}-{split}"
    columns = Columns(task=section.task, text=text, data=section.data, id_prefix=prefix)
    return PromptReader(source, columns, SplitRule(split), gold=gold_keys(recipe))


def _with_text(
    recipe: Recipe, section: RowsSection, source: Source, where: str
) -> tuple[Source, TextColumn | TextTemplate]:
    if section.column is None:
        return source, TextTemplate(section.template or "", where=f"{where}.template")
    arguments = section.chat_template_kwargs
    chats = ChatSource(source, section.column, _renderer(recipe), template_kwargs=arguments)
    return chats, TextColumn(section.column)


def gold_keys(recipe: Recipe) -> Gold:
    """Return where the scorers of each task look for a gold answer."""
    keys = {task: ["answer"] for task in BUILT_IN_TASKS if task != "make_n"}
    own = {
        task: [spec.field for spec in reward.scorers if isinstance(spec, ExactSpec | LastNumberSpec | MathSpec)]
        for task, reward in recipe.reward.tasks.items()
    }
    return keys | own


def in_both_splits(recipe: Recipe, prompts: Sequence[Prompt]) -> str | None:
    """Return a sentence about held-out prompts that are trained on too; None where there are none."""
    if recipe.data.train is not None and recipe.data.train.texts is not None:
        return None  # written there on purpose: red-teaming has one prompt
    # by text, since ids may differ
    trained = {prompt.text for prompt in prompts if prompt.split == "train"}
    both = [prompt.text in trained for prompt in prompts if prompt.split == "heldout"]
    sentence = f"{sum(both)} of {len(both)} held-out prompts have the text of a prompt that is trained on"
    return sentence if any(both) else None


def _renderer(recipe: Recipe) -> Render:
    """Return a function that renders conversations with the chat template of the starting model."""

    def render(chats: list[Any], arguments: Mapping[str, Any]) -> list[str | RowError]:
        from tba_cli.child_processes import run_program

        folder = recipe.model.path
        if not (Path(folder) / "config.json").is_file():
            raise ConfigError(
                f"prompts are messages, which the chat template of the model makes text of, and model.path {folder} "
                "holds no model yet; make or fetch it first (tba data prepare RECIPE), or give prompts as text"
            )
        with tempfile.TemporaryDirectory(prefix="tba-chats-") as place:
            file = Path(place) / "chats.json"
            file.write_text(json.dumps(chats), encoding="utf-8")
            words = ["chat", folder, "--texts", str(file), "--trust", *[folder] * recipe.model.trust_remote_code]
            words += ["--template-kwargs", json.dumps(arguments)]
            answers = json.loads(run_program("tba_cli.starter_models.convert", words))
        return [answer["text"] if "text" in answer else RowError(answer["error"]) for answer in answers]

    return render


class PromptReader:
    """Reads the prompts of a source, each checked, as a stream that can be read again.

    With an id column, or with native rows, an id that appears twice is an error. Where the id is a digest of the
    content, repeated content is the same prompt, and is left out and counted.

    Args:
        source: the rows.
        columns: the meaning of the columns; None: they have the names of a prompt's fields.
        rule: which prompts of mapped rows are held out.
        gold: the data that a prompt needs.

    Raises:
        ConfigError: the source lacks a column, or the rule cannot be kept.
    """

    def __init__(
        self,
        source: Source,
        columns: Columns | None = None,
        rule: SplitRule | None = None,
        *,
        gold: Gold | None = None,
    ) -> None:
        self._source, self._columns, self._rule = source, columns, rule or SplitRule()
        self._gold = gold or {}
        self.num_repeated = 0
        """Number of rows that the last pass left out."""
        self._check_columns()
        self._heldout: frozenset[str] = frozenset()
        if columns is not None and self._rule.num_heldout is not None:
            # the rule needs the ids of all prompts, so the source is read twice
            self._heldout = self._rule.chosen(prompt.prompt_id for prompt in self)

    def __iter__(self) -> Iterator[Prompt]:
        """Yield the prompts; raise ConfigError that names file, row, column and value, or where there is no prompt."""
        self.num_repeated, seen = 0, set()
        for row in self._source.rows(self._wanted):
            try:
                prompt = self._prompt(row)
                check_gold(prompt, self._gold)
            except RowError as error:
                hint = self._hint(row)
                raise ConfigError(f"{self._source.name}, {row.where}: {error}{hint}") from None
            if prompt.prompt_id not in seen:
                seen.add(prompt.prompt_id)
                yield prompt
            elif self._columns is not None and self._columns.id_column is None:
                self.num_repeated += 1
            else:
                raise ConfigError(f"{self._source.name}, {row.where}: prompt_id {prompt.prompt_id!r} appears twice")
        if not seen:
            raise ConfigError(f"{self._source.name} holds no prompts")

    @property
    def _wanted(self) -> list[str] | None:
        return None if self._columns is None else stored_columns(self._columns.names, self._source.columns)

    def _prompt(self, row: Row) -> Prompt:
        if self._columns is None:
            return native_prompt(row.values, null_is_absent=self._source.is_table)
        prompt = self._columns.prompt(row.values)
        split = self._rule.split_of(prompt.prompt_id, self._heldout)
        return prompt if split == prompt.split else prompt.model_copy(update={"split": split})

    def _hint(self, row: Row) -> str:
        """Return what to do about a row with other keys than those of a prompt."""
        # a table was checked by its columns before the first row: this is for JSONL, where each row has its own keys
        if self._columns is not None or self._source.columns is not None:
            return ""
        is_other = not set(row.values) <= set(NATIVE_COLUMNS) and not set(NATIVE_COLUMNS[:3]) <= set(row.values)
        return f"; its columns are {', '.join(row.values)}{COLUMNS_HINT}" if is_other else ""

    def _check_columns(self) -> None:
        known = self._source.columns
        if known is None:
            return
        if self._columns is None:
            missing = [name for name in NATIVE_COLUMNS[:3] if name not in known]
            hint = COLUMNS_HINT
        else:
            missing, hint = [name for name in self._wanted or [] if name not in known], ""
        if missing:
            raise ConfigError(
                f"{self._source.name} has no column {', '.join(map(repr, missing))}; its columns are "
                f"{', '.join(known)}{hint}"
            )


def upload_prompts(client: BufferClient, prompts: Iterable[Prompt], *, max_chunk_bytes: int) -> PromptUploadReply:
    """Upload prompts in chunks; idempotent. The counts of new and same prompts are totals over all chunks.

    Raises:
        ServiceError: the buffer service refused a chunk or does not answer.
    """
    num_new = num_same = num_train = num_heldout = 0
    for chunk in chunks(prompts, max_chunk_bytes=max_chunk_bytes):
        reply = client.upload_prompts(chunk)
        num_new, num_same = num_new + reply.num_new, num_same + reply.num_same
        num_train, num_heldout = reply.num_train, reply.num_heldout
    return PromptUploadReply(num_new=num_new, num_same=num_same, num_train=num_train, num_heldout=num_heldout)


def chunks(prompts: Iterable[Prompt], *, max_chunk_bytes: int) -> Iterator[list[Prompt]]:
    """Yield lists of at most 1,000 prompts and `max_chunk_bytes` of JSON; a larger prompt is a list of its own."""
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
    """Return the tasks that a reward service with this recipe scores."""
    return sorted({*BUILT_IN_TASKS, *recipe.reward.tasks})


def check_tasks(prompts: Sequence[Prompt], known: Iterable[str]) -> None:
    """Check that every prompt can be scored: else it would be generated for and never trained on.

    Args:
        known: the tasks that are scored.

    Raises:
        ConfigError: a prompt has another task.
    """
    known = list(known)
    for prompt in prompts:
        if prompt.task not in known:
            raise ConfigError(
                f"prompt {prompt.prompt_id!r} has the task {prompt.task!r}, which no reward scores; the reward "
                f"service knows {', '.join(known)}: correct the prompt, or give the task an entry in reward.tasks"
            )


def check_healthy(rewards: Iterable[RewardInfo]) -> None:
    """Check that no scorer failed to start: the service would retry it for ever, while a person waits for the run.

    Raises:
        ConfigError: the first attempt of a scorer to start has failed.
    """
    for reward in rewards:
        for scorer in reward.scorers:
            if scorer.health not in NOT_FAILED:
                raise ConfigError(
                    f"the reward service cannot score the task {reward.task!r}: scorer {scorer.name!r}: "
                    f"{scorer.health}; correct reward.tasks.{reward.task}, or fix what the scorer needs"
                )
