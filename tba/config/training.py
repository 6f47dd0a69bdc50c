"""The trainer's sections: objective, optimizer, step, publishing, checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tba.config.base import StrictModel
from tba.config.schedules import Schedule


class ObjectiveSection(StrictModel):
    """Which member of the family is trained (docs/algorithm.md)."""

    preset: Literal["tb", "tba_prime", "tba_prime_unweighted"] = "tb"
    """Named choice of anchor, centre and importance weight."""
    beta: Schedule = Schedule(value=0.05)
    """KL coefficient."""
    importance_clamp: float = Field(default=8.0, gt=0)
    """Upper clamp of the token importance weight, where the preset has one."""
    reference_reset_steps: int = Field(default=50, ge=1)
    """rho: where the preset resets its reference, after every so many steps."""
    centre_max_age_steps: int = Field(default=32, ge=0)
    """Behaviour centring applies to rollouts up to this policy age; beyond it the centre is theta."""


class TrainerSection(StrictModel):
    """The training loop."""

    num_steps: int = Field(default=200, ge=1)
    """Optimizer steps of the run."""
    max_train_s: float | None = Field(default=None, gt=0)
    """Stop after this many seconds of training, even before `num_steps`."""
    learning_rate: Schedule = Schedule(value=1e-4)
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
    """Most padded tokens (rows times longest row) of one forward and backward pass."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    device: str = "cpu"
    """torch device."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast; master weights and optimizer stay float32."""
    torch_num_threads: int = Field(default=1, ge=1)
    """Threads on CPU."""
    sync_interval: int = Field(default=4, ge=1)
    """k: publish a version and mark the buffer every k optimizer steps."""
    checkpoint_interval: int = Field(default=50, ge=1)
    """Write a checkpoint every so many steps (and at the end)."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Older checkpoints are deleted."""
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
