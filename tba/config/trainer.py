"""The trainer: optimizer, steps, publication, checkpoints, guards (docs/trainer.md), LoRA and trackers."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from tba.config.schedules import LearningRate, Schedule
from tba.fields import StrictModel

Action = Literal["none", "skip", "pause", "rollback", "fail"]
"""The actions of an alarm, mildest first.

    none      it is logged, counted and shown
    skip      the batch is not applied; the step is in the ledger as skipped
    pause     the batch is skipped and the run paused, until `tba resume`
    rollback  the batch is skipped, and training continues from the last checkpoint in a new lineage
    fail      the batch is skipped and the run failed; a start of the trainer continues from the last checkpoint
"""


REMEDIES = {
    "non_finite": "look at the rewards of the last rollouts (`tba rollouts list`); with bfloat16 try "
    'trainer.compute_dtype = "float32"; if it comes again, lower the learning rate (`tba set learning_rate=...`)',
    "grad_spike": "lower the learning rate (`tba set learning_rate=...`) or trainer.max_grad_norm, or let "
    'trainer.guards.grad_spike.action = "skip" leave such batches out',
    "ess_collapse": "the data is too old for the policy: raise most_on_policy_prob (`tba set`), lower "
    "buffer.max_policy_age_steps or trainer.sync_interval, or add searchers (`tba scale`)",
    "log_ratio_drift": "the policy moves faster than its data: lower the learning rate, raise beta or "
    "most_on_policy_prob (`tba set`), or lower trainer.sync_interval",
    "on_policy_gap": "the engine of the searchers computes another model than the trainer: it decodes otherwise (a "
    "sliding window, another attention), holds other or incomplete weights, or has another temperature, top-p, top-k, "
    "tokenizer or dtype",
}
"""Advice for each alarm, shown with it in logs and `tba status`."""


class AlarmSection(StrictModel):
    """One alarm."""

    PATIENCE_STEPS: ClassVar[int] = 1
    """It goes off when its condition has held for this many steps in a row, and again after as many more."""
    action: Action = "none"
    """Action: none, skip, pause, rollback or fail."""


class NonFiniteSection(AlarmSection):
    """The loss or the gradient is NaN or infinite. Such a batch is never applied, whatever the action."""

    action: Action = "skip"
    """Action: none, skip, pause, rollback or fail."""


class GradSpikeSection(AlarmSection):
    """The gradient norm is far above what it was."""

    factor: float = Field(default=10.0, gt=1)
    """The condition: norm before clipping > this * median of the norms of the last batches with a reward signal, whose
    rewards differ within a group (a spike counts as this * median there)."""
    WINDOW_STEPS: ClassVar[int] = 32
    """Batches that the median is taken over, applied ones and spikes; with fewer than a quarter of them nothing is
    known."""


class EssCollapseSection(AlarmSection):
    """The importance weights between theta and the behaviour policies rest on few rollouts."""

    PATIENCE_STEPS: ClassVar[int] = 5
    """One batch of old data is nothing to report; five of them are a course."""
    MIN_ESS: ClassVar[float] = 0.1
    """The condition: effective sample size / number of rollouts < this. It is never below 1 / number of rollouts."""


class LogRatioDriftSection(AlarmSection):
    """Theta has moved far away from the policies that made its data."""

    PATIENCE_STEPS: ClassVar[int] = 5
    """One batch of old data is nothing to report; five of them are a course."""
    MAX_LOG_RATIO: ClassVar[float] = 0.5
    """The condition: |mean of log pi_theta - log pi_behaviour per token| > this, in nats."""


class OnPolicyGapSection(AlarmSection):
    """At policy age 0 the sampler's log-probs are not the trainer's: no rounding in their dtypes explains the gap."""

    action: Action = "fail"
    """Action: none, skip, pause, rollback or fail."""


class GuardsSection(StrictModel):
    """Alarms of the trainer, and the limits of what they may do."""

    non_finite: NonFiniteSection = NonFiniteSection()
    grad_spike: GradSpikeSection = GradSpikeSection()
    ess_collapse: EssCollapseSection = EssCollapseSection()
    log_ratio_drift: LogRatioDriftSection = LogRatioDriftSection()
    on_policy_gap: OnPolicyGapSection = OnPolicyGapSection()
    MAX_SKIPPED_IN_ROW: ClassVar[int] = 10
    """More batches skipped in a row, for whatever reason, fail the run."""
    MAX_ROLLBACKS: ClassVar[int] = 3
    """Rollbacks of the whole run; the alarm that asks for one more fails it."""

    def check_batch(self, num_rollouts: int) -> None:
        """Refuse an action that is never taken."""
        # the effective share of N weights is 1/N at the least, where one rollout has all the weight
        least, alarm = 1 / num_rollouts, self.ess_collapse
        if alarm.action != "none" and least >= alarm.MIN_ESS:
            raise ValueError(
                f'trainer.guards.ess_collapse.action is "{alarm.action}" and can never be taken: it is for a share '
                f"below {alarm.MIN_ESS:g}, and that of {num_rollouts} rollouts is never below {least:g}; remove it"
            )


class LoraSection(StrictModel):
    """Train an adapter of low rank on the linear layers and leave the model's own weights as they are (arXiv
    2106.09685). Constant within a run."""

    rank: int = Field(default=16, ge=1, le=65_536)
    """Rank of every adapter."""
    alpha: int = Field(default=32, ge=1, le=2_147_483_648)
    """The adapter's output is scaled by alpha / rank."""
    target_modules: list[str] | None = Field(default=None, min_length=1)
    """Last parts of the names of the layers that get an adapter, for example `["q_proj", "v_proj"]`; none: every linear
    layer but the output head."""


