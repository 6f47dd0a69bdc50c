"""Prompts and their upload."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field, field_validator

from tba.api.base import Name, Split
from tba.config.base import StrictModel
from tba.numbers import MAX_DIGITS

MAX_DATA_LEVELS = 32
"""Deepest nesting of a prompt's data. Readers of JSON have limits of their own, and every searcher must read it."""
_MAX_WHOLE = 10**MAX_DIGITS


class Prompt(StrictModel):
    """One question with its task name and the data its reward needs (JSON, nested at most 32 levels deep)."""

    prompt_id: Name
    task: Name
    text: str = Field(min_length=1, max_length=1_000_000)
    data: dict[str, Any] = Field(default_factory=dict)
    split: Split = "train"

    @field_validator("data")
    @classmethod
    def _is_plain_json(cls, data: dict[str, Any]) -> dict[str, Any]:
        _check_levels_and_digits(data)
        json.dumps(data, allow_nan=False, ensure_ascii=False).encode()  # NaN and lone surrogates raise ValueError
        return data


def _check_levels_and_digits(data: dict[str, Any]) -> None:
    """Raises ValueError; level by level, so that no depth can exhaust the stack."""
    level: list[Any] = [data]
    for _ in range(MAX_DATA_LEVELS):
        children = [child for value in level for child in (value.values() if isinstance(value, dict) else value)]
        if any(isinstance(child, int) and not -_MAX_WHOLE < child < _MAX_WHOLE for child in children):
            raise ValueError(f"holds a whole number of more than {MAX_DIGITS} digits; store it as a text")
        level = [child for child in children if isinstance(child, (dict, list))]
        if not level:
            return
    raise ValueError(f"nested deeper than {MAX_DATA_LEVELS} levels; flatten it, or store it as one text")


class PromptUpload(StrictModel):
    """POST /v1/prompts: idempotent by prompt id; the same id with other content is refused."""

    prompts: list[Prompt] = Field(min_length=1, max_length=10_000)


class PromptUploadReply(StrictModel):
    """What an upload changed."""

    num_new: int
    num_same: int
    num_train: int
    num_heldout: int
