"""Splits by a hash of the content, and prompts from rows, for the worlds whose data is made by rule.

The rows of a split are a function of its name and a seed. The split of a row depends on its content alone, so that
nothing held out is trained on. Each world says what counts as the same content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, Literal

from tba.api import Prompt

HELD_OUT = range(12)
"""Hash buckets of held-out content where a world has two splits."""
Split = Literal["train", "heldout"]


def bucket_of(content: str) -> int:
    """Return the hash bucket of a text, from 0 to 99."""
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") % 100


def distinct_prompts(task: str, split: Split, rows: Iterable[tuple[str, dict[str, Any]]], count: int) -> list[Prompt]:
    """Return the first `count` distinct prompts of rows (text, data), or fewer if the rows end.

    The id of a prompt contains a digest of its content, so equal rows always give the same prompt.
    """
    found: dict[str, Prompt] = {}
    for text, data in rows:
        name = hashlib.sha256(f"{text}{sorted(data.items())}".encode()).hexdigest()[:16]
        found.setdefault(name, Prompt(prompt_id=f"{task}-{split}-{name}", task=task, text=text, data=data, split=split))
        if len(found) == count:
            break
    return list(found.values())


def is_of(split: Split, content: str) -> bool:
    """Return whether a content is in a split."""
    return (bucket_of(content) in HELD_OUT) == (split == "heldout")


def prompts_of_both(
    task: str,
    rows: Callable[[Split, int], Iterable[tuple[str, dict[str, Any]]]],
    *,
    num_train: int,
    num_heldout: int,
    seed: int,
) -> list[Prompt]:
    """Return held-out prompts, the same for every seed, and others to train on; `rows` takes a split and a seed."""
    heldout = distinct_prompts(task, "heldout", rows("heldout", 0), num_heldout)
    return [*heldout, *distinct_prompts(task, "train", rows("train", seed), num_train)]