class ShardingSection(StrictModel):
    """How a model is shared by several processes (torch FSDP2). Without effect in one process."""

    context: int = Field(default=1, ge=1)
    """Processes that follow one another and share every sequence (context parallelism): each keeps the activations of
    its part, and keys and values of a layer are gathered for attention. `micro_batch_tokens` is then of such a group.
    A divisor of `num_processes`."""


class WandbSection(StrictModel):
    """Weights & Biases (`pip install 'tba[wandb]'`)."""

    project: str = Field(default="tba", min_length=1)
    """Project of the runs. Account, team, address and `offline` are in the variables of the package: WANDB_*."""


class TrackingSection(StrictModel):
    """Every step and every finished evaluation go to metrics.jsonl, and to the trackers that are named here."""

    metrics_path: str = Field(default="metrics.jsonl", min_length=1)
    """JSON lines, appended; `tba run` takes a relative path to be in the run folder."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard (`pip install 'tba[tensorboard]'`); none: off. `tba run` takes a
    relative path to be in the run folder."""
    wandb: WandbSection | None = None
    """Weights & Biases; none: off."""
    trackers: list[str] = Field(default_factory=list)
    """Trackers of your own: MODULE:NAME (docs/extending.md)."""


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
    """AdamW decoupled weight decay, of all weights but norms and biases."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """Gradient clipping by global norm. Norms differ by orders of magnitude between aggregations and lengths, and a
    clip that is always active makes every step a normalised one (metric `grad_clipped`). None: gradients are clipped at
    twice the median norm of the last 32 steps, once a quarter of them are known (the first steps are not clipped)."""
    micro_batch_tokens: int = Field(default=16_384, ge=1)
    """Most tokens of one forward and backward pass (a longer rollout goes alone). Micro-batches have about the same
    number of tokens, without padding for the model families in docs/trainer.md. With `sharding.context` each of so many
    processes has a part of them."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    compile: bool = False
    """torch.compile the decoder layers; the first pass takes a minute longer."""
    deterministic: bool = False
    """On a GPU, use only kernels that give the same bits each time; an op that has none is an error."""
    device: str = "cpu"
    """torch device. With several processes `cuda`, without a number: each takes a GPU of its own."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast; master weights and optimizer stay float32. Several processes send weights in 16 bits, and sum
    gradients in float32."""
    torch_num_threads: int = Field(default=1, ge=1)
    """Threads on CPU."""
    num_processes: int = Field(default=1, ge=1)
    """Processes that `tba run` starts the trainer in, one per GPU; the model is sharded over them. On several machines
    torchrun starts them, and this number is not read."""
    sharding: ShardingSection = ShardingSection()
    """How the model is sharded over them."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """With several processes: how long one waits for the others in an exchange, or several machines for each other at
    the start, before all give up."""
    sync_interval: int = Field(default=4, ge=1)
    """k: publish a version and mark the buffer every k optimizer steps."""
    checkpoint_interval: int = Field(default=50, ge=1)
    """Steps between checkpoints; one more is written at the end."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Older checkpoints are deleted, except the newest one that a good step followed: a rollback goes back to it."""
    keep_versions: int = Field(default=8, ge=2)
    """Older weight versions are deleted, except those that a component or an evaluation still holds. With
    `sampling.lag_steps` those since the version that searchers sample with are kept too."""
    prefetch_batches: int = Field(default=1, ge=0)
    """Batches fetched ahead while a step runs."""
    batch_wait_s: float = Field(default=600.0, gt=0)
    """Deadline of the wait for a batch."""
    shuffle_rewards: bool = False
    """Control experiment: rewards are shuffled among the rollouts of a batch, so nothing can be learned."""
    export: bool = True
    """At the end, write the last version as a Hugging Face folder to the store and, with `tba run`, the run folder."""
    guards: GuardsSection = GuardsSection()
    """Alarms, and what they do."""
