"""From (prompt, response) to token ids, and from rows of ids to one padded batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tba_reward.models.child.judge import Refusal
from tba_reward.models.messages import InputForm


def fill(template: str, prompt: str, response: str = "") -> str:
    """The template with its fields filled in; braces in the texts stay as they are."""
    before, field, after = template.partition("{response}")
    return before.replace("{prompt}", prompt) + (response if field else "") + after.replace("{prompt}", prompt)


def encode(
    tokenizer: PreTrainedTokenizerBase, form: InputForm, template: str, prompt: str, response: str
) -> dict[str, list[int]]:
    """`input_ids`, and `token_type_ids` where the model wants them."""
    if form == "chat":
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        return {"input_ids": encode_chat(tokenizer, turns, to_be_continued=False)}
    if form == "pair":
        encoded = tokenizer(prompt, response)
    else:
        encoded = tokenizer(fill(template, prompt, response))
    return {name: list(encoded[name]) for name in ("input_ids", "token_type_ids") if name in encoded}


def encode_chat(tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, str]], *, to_be_continued: bool) -> list[int]:
    """The tokens of a chat in the tokenizer's template. `to_be_continued`: up to where the assistant speaks next."""
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=to_be_continued)
    assert isinstance(text, str)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])  # the template has written them


def check_length(num_tokens: int, limit: int, what: str) -> Refusal | None:
    """Refuses what a model cannot read: a text that is cut would get the score of another text."""
    if num_tokens == 0:
        return Refusal("bad_data", f"{what} has no tokens")
    if num_tokens > limit:
        return Refusal("too_long", f"{what} has {num_tokens} tokens, the model takes {limit}")
    return None


def pad(rows: Sequence[Sequence[int]], value: int, *, side: str) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """The rows as one tensor, and the mask of what is no padding."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), value)  # [B, T]
    mask = torch.zeros(len(rows), longest, dtype=torch.int64)
    for n, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(longest - len(row), longest)
        ids[n, place] = torch.tensor(row)
        mask[n, place] = 1
    return ids, mask


def unused_id(rows: Sequence[Sequence[int]], wanted: int | None) -> int:
    """`wanted`, or the lowest id in no row if there is none or a row has it.

    Models for sequence classification read their score at the last token that is not this id: a text that itself ends
    in the model's padding token (often the same as end-of-sequence) would be read one token too early.
    """
    used = set().union(*rows)
    if wanted is not None and wanted not in used:
        return wanted
    return next(number for number in range(len(used) + 1) if number not in used)
