"""The trainer's section: optimizer, step, publishing, checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tba.config.base import StrictModel
from tba.config.bounded import LearningRate
from tba.config.guards import GuardsSection
from tba.config.schedules import Schedule


class TrainerSection(StrictModel):
    """The training loop."""

    num_steps: int = Field(default=200, ge=1)
    """Optimizer steps of the run."""
    max_train_s: float | None = Field(default=None, gt=0)
    """Stop after this many seconds of training, even before `num_steps`."""
    learning_rate: LearningRate = Schedule(value=1e-4)
    """AdamW learning rate."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW first-moment decay."""
    adam_beta2: float = Field(default=0.99, ge=0, lt=1)
    """AdamW second-moment decay."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient clipping by global norm."""
    micro_batch_tokens: int = Field(default=16_384, ge=1)
    """Most tokens of one forward and backward pass (a longer rollout goes alone). Micro-batches have about the same
    number of tokens, without padding for the model families in docs/trainer.md."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    compile: bool = False
    """torch.compile the decoder layers; the first pass takes a minute longer. For one process only."""
    device: str = "cpu"
    """torch device. With several processes `cuda`, without a number: each takes a GPU of its own."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast; master weights and optimizer stay float32."""
    torch_num_threads: int = Field(default=1, ge=1)
    """Threads on CPU."""
    num_processes: int = Field(default=1, ge=1)
    """Processes that `tba run` starts the trainer in, one per GPU; the model is sharded over them. On several machines
    torchrun starts them, and this number is not read."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """With several processes: how long one waits for the others in an exchange before all give up."""
    sync_interval: int = Field(default=4, ge=1)
    """k: publish a version and mark the buffer every k optimizer steps."""
    checkpoint_interval: int = Field(default=50, ge=1)
    """Write a checkpoint every so many steps (and at the end)."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Older checkpoints are deleted, except the newest one that a good step followed: a rollback goes back to it."""
    keep_versions: int = Field(default=8, ge=2)
    """Older weight versions are deleted, except those that a component or an evaluation still holds."""
    max_unpublished_versions: int = Field(default=4, ge=1)
    """Training goes on while publishing fails, until this many versions wait."""
    prefetch_batches: int = Field(default=1, ge=0)
    """Batches fetched ahead while a step runs."""
    batch_wait_s: float = Field(default=600.0, gt=0)
    """Deadline of the wait for a batch."""
    retry_s: float = Field(default=120.0, gt=0)
    """How long a call to another service is retried before the trainer gives up."""
    canary_tolerance: float = Field(default=2e-3, gt=0)
    """How far a searcher's canary log-probs may be from the published ones."""
    shuffle_rewards: bool = False
    """Control experiment: rewards are shuffled among the rollouts of a batch, so nothing can be learned."""
    export: bool = True
    """At the end, write a Hugging Face folder to the store and, in local mode, to the run folder."""
    export_version: Literal["last", "best"] = "last"
    """Which version that is: the last one, or the best by `eval.best_metric`."""
    guards: GuardsSection = GuardsSection()
    """Alarms, and what they do."""
