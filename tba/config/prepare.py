"""What a recipe needs on the disk before it can run: `[[prepare]]` items, which `tba data prepare RECIPE` fetches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from tba.config.base import StrictModel


class PrepareItem(StrictModel):
    """One folder: a model or a data set, and where it comes from: exactly one of `hub`, `maker` and `by_hand`."""

    path: str = Field(min_length=1)
    """Folder, relative to where `tba` is run. Wherever the recipe names this path, the folder is meant."""
    kind: Literal["model", "dataset"]
    """What is in it. A model is loaded once to check it; a data set is checked by the prompts made of it."""
    hub: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][\w.-]*/[\w.-]+$|^[\w.-]+$")
    """Name on the Hugging Face hub."""
    revision: str | None = None
    """Commit, branch or tag on the hub; none: the newest. The commit that was fetched is written down."""
    files: list[str] | None = Field(default=None, min_length=1)
    """Patterns of the files to fetch from the hub, for example ["main/*"]; none: configuration, tokenizer and
    safetensors of a model, everything of a data set."""
    tokenizer: str | None = None
    """Where the model's repository has none: a repository on the hub that its tokenizer is fetched from."""
    maker: str | None = None
    """Name of a maker of small things (tba_trainer/tiny/): made on this machine, without a network."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the maker."""
    by_hand: str | None = None
    """It cannot be fetched: what a person has to do. The item is then only checked."""
    at_start: bool = False
    """`tba run` fetches or makes it by itself where it is missing, instead of asking for `tba data prepare`."""

    @model_validator(mode="after")
    def _check(self) -> PrepareItem:
        if sum(source is not None for source in (self.hub, self.maker, self.by_hand)) != 1:
            raise ValueError(f"{self.path}: give exactly one of hub, maker and by_hand")
        for name in ("revision", "files", "tokenizer"):
            if self.hub is None and getattr(self, name) is not None:
                raise ValueError(f"{self.path}: {name} belongs to a download from the hub; remove it")
        if self.kind == "dataset" and self.tokenizer is not None:
            raise ValueError(f"{self.path}: a data set has no tokenizer; remove it")
        return self

    @property
    def origin(self) -> dict[str, str | int | list[str] | None]:
        """What makes the content: recorded in the folder, and compared when the folder is there already."""
        if self.maker is not None:
            return {"maker": self.maker, "seed": self.seed}
        return {"hub": self.hub, "revision": self.revision, "files": self.files, "tokenizer": self.tokenizer}


def with_replaced(value: Any, texts: Mapping[str, str]) -> Any:
    """A document in which every text that is a key of `texts`, wherever it stands, is the text that it maps to.

    So the folders of `[[prepare]]` move in every section that names them: reward models, victims, data sets.
    """
    if isinstance(value, dict):
        return {key: with_replaced(child, texts) for key, child in value.items()}
    if isinstance(value, list):
        return [with_replaced(child, texts) for child in value]
    return texts.get(value, value) if isinstance(value, str) else value
