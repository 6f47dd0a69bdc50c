"""Sequence classification: the logit or the probability of one label."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AutoModelForSequenceClassification

from tba_reward.models.child import inputs
from tba_reward.models.child.judge import Refusal
from tba_reward.models.child.loading import LoadError, digest_folder, find_folder, load, longest_input
from tba_reward.models.messages import ClassifierSettings

Row = dict[str, list[int]]


class Classifier:
    """A classifier that is loaded.

    Raises:
        LoadError: the files are not such a model, or the label is none of its outputs.
    """

    def __init__(self, settings: ClassifierSettings) -> None:
        folder = find_folder(settings.files)
        self.digest = digest_folder(folder)
        self._settings = settings
        self._model, self._tokenizer = load(settings.files, folder, AutoModelForSequenceClassification)
        self._label = self._find_label(settings.label)
        self._max_tokens = longest_input(self._model, self._tokenizer, settings.max_tokens)
        self._pad_id = self._model.config.get_text_config().pad_token_id
        if settings.append_eos and self._tokenizer.eos_token_id is None:
            raise LoadError(f"append_eos: the tokenizer of {settings.files.path} has no end-of-sequence token")
        if settings.form == "chat" and self._tokenizer.chat_template is None:
            raise LoadError(f"the tokenizer of {settings.files.path} has no chat template; use another form of input")

    def encode(self, prompt: str, response: str, *, finished: bool = True) -> Row | Refusal:
        """The tokens of one input."""
        settings = self._settings
        row = inputs.encode(self._tokenizer, settings.form, settings.template, prompt, response)
        eos = self._tokenizer.eos_token_id
        if settings.append_eos and finished and row["input_ids"][-1:] != [eos]:
            row = {name: [*ids, eos if name == "input_ids" else ids[-1]] for name, ids in row.items()}
        return inputs.check_length(len(row["input_ids"]), self._max_tokens, "the input") or row

    @torch.inference_mode()
    def values(self, rows: Sequence[Row]) -> list[float]:
        """One number per row, computed as one batch.

        Models that read the score at the last token read it at the last token of the row, whatever that is.
        """
        ids = [row["input_ids"] for row in rows]
        pad_id = inputs.unused_id(ids, self._pad_id)
        input_ids, mask = inputs.pad(ids, pad_id, side="right")  # [B, T]
        batch = {"input_ids": input_ids, "attention_mask": mask}
        if "token_type_ids" in rows[0]:
            batch["token_type_ids"] = inputs.pad([row["token_type_ids"] for row in rows], 0, side="right")[0]
        config = self._model.config.get_text_config()
        config.pad_token_id = pad_id
        try:
            logits = self._model(**{name: tensor.to(self._model.device) for name, tensor in batch.items()}).logits
        finally:
            config.pad_token_id = self._pad_id
        logits = logits.float()  # [B, labels]
        if self._settings.output == "probability":
            logits = logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(-1)
        return logits[:, self._label].tolist()

    def _find_label(self, label: int | str | None) -> int:
        """The number of the output that counts."""
        names = [str(name) for name in (self._model.config.id2label or {}).values()]
        numbers = [number for number, name in enumerate(names) if label in (None, number, name)]
        if len(numbers) == 1:
            return numbers[0]
        what = "say which label counts" if label is None else f"there is no label {label!r}"
        raise LoadError(f"{self._settings.files.path}: {what}; it has {', '.join(names)}")
