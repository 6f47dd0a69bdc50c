"""Supervised training before a run: `[[sft]]` makes language models, `[[reward_training]]` makes reward models.

Each item is one folder in Hugging Face format. `tba sft` and `tba train-reward` make it; `tba data prepare` does so
where it is missing, and `tba run` does with `at_start`. Items are made in the order of the recipe, `[[sft]]` first, so
that one can start from another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any, Literal

from pydantic import Field, model_validator

from tba.config.reward import RedteamSpec, RewardModelSpec, ScorerSpec
from tba.config.schedules import LearningRate, Schedule
from tba.fields import MAX_STEP, StrictModel

REPORT_FILE = "supervised.json"
"""In the folder that was made: settings, digest of the examples, and what was measured."""
HOW_IT_RUNS = (
    "path",
    "at_start",
    "checkpoint_interval",
    "device",
    "eval_every_steps",
    "num_processes",
    "num_threads",
    "micro_batch_tokens",
)
"""Settings that do not change what is learned, but for rounding."""


class NewModel(StrictModel):
    """A model made from nothing: random weights, and a byte-pair tokenizer trained on the texts of the examples."""

    family: Literal["llama", "qwen2", "gpt_neox", "gpt2"] = "llama"
    """Architecture, as transformers names it."""
    hidden_size: int = Field(ge=8)
    """Width."""
    num_layers: int = Field(ge=1)
    """Decoder layers."""
    num_heads: int = Field(ge=1)
    """Attention heads; they divide the width."""
    intermediate_size: int | None = Field(default=None, ge=8)
    """Width inside a feed-forward layer; none: four times `hidden_size`."""
    max_length_tokens: int = Field(default=256, ge=8)
    """Context."""
    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of the first weights; very small models learn sooner with 0.05 to 0.1."""
    vocab_size: int = Field(default=512, ge=32)
    """Most entries of the tokenizer. Every digit is a token of its own."""
    special_tokens: list[str] = Field(default_factory=list)
    """Further texts that are one token each, such as "<|im_start|>"."""

    @model_validator(mode="after")
    def _check(self) -> NewModel:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"num_heads = {self.num_heads} does not divide hidden_size = {self.hidden_size}")
        head_size = self.hidden_size // self.num_heads
        if head_size % 2 and self.family in ("llama", "qwen2"):
            raise ValueError(
                f"a head has hidden_size / num_heads = {head_size} values, and the rotary positions of {self.family} "
                "turn pairs of them; make it even"
            )
        return self


class SupervisedSection(StrictModel):
    """What the two kinds of supervised training have in common."""

    base: str | None = None
    """Folder of the model that training starts from: of `[[prepare]]`, or an earlier item's `path`."""
    new_model: NewModel | None = None
    """Instead of `base`: a model made from nothing."""
    dataset: str = Field(min_length=1)
    """Examples: a data set on the Hugging Face hub, a folder (`[[prepare]]` makes one), or a JSONL or Parquet file."""
    subset: str | None = None
    """Configuration of the data set, where it has several."""
    revision: str | None = None
    """Commit or tag on the hub; none: the newest."""
    split: str = "train"
    """Split to train on, for example `train[:5000]`. A file has none."""
    heldout_split: str | None = None
    """Split that is evaluated on; none: nothing is."""
    prompt: str = Field(min_length=1)
    """Text of the prompt with columns in it, such as "Q: {question}\\n"; {{ and }} stand for braces."""
    num_steps: int = Field(ge=1, le=MAX_STEP)
    """Optimizer steps."""
    batch_size: int = Field(default=32, ge=1)
    """Examples of a step. Every example is seen once per epoch, shuffled again in each."""
    learning_rate: LearningRate = Schedule(value=1e-4)
    """AdamW learning rate."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW first-moment decay."""
    adam_beta2: float = Field(default=0.99, ge=0, lt=1)
    """AdamW second-moment decay."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW decoupled weight decay, of all weights but norms and biases."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient clipping by global norm."""
    max_length_tokens: int = Field(default=1024, ge=2)
    """Longer examples (prompt, response and end of sequence) are left out and counted."""
    micro_batch_tokens: int = Field(default=16_384, ge=1)
    """Most tokens of one forward and backward pass; a longer example goes alone."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    eval_every_steps: int = Field(default=100, ge=1, le=MAX_STEP)
    """Optimizer steps between evaluations on `heldout_split`; one more is made at the end."""
    checkpoint_interval: int = Field(default=200, ge=1, le=MAX_STEP)
    """Optimizer steps between checkpoints beside the folder: training that was ended goes on from the last one."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of a new model, of an adapter and of the order of the examples."""
    device: str = "cpu"
    """torch device."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast; weights and optimizer stay float32 until they are saved."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the saved weights."""
    num_threads: int = Field(default=1, ge=1)
    """Threads on a CPU."""
    at_start: bool = False
    """`tba run` makes it where it is missing, instead of asking for `tba data prepare`."""

    @model_validator(mode="after")
    def _check_start(self) -> SupervisedSection:
        if (self.base is None) == (self.new_model is None):
            raise ValueError("give exactly one of `base` (a folder) and `new_model` (a model made from nothing)")
        if self.new_model is not None and self.max_length_tokens > self.new_model.max_length_tokens:
            raise ValueError(
                f"max_length_tokens is {self.max_length_tokens}, and the new model takes at most "
                f"{self.new_model.max_length_tokens} (new_model.max_length_tokens); lower the first or raise the second"
            )
        return self

    def deciding(self) -> dict[str, Any]:
        """Return the settings that decide what is learned, as JSON values: a folder made with others is another one.

        Of base and data set it is the name: the same folder may lie elsewhere on another machine.
        """
        settings = self.model_dump(mode="json", exclude=set(HOW_IT_RUNS))
        return settings | {key: PurePath(settings[key]).name for key in ("base", "dataset") if settings[key]}


