"""Reward models: one score of a text from pairs, or the probabilities of labels.

    pairs   loss = -log sigmoid(s(x, chosen) - s(x, rejected)) + c (s(x, chosen) + s(x, rejected))^2
    labels  loss = -log softmax(z(x, y))[label]

The first is that of Bradley and Terry (arXiv 2009.01325, Eq. 1); its second term is that of arXiv 2312.09244, Eq. 2,
which TRL's RewardTrainer has too: differences alone leave the mean score free. A text is the prompt and the response
one after another, as in the scorers with `form = "text"` (services/reward/tba_reward/model_server/child/).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from tba.config.supervised import RewardTrainingSection
from tba.errors import ConfigError
from tba_trainer.supervised.examples import Examples, Row, end_of_sequence, keep_fitting, token_ids


@dataclass(frozen=True, slots=True)
class Texts:
    """The tokens of one example: of the chosen and of the rejected text, or of the one that has a label."""

    texts: tuple[list[int], ...]
    label: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(map(len, self.texts))

    @property
    def largest_id(self) -> int:
        """The largest token id."""
        return max(map(max, self.texts))


def columns_of(section: RewardTrainingSection) -> tuple[str, ...]:
    """Return the columns of the examples."""
    return ("prompt", "chosen", "rejected") if section.is_pairs else ("prompt", "response", "label")


def encode_texts(rows: Sequence[Row], tokenizer: Any, section: RewardTrainingSection, *, path: Path) -> Examples[Texts]:
    """Return the tokens of every text as a scorer makes them.

    Args:
        path: of the rows, for errors.

    Raises:
        ConfigError: a label is not in the section's `labels`, the tokenizer has no end of sequence that
            `append_eos` could append, or nothing is left.
    """
    end = [end_of_sequence(tokenizer, path)] if section.append_eos else []

    def encoded(column: str) -> list[list[int]]:
        found = token_ids(tokenizer, [row["prompt"] + row[column] for row in rows])
        return [ids if ids[-1:] == end else [*ids, *end] for ids in found]

    texts = zip(*map(encoded, ("chosen", "rejected") if section.is_pairs else ("response",)), strict=True)
    labels = [0] * len(rows) if section.is_pairs else _labels(rows, section.labels or [], path)
    examples = (Texts(each, label) for each, label in zip(texts, labels, strict=True))
    return keep_fitting(
        examples, lambda example: [len(ids) for ids in example.texts], max_tokens=section.max_length_tokens, path=path
    )


def _labels(rows: Sequence[Row], names: Sequence[str], path: Path) -> list[int]:
    numbers = {name: number for number, name in enumerate(names)}
    for line, row in enumerate(rows, start=1):
        if row["label"] not in numbers:
            raise ConfigError(
                f"examples {path}, line {line}: label {row['label']!r} is none of labels ({', '.join(names)}); add it "
                "there, or leave the row out"
            )
    return [numbers[row["label"]] for row in rows]


def num_of_label(examples: Sequence[Texts], labels: Sequence[str]) -> dict[str, int]:
    """Return how many examples have each label; nothing where there are no labels."""
    return {name: sum(example.label == number for example in examples) for number, name in enumerate(labels)}


class RewardTask:
    """Pairs or labelled texts to learn, and held-out ones.

    Args:
        model: a sequence classification model, in the mode of training.
        examples, heldout: may not be empty, may be empty.
    """

    def __init__(
        self, model: Any, examples: Sequence[Texts], heldout: Sequence[Texts], section: RewardTrainingSection
    ) -> None:
        self._model, self._examples, self._heldout, self._section = model, examples, heldout, section

    def num_tokens(self, rows: Sequence[int]) -> int:
        """Return the tokens of examples."""
        return sum(len(ids) for i in rows for ids in self._examples[i].texts)

    def divisor(self, rows: Sequence[int]) -> int:
        """Return the number of examples."""
        return len(rows)

    def micro_batches(self, rows: Sequence[int]) -> list[list[int]]:
        """Return the rows of each pass, of similar length, whose padded texts have at most `micro_batch_tokens`."""
        return self._cut(self._examples, rows)

    def loss_sum(self, rows: Sequence[int]) -> Float[Tensor, ""]:
        """Return the loss of some examples, summed."""
        examples = [self._examples[i] for i in rows]
        return self._losses(self._logits(examples), examples).sum()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the loss, the accuracy, and of pairs the mean scores, of two labels the area under the ROC curve."""
        if not self._heldout:
            return {}
        losses, logits, labels = [], [], []
        for rows in self._cut(self._heldout, range(len(self._heldout))):
            examples = [self._heldout[i] for i in rows]
            found = self._logits(examples)  # [b, texts, labels]
            losses.append(self._losses(found, examples).double().cpu())
            logits.append(found.double().cpu().numpy())
            labels += [example.label for example in examples]
        scores, loss = np.concatenate(logits), float(torch.cat(losses).mean())  # [N, texts, labels]
        if self._section.is_pairs:
            chosen, rejected = scores[:, 0, 0], scores[:, 1, 0]
            return {
                "heldout_loss": loss,
                "heldout_accuracy": float((chosen > rejected).mean()),
                "heldout_chosen_mean": float(chosen.mean()),
                "heldout_rejected_mean": float(rejected.mean()),
            }
        right = scores[:, 0].argmax(axis=1) == np.array(labels)
        metrics = {"heldout_loss": loss, "heldout_accuracy": float(right.mean())}
        if scores.shape[2] == 2 and len(set(labels)) == 2:
            metrics["heldout_auc"] = auc(scores[:, 0, 1] - scores[:, 0, 0], np.array(labels) == 1)
        return metrics

    def _losses(self, logits: Float[Tensor, "B texts L"], examples: Sequence[Texts]) -> Float[Tensor, " B"]:
        if self._section.is_pairs:
            return pair_losses(logits[:, 0, 0], logits[:, 1, 0], centre=self._section.centre_coefficient)
        labels = torch.tensor([example.label for example in examples], device=logits.device)
        return functional.cross_entropy(logits[:, 0], labels, reduction="none")

    def _logits(self, examples: Sequence[Texts]) -> Float[Tensor, "B texts L"]:
        texts = [ids for example in examples for ids in example.texts]
        with self._autocast():
            return logits_of(self._model, texts).float().unflatten(0, (len(examples), -1))

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._section.compute_dtype == "float32":
            return nullcontext()
        return torch.autocast(self._model.device.type, dtype=torch.bfloat16)

    def _cut(self, examples: Sequence[Texts], rows: Sequence[int]) -> list[list[int]]:
        batches: list[list[int]] = []
        for i in sorted(rows, key=lambda i: -examples[i].longest):
            # the first of a batch is the longest
            if batches:
                width = len(examples[i].texts) * examples[batches[-1][0]].longest
            if not batches or (len(batches[-1]) + 1) * width > self._section.micro_batch_tokens:
                batches.append([])
            batches[-1].append(i)
        return batches


