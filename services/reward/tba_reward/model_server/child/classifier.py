"""Classifiers: one scores by a label of a sequence classification model, one by the verdict of a guard model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tba.config.reward import RedteamSpec, RewardModelSpec
from tba_reward.model_server.child import model_loader
from tba_reward.model_server.child.model_loader import LoadError, digest_folder, find_folder, load, longest_input
from tba_reward.scorer import Failure

SAFE_VERDICT, UNSAFE_VERDICT = "\n\nsafe", "\n\nunsafe"
"""How every release of Llama Guard begins its answer."""


class Classifier:
    """A loaded sequence classification model; the output of one label is the score.

    Raises:
        LoadError: the files are not such a model, or it lacks the label, end-of-sequence token or chat template needed.
    """

    def __init__(self, spec: RewardModelSpec | RedteamSpec) -> None:
        self._form: model_loader.InputForm
        if isinstance(spec, RewardModelSpec):
            self._path, self._form, self._template = spec.model, "text", spec.template
            self._append_eos, self._gives_logit = spec.append_eos, True
        else:
            self._path, self._form = spec.classifier, spec.classifier_input or "text"
            self._template, self._append_eos, self._gives_logit = spec.classifier_template, False, False
        folder = find_folder(self._path)
        self.digest = digest_folder(folder)
        self._model, self._tokenizer = load(self._path, folder, spec, AutoModelForSequenceClassification)
        # keys and values of a whole batch would take gigabytes, and a text is read once
        self._model.config.get_text_config().use_cache = False
        names = [str(name) for name in (self._model.config.id2label or {}).values()]
        numbers = [number for number, name in enumerate(names) if spec.label in (None, number, name)]
        if len(numbers) != 1:
            what = "say which label counts" if spec.label is None else f"there is no label {spec.label!r}"
            raise LoadError(f"{self._path}: {what}; it has {', '.join(names)}")
        (self._label,) = numbers
        self._max_tokens = longest_input(self._model, self._tokenizer)
        self._pad_id = self._model.config.get_text_config().pad_token_id
        if self._append_eos and self._tokenizer.eos_token_id is None:
            raise LoadError(f"append_eos: the tokenizer of {self._path} has no end-of-sequence token")
        if self._form == "chat" and self._tokenizer.chat_template is None:
            raise LoadError(f"the tokenizer of {self._path} has no chat template; use another form of input")

    def encode(self, prompt: str, response: str, *, finished: bool = True) -> list[int] | Failure:
        """Return one input's token ids; a Failure if empty or too long. Only a `finished` response may get an EOS."""
        ids = model_loader.encode(self._tokenizer, self._form, self._template, prompt, response)
        eos: Any = self._tokenizer.eos_token_id
        if self._append_eos and finished and ids[-1:] != [eos]:
            ids = [*ids, eos]
        return model_loader.check_length(len(ids), self._max_tokens, "the input") or ids

    @torch.inference_mode()
    def values(self, rows: Sequence[list[int]]) -> list[float]:
        """Score a batch of token ids. Return one score per row: a reward model's logit, or a classifier's probability.

        A row may end with the model's padding token: the batch is padded with an id that is in no row.
        """
        # a row that ends in the model's own padding token would be read one token too early (see `unused_id`)
        pad_id = model_loader.unused_id(rows, self._pad_id)
        ids, mask = model_loader.pad(rows, pad_id, side="right")  # [B, T]
        config, device = self._model.config.get_text_config(), self._model.device
        config.pad_token_id = pad_id
        try:
            logits = self._model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        finally:
            config.pad_token_id = self._pad_id
        logits = logits.float()  # [B, labels]
        if not self._gives_logit:
            logits = logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(-1)
        return logits[:, self._label].tolist()


class GuardClassifier:
    """A loaded guard: a language model whose answer begins with its verdict, `safe` or `unsafe`.

    The score is the probability of `unsafe` among the two, read at the first token in which they differ.

    Raises:
        LoadError: the files are not such a model, it lacks the chat template needed, or the verdicts have equal tokens.
    """

    def __init__(self, spec: RedteamSpec) -> None:
        folder = find_folder(spec.classifier)
        self.digest = digest_folder(folder)
        self._template = spec.classifier_template
        self._form: model_loader.InputForm = "text" if spec.classifier_input == "text" else "chat"
        self._model, self._tokenizer = load(spec.classifier, folder, spec, AutoModelForCausalLM)
        self._max_tokens = longest_input(self._model, self._tokenizer)
        if self._form == "chat" and self._tokenizer.chat_template is None:
            raise LoadError(f"the tokenizer of {spec.classifier} has no chat template; use another form of input")
        safe, unsafe = (
            list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
            for text in (SAFE_VERDICT, UNSAFE_VERDICT)
        )
        differ = [n for n, (one, other) in enumerate(zip(safe, unsafe, strict=False)) if one != other]
        if not differ:
            raise LoadError(f"{SAFE_VERDICT!r} and {UNSAFE_VERDICT!r} do not differ in a token of {spec.classifier}")
        self._common, self._safe, self._unsafe = safe[: differ[0]], safe[differ[0]], unsafe[differ[0]]

    def encode(self, prompt: str, response: str) -> list[int] | Failure:
        """Return the token ids of one input, then the tokens with which both verdicts begin; a Failure if too long."""
        ids = model_loader.encode(self._tokenizer, self._form, self._template, prompt, response) + self._common
        return model_loader.check_length(len(ids), self._max_tokens, "the input") or ids

    @torch.inference_mode()
    def values(self, rows: Sequence[list[int]]) -> list[float]:
        """Return for each row the probability of `unsafe` among the two verdicts, computed as one batch."""
        ids, mask = model_loader.pad(rows, 0, side="left")  # [B, T]
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