class SftSection(SupervisedSection):
    """Supervised fine-tuning: a language model learns to answer prompts. Of an example, only the response and the end
    of sequence after it are learned."""

    path: str | None = Field(default=None, min_length=1)
    """Folder that is made; none: model.path."""
    response: str = Field(min_length=1)
    """Text of the response with columns in it, such as "{answer}"."""
    num_processes: int = Field(default=1, ge=1)
    """Processes that share a step; the model is sharded over them."""


class RewardTrainingSection(SupervisedSection):
    """Train a model that gives a text one score (pairs), or the probability of a label (labels).

    Pairs: the loss is -log sigmoid(score(chosen) - score(rejected)) (Bradley-Terry; arXiv 2009.01325), as TRL's
    RewardTrainer has it. Labels: cross-entropy.
    """

    path: str = Field(min_length=1)
    """Folder that is made: a sequence classification model."""
    chosen: str | None = None
    """Pairs: the better response, with columns in it."""
    rejected: str | None = None
    """Pairs: the worse response."""
    response: str | None = None
    """Labels: the response that is labelled, with columns in it."""
    label: str | None = None
    """Labels: the column that holds the label, one of `labels`."""
    labels: list[str] | None = Field(default=None, min_length=2)
    """Labels: all of them; the order is that of the model's outputs."""
    append_eos: bool = True
    """End every text with the end of sequence, as a scorer with `append_eos` does."""
    centre_coefficient: float = Field(default=0.01, ge=0)
    """Pairs: the loss has this times (score(chosen) + score(rejected))^2 added, since differences alone leave the mean
    score free (arXiv 2312.09244, as TRL's RewardTrainer); 0: nothing."""

    @model_validator(mode="after")
    def _check_form(self) -> RewardTrainingSection:
        pairs, labels = (self.chosen, self.rejected), (self.response, self.label, self.labels)
        is_pairs = all(value is not None for value in pairs) and all(value is None for value in labels)
        is_labels = all(value is not None for value in labels) and all(value is None for value in pairs)
        if not (is_pairs or is_labels):
            raise ValueError(
                "give `chosen` and `rejected` (pairs), or `response`, `label` and `labels` (labels), and nothing of "
                "the other form"
            )
        twice = [name for name in self.labels or [] if (self.labels or []).count(name) > 1]
        if twice:
            raise ValueError(f"labels names {twice[0]!r} twice; each label is one output of the model")
        return self

    @property
    def is_pairs(self) -> bool:
        """Whether examples are pairs."""
        return self.chosen is not None


SupervisedItem = SftSection | RewardTrainingSection
"""An item of either kind."""


def check_scorers(items: Iterable[RewardTrainingSection], scorers: Iterable[ScorerSpec]) -> None:
    """Check that scorers end texts as the models that they read have learned them.

    Raises:
        ValueError: one would read its score at another token than the one that was trained.
    """
    learned = {item.path: item.append_eos for item in items}
    for spec in scorers:
        if isinstance(spec, RewardModelSpec):
            path, appended = spec.model, spec.append_eos
            reader = f"a reward_model scorer with {str(appended).lower()}"
        elif isinstance(spec, RedteamSpec):
            path, appended, reader = spec.classifier, False, "a redteam scorer, which never appends it"
        else:
            continue
        if learned.get(path, appended) != appended:
            raise ValueError(
                f"{path} is trained with append_eos = {str(not appended).lower()}, and read by {reader}: the "
                "score would be read at a token that was not trained; give both the same"
            )


def origin_digest(folder: str | Path | None) -> str | None:
    """Return a digest of what a model was trained with: settings, examples, and the same of its base.

    Returns:
        None where no supervised training of ours made the folder, or it is not here.
    """
    try:
        report = json.loads((Path(folder or "").expanduser() / REPORT_FILE).read_bytes())
        origin = {key: report.get(key) for key in ("settings", "examples_sha256", "base_origin")}
    except (OSError, ValueError, AttributeError):
        return None
    return hashlib.sha256(json.dumps(origin, sort_keys=True).encode()).hexdigest()
