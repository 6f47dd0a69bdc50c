"""What the worlds with data made by rule share: splits by a hash of the content, and prompts from rows.

The rows of a split are a function of its name and a seed. A split depends on the content alone, so that nothing held
out is trained on; each world says what counts as the same content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Literal

from tba.api import Prompt


def bucket_of(content: str) -> int:
    """Return the hash bucket of a content, from 0 to 99."""
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") % 100


def distinct_prompts(
    task: str, split: Literal["train", "heldout"], rows: Iterable[tuple[str, dict[str, Any]]], count: int
) -> list[Prompt]:
    """Return the first `count` different prompts of rows (text, data); fewer where there are not so many.

    The id of a prompt is a digest of its content, so the same row is the same prompt wherever it stands.
    """
    found: dict[str, Prompt] = {}
    for text, data in rows:
        name = hashlib.sha256(f"{text}{sorted(data.items())}".encode()).hexdigest()[:16]
        found.setdefault(name, Prompt(prompt_id=f"{task}-{split}-{name}", task=task, text=text, data=data, split=split))
        if len(found) == count:
            break
    return list(found.values())
