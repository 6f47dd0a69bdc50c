"""A language model as a classifier: how likely its verdict begins like `unsafe` rather than like `safe`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from tba_reward.models.child import inputs
from tba_reward.models.child.classifier import Row
from tba_reward.models.child.judge import Refusal
from tba_reward.models.child.loading import LoadError, digest_folder, find_folder, load, longest_input
from tba_reward.models.messages import GuardSettings


class Guard:
    """A guard model that is loaded.

    Raises:
        LoadError: the files are not such a model, it has no chat template, or the verdicts are not two.
    """

    def __init__(self, settings: GuardSettings) -> None:
        folder = find_folder(settings.files)
        self.digest = digest_folder(folder)
        self._settings = settings
        self._model, self._tokenizer = load(settings.files, folder, AutoModelForCausalLM)
        self._max_tokens = longest_input(self._model, self._tokenizer, settings.max_tokens)
        if settings.form == "chat" and self._tokenizer.chat_template is None:
            raise LoadError(f"the tokenizer of {settings.files.path} has no chat template; use another form of input")
        self._common, self._safe, self._unsafe = self._verdicts()

    def encode(self, prompt: str, response: str, *, finished: bool = True) -> Row | Refusal:
        """The tokens up to where the verdicts part."""
        row = inputs.encode(self._tokenizer, self._settings.form, self._settings.template, prompt, response)
        ids = row["input_ids"] + self._common
        return inputs.check_length(len(ids), self._max_tokens, "the input") or {"input_ids": ids}

    @torch.inference_mode()
    def values(self, rows: Sequence[Row]) -> list[float]:
        """The probability of `unsafe` among the two verdicts, per row; computed as one batch."""
        ids, mask = inputs.pad([row["input_ids"] for row in rows], 0, side="left")  # [B, T]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        device = self._model.device
        logits = self._model(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            position_ids=positions.to(device),
            use_cache=False,
            logits_to_keep=1,
        ).logits  # [B, 1, V]
        return (logits[:, -1, self._unsafe] - logits[:, -1, self._safe]).float().sigmoid().tolist()

    def _verdicts(self) -> tuple[list[int], int, int]:
        safe, unsafe = (
            self._tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (self._settings.safe, self._settings.unsafe)
        )
        for n, (one, other) in enumerate(zip(safe, unsafe, strict=False)):
            if one != other:
                return list(safe[:n]), one, other
        raise LoadError(
            f"the verdicts {self._settings.safe!r} and {self._settings.unsafe!r} do not differ in a token of "
            f"{self._settings.files.path}"
        )