def pair_losses(chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], *, centre: float) -> Float[Tensor, " B"]:
    """Return the loss of each pair from its two scores.

    Args:
        centre: c, the weight of the second term.
    """
    return -functional.logsigmoid(chosen - rejected) + centre * (chosen + rejected).square()


def logits_of(model: Any, texts: Sequence[Sequence[int]]) -> Float[Tensor, "B L"]:
    """Return the outputs of a sequence classification model for texts, computed as one batch.

    A model that reads its score at the last token reads it at the last token of the text, whatever token that is.
    """
    longest = max(map(len, texts))
    # Such a model takes the last token that is not the padding token of its config: where a text ends in that (it is
    # often end-of-sequence, too), the score would be read one token too early. So padding is a token that no text has.
    used = set().union(*texts)
    config = model.config.get_text_config()
    own = config.pad_token_id
    pad = own if own is not None and own not in used else next(i for i in range(len(used) + 1) if i not in used)
    ids = torch.tensor([[*text, *[pad] * (longest - len(text))] for text in texts], device=model.device)
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts], device=model.device)
    config.pad_token_id = pad
    try:
        return model(input_ids=ids, attention_mask=mask).logits
    finally:
        config.pad_token_id = own


def auc(scores: NDArray[np.float64], is_positive: NDArray[np.bool_]) -> float:
    """Return the area under the ROC curve: how often a positive has a higher score than a negative; ties are half."""
    ordered = np.sort(scores[~is_positive])
    positives = scores[is_positive]
    below = np.searchsorted(ordered, positives, side="left") + np.searchsorted(ordered, positives, side="right")
    return float(below.mean() / (2 * len(ordered)))
