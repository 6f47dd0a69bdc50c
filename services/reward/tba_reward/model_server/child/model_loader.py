"""Load a model and its tokenizer from its files; make token ids of texts, and padded batches of ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from jaxtyping import Int
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tba.config.reward import ModelScorerSpec
from tba.errors import ConfigError
from tba.model_folders import check_load_report
from tba_reward.scorer import Failure

InputForm = Literal["text", "chat"]
"""`text`: the spec's template with its fields filled in. `chat`: two turns in the tokenizer's chat template."""
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.py", "*.tiktoken", "*.txt")
WEIGHTS = ("*.safetensors", "*.bin")


class LoadError(Exception):
    """The files do not match the settings; the message is for the person who wrote them."""


def find_folder(path: str) -> Path:
    """Return the folder with the files of a model; a hub model is downloaded, unless it is in the local cache.

    Raises:
        LoadError: there is no such model, or it has no weights.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise LoadError(f"there is no folder {path!r}; tba data prepare RECIPE fetches what a recipe needs")
        folder = _fetch(path, [*SMALL_FILES, WEIGHTS[0]])
        if not any(folder.glob(WEIGHTS[0])):
            folder = _fetch(path, [*SMALL_FILES, WEIGHTS[1]])
    if not any(each for pattern in WEIGHTS for each in folder.glob(pattern)):
        raise LoadError(f"{folder} has no weights ({' or '.join(WEIGHTS)})")
    return folder


def digest_folder(folder: Path) -> str:
    """Return the SHA-256 over names and contents of the files of a model."""
    digest = hashlib.sha256()
    paths = {path for pattern in (*SMALL_FILES, *WEIGHTS) for path in folder.glob(pattern) if path.is_file()}
    for path in sorted(paths):
        with path.open("rb") as file:
            digest.update(f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def load(path: str, folder: Path, spec: ModelScorerSpec, kind: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model, in evaluation mode on its device, and its tokenizer.

    Args:
        path: the recipe's name for the model, for error messages.
        folder: the model's files, from `find_folder`.
        kind: one of the Auto classes of transformers.

    Raises:
        LoadError: the files lack weights of the model.
        Exception: transformers may raise any exception over files that it cannot read.
    """
    device = spec.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=spec.trust_remote_code)
    model, report = kind.from_pretrained(
        folder,
        dtype=spec.dtype,
        trust_remote_code=spec.trust_remote_code,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # the report names them
    )
    try:
        check_load_report(report, model, where=path)
    except ConfigError as error:
        raise LoadError(str(error)) from None
    return model.to(device).eval(), tokenizer


def longest_input(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest number of tokens that the model and its tokenizer accept."""
    config = model.config.get_text_config()
    limits = [tokenizer.model_max_length]
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None:
        # the Roberta family counts positions from behind its padding index
        offset = getattr(getattr(model.base_model, "embeddings", None), "padding_idx", None)
        limits.append(positions if offset is None else positions - offset - 1)
    return min(limits)


def _fetch(name: str, patterns: list[str]) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # many kinds: no such repository, gated, no network, a full disk
        raise LoadError(
            f"{name!r} is not a folder, and it cannot be fetched from the hub ({type(error).__name__}: {error})"
        ) from error


def fill(template: str, prompt: str, response: str = "") -> str:
    """Return the template with `{prompt}` and `{response}` filled in; braces in the two texts stay as they are."""
    before, field, after = template.partition("{response}")
    return before.replace("{prompt}", prompt) + (response if field else "") + after.replace("{prompt}", prompt)


def encode(tokenizer: PreTrainedTokenizerBase, form: InputForm, template: str, prompt: str, response: str) -> list[int]:
    """Return the token ids of a prompt and a response in the given form."""
    if form == "chat":
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        return encode_chat(tokenizer, turns, to_be_continued=False)
    return list(tokenizer(fill(template, prompt, response))["input_ids"])


def encode_chat(tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, str]], *, to_be_continued: bool) -> list[int]:
    """Return the token ids of a chat in the tokenizer's chat template.

    Args:
        to_be_continued: whether the text ends with the header of the assistant's next turn.
    """
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=to_be_continued)
    assert isinstance(text, str)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])  # the template has written the special tokens


def check_length(num_tokens: int, limit: int, what: str) -> Failure | None:
    """Return a Failure if an input has no tokens or more than `limit`, else None. `what`: its name in the message."""
    # it is not cut: a text that is cut would get the score of another text
    if num_tokens == 0:
        return Failure("bad_data", f"{what} has no tokens")
    if num_tokens > limit:
        return Failure("too_long", f"{what} has {num_tokens} tokens, and at most {limit} are taken")
    return None


def pad(rows: Sequence[Sequence[int]], value: int, *, side: str) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Return the rows as one tensor padded with `value`, and a mask that is 1 at tokens and 0 at padding."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), value)  # [B, T]
    mask = torch.zeros(len(rows), longest, dtype=torch.int64)
    for n, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(longest - len(row), longest)
        ids[n, place] = torch.tensor(row)
        mask[n, place] = 1
    return ids, mask


def unused_id(rows: Sequence[Sequence[int]], wanted: int | None) -> int:
    """Return a padding id that occurs in no row: `wanted` if possible, else the lowest such id.

    Models for sequence classification read their score at the last token that is not the padding id. A text that itself
    ends in that id (often the same as end-of-sequence) would be read one token too early.
    """
    used = set().union(*rows)
    if wanted is not None and wanted not in used:
        return wanted
    return next(number for number in range(len(used) + 1) if number not in used)
