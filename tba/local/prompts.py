"""Prompts of a run: from a built-in generator or a JSONL file, uploaded in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from tba.api import Prompt, PromptUploadReply
from tba.clients import BufferClient
from tba.config import Recipe
from tba.errors import ConfigError
from tba.tasks import load_generator

MAX_CHUNK_PROMPTS = 1000
DEFAULT_CHUNK_BYTES = 4 * 1024 * 1024


def prompts_of(recipe: Recipe) -> list[Prompt]:
    """Every prompt of the recipe.

    Raises:
        ConfigError: unknown generator, unreadable file, or a split without prompts.
    """
    data = recipe.data
    if data.generator is not None:
        prompts = load_generator(data.generator)(data.num_train, data.num_heldout, recipe.run.seed)
        where = f"generator {data.generator!r}"
    else:
        prompts = read_prompts(Path(data.path or ""))
        where = f"prompt file {data.path}"
    for split in ("train", "heldout"):
        if not any(prompt.split == split for prompt in prompts):
            raise ConfigError(f"{where} holds no prompt with split {split!r}; a run needs prompts of both splits")
    return prompts


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a JSONL file, one JSON object per line; empty lines are skipped.

    Raises:
        ConfigError: the file cannot be read, a line is not a prompt, or an id appears twice; names the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"prompt file {path} cannot be read: {reason}") from None
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            prompt = Prompt.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"]) or "line"
            raise ConfigError(f"prompt file {path}, line {number}: {key}: {first['msg']}") from None
        if prompt.prompt_id in prompts:
            raise ConfigError(f"prompt file {path}, line {number}: prompt_id {prompt.prompt_id!r} appears twice")
        prompts[prompt.prompt_id] = prompt
    if not prompts:
        raise ConfigError(f"prompt file {path} holds no prompts")
    return list(prompts.values())


def upload_prompts(client: BufferClient, prompts: Sequence[Prompt], *, max_chunk_bytes: int) -> PromptUploadReply:
    """Upload in chunks; idempotent. The counts of new and same prompts are totals over all chunks.

    Raises:
        ServiceError: the buffer service refused a chunk or does not answer.
    """
    num_new = num_same = num_train = num_heldout = 0
    for chunk in chunks(prompts, max_chunk_bytes=max_chunk_bytes):
        reply = client.upload_prompts(chunk)
        num_new, num_same = num_new + reply.num_new, num_same + reply.num_same
        num_train, num_heldout = reply.num_train, reply.num_heldout
    return PromptUploadReply(num_new=num_new, num_same=num_same, num_train=num_train, num_heldout=num_heldout)


def chunks(prompts: Sequence[Prompt], *, max_chunk_bytes: int) -> Iterator[list[Prompt]]:
    """Runs of at most 1,000 prompts and `max_chunk_bytes` of JSON; a prompt that is larger goes alone."""
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
