"""The section about prompts: where they come from, and how a row of a data set becomes a prompt with a gold answer.

A `[[prepare]]` item is a model or a data set that must be on the disk before a run: `tba data prepare` fetches it.
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
    """One folder: a model or a data set, and where it comes from: exactly one of `hub`, `manual`, `trl_sft`
    and `trl_reward`."""

    path: str = Field(min_length=1)
    """Folder, relative to where `tba` is run. Wherever the recipe names this path, the folder is meant."""
    kind: Literal["model", "dataset"]
    """Its content. A model is loaded once to check it; a data set is checked by the prompts made of it."""
    hub: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][\w.-]*/[\w.-]+$|^[\w.-]+$")
    """Name on the Hugging Face hub."""
    revision: str | None = None
    """Commit, branch or tag on the hub; none: the newest. The commit that was fetched is written down."""
    tokenizer: str | None = None
    """Where the model's repository has none: a repository on the hub that its tokenizer is fetched from."""
    manual: str | None = None
    """For content that cannot be fetched: the instructions for a person. The item is then only checked."""
    trl_sft: str | None = None
    """TRL's file of settings, beside the recipe: `trl sft` makes this language model (docs/recipes.md)."""
    trl_reward: str | None = None
    """TRL's file of settings, beside the recipe: `trl reward` makes this reward model."""
    at_start: bool = False
    """`tba run` fetches or makes it by itself where it is missing, instead of asking for `tba data prepare`."""

    @model_validator(mode="after")
    def _check(self) -> PrepareItem:
        # ways to get the folder; two of them would disagree about its content
        sources = (self.hub, self.manual, self.trl_sft, self.trl_reward)
        if sum(source is not None for source in sources) != 1:
            raise ValueError(f"{self.path}: give exactly one of hub, manual, trl_sft and trl_reward")
        if self.kind == "dataset" and self.trl_file is not None:
            raise ValueError(f"{self.path}: TRL makes models; set kind to 'model'")
        for name in ("revision", "tokenizer"):
            if self.hub is None and getattr(self, name) is not None:
                raise ValueError(f"{self.path}: {name} belongs to a download from the hub; remove it")
        if self.kind == "dataset" and self.tokenizer is not None:
            raise ValueError(f"{self.path}: a data set has no tokenizer; remove it")
        return self

    @property
    def trl_file(self) -> str | None:
        """TRL's file of settings, where TRL makes the model."""
        return self.trl_sft or self.trl_reward

    @property
    def origin(self) -> dict[str, str | None]:
        """The source of the content: recorded in the folder, and compared if the folder exists.

        Without TRL's file, as in a pod that has the recipe alone, `settings_sha256` is None: nothing is compared.
        """
        if self.trl_file is not None:
            sha256 = None
            with suppress(OSError):
                sha256 = hashlib.sha256(Path(self.trl_file).read_bytes()).hexdigest()
            return {"trl": "sft" if self.trl_sft else "reward", "settings_sha256": sha256}
        return {"hub": self.hub, "revision": self.revision, "tokenizer": self.tokenizer}


def with_replaced(value: Any, texts: Mapping[str, str]) -> Any:
    """Return a document in which every text that is a key of `texts` is replaced by its value.

    It moves the folders of `[[prepare]]` in every section that names them: reward models, victims, data sets.
    """
    if isinstance(value, dict):
        return {key: with_replaced(child, texts) for key, child in value.items()}
    if isinstance(value, list):
        return [with_replaced(child, texts) for child in value]
    return texts.get(value, value) if isinstance(value, str) else value


class ColumnValue(StrictModel):
    """A value of a prompt's data, taken from a column of the data set. A bare text is a column's name."""

    column: str = Field(min_length=1)
    """The column, or a path into a nested one: `reward_model.ground_truth`."""
    extract: Literal["whole", "before", "after", "boxed", "json"] = "whole"
    """The part of it. `whole`: the value as it is. `before`: the text before the first `marker`, all of it if there is
    none. `after`: the text after the last `marker`. `boxed`: the content of the last \\boxed{...}. `json`: the value at
    the key `marker` of a JSON object."""
    marker: str | None = None
    """The text that stands before or after the answer (GSM8K: `####`), or the key."""

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


class DataSet(StrictModel):
    """Rows of a data set, or texts, that become prompts.

    The prompt id is a digest of the content, so the same row is the same prompt wherever it stands.
    """

    task: str = Field(min_length=1, max_length=128)
    """Task of every prompt: names its reward."""
    dataset: str | None = None
    """Name on the Hugging Face hub, a folder with a data set in a format of the hub (`[[prepare]]` makes one), or
    FILE.jsonl."""
    subset: str | None = None
    """Configuration of the data set, where it has several."""
    train: str | None = None
    """Split to train on, for example `train[:1000]`. A data set that names no split at all is trained on `train`."""
    heldout: str | None = None
    """Split to evaluate on, never trained on. Where no data set names one, `data.num_heldout` prompts are held out."""
    texts: list[str] | None = Field(default=None, min_length=1)
    """Instead of a data set: the prompts themselves, each in both splits."""
    column: str | None = None
    """The column that holds the prompt: text, or messages ({"role", "content"}), which the chat template of
    the starting model's tokenizer turns into text."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the chat template, such as {enable_thinking = false}."""
    template: str | None = None
    """Instead of `column`: text with columns in it, such as "Q: {question}"; {{ and }} stand for braces."""
    data: dict[str, Annotated[ColumnValue, BeforeValidator(_of_name)]] = Field(default_factory=dict)
    """Data for the reward: key -> column."""

    @model_validator(mode="after")
    def _check(self) -> DataSet:
        if (self.dataset is None) == (self.texts is None):
            raise ValueError("give exactly one of `dataset` and `texts` (prompts written out in the recipe)")
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
        """What is read for each split of the run: a split of the data set; of texts, all of them."""
        if self.texts is not None:
            return {"train": "", "heldout": ""}
        if self.train is None and self.heldout is None:
            return {"train": "train"}
        named: dict[Literal["train", "heldout"], str | None] = {"train": self.train, "heldout": self.heldout}
        return {split: name for split, name in named.items() if name is not None}


class DataSection(StrictModel):
    """Prompts: from a built-in generator, a file, or data sets; others are uploaded (`tba prompts upload`)."""

    generator: str | None = None
    """`addition`; or MODULE:FUNCTION, a function of
    your own (docs/extending.md)."""
    path: str | None = None
    """JSONL file; each row is {"prompt_id", "task", "text", "data", "split"}; split is `train` or `heldout`."""
    sets: list[DataSet] = Field(default_factory=list)
    """Data sets whose rows have another shape."""
    num_train: int = Field(default=2000, ge=1)
    """Prompts to train on (generator only)."""
    num_heldout: int = Field(default=512, ge=1)
    """Prompts to evaluate on, never trained on: of a generator, or of data sets that name no split for it. Those of
    data sets are chosen by the digest of their ids, so that the order of the rows does not matter."""
    selection: Literal["epochs", "posterior"] = "epochs"
    """How visits choose prompts. `epochs`: every prompt once per epoch, shuffled. `posterior`: Thompson sampling from a
    Beta posterior of each prompt's success, toward one half, where groups tell most (MoPPS, arXiv 2507.04632)."""

    @property
    def source_name(self) -> str:
        """The name of the source, without the folders above it."""
        if self.sets:
            return (self.sets[0].dataset or self.sets[0].task).rstrip("/").rpartition("/")[2]
        return self.generator or (self.path or "").replace("\\", "/").rpartition("/")[2]
