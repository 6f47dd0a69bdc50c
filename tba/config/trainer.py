"""The trainer: optimizer, steps, publication, checkpoints, guards (docs/trainer.md), LoRA and trackers."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from tba.config.schedules import LearningRate, Schedule
from tba.fields import StrictModel

Action = Literal["none", "skip", "pause", "rollback", "fail"]
"""Action when an alarm goes off, mildest first.

    none      the alarm is only logged, counted and shown
    skip      the batch is not applied; the ledger holds the step as skipped
    pause     the batch is skipped, and the run is paused until `tba resume`
    rollback  the batch is skipped, and training continues from the last checkpoint in a new lineage
    fail      the batch is skipped, and the run fails; the next start of the trainer continues from the last checkpoint
"""


REMEDIES = {
    "non_finite": "look at the rewards of the last rollouts (`tba rollouts list`); with bfloat16 try "
    'trainer.compute_dtype = "float32"; if it comes again, lower the learning rate (`tba set learning_rate=...`)',
    "grad_spike": "lower the learning rate (`tba set learning_rate=...`) or trainer.max_grad_norm, or let "
    'trainer.guards.grad_spike.action = "skip" leave such batches out',
    "ess_collapse": "the policy is too far from its data: lower the learning rate, raise beta or most_on_policy_prob "
    "(`tba set`), or lower buffer.max_policy_age_steps or trainer.sync_interval",
    "log_ratio_drift": "the policy moves faster than its data: lower the learning rate, raise beta or "
    "most_on_policy_prob (`tba set`), or lower trainer.sync_interval",
    "on_policy_gap": "the engine of the searchers computes another model than the trainer: it decodes otherwise (a "
    "sliding window, another attention), holds other or incomplete weights, or has another temperature, top-p, top-k, "
    "tokenizer or dtype",
}
"""Advice for each alarm, shown with it in logs and `tba status`."""


class AlarmSection(StrictModel):
    """The settings of one alarm of the guards."""

    PATIENCE_STEPS: ClassVar[int] = 1
    """The alarm goes off when its condition has held for this many steps in a row, and again after as many more."""
    action: Action = "none"
    """Action: none, skip, pause, rollback or fail."""


class NonFiniteSection(AlarmSection):
    """The loss or the gradient is NaN or infinite. Such a batch is never applied, whatever the action."""

    action: Action = "skip"
    """Action: none, skip, pause, rollback or fail."""


class GradSpikeSection(AlarmSection):
    """The gradient norm is far above its recent median."""

    factor: float = Field(default=10.0, gt=1)
    """Condition: gradient norm before clipping > this * median norm of recent batches with a reward signal, which means
    that rewards differ within a group. A spike counts in the median as this * median."""
    WINDOW_STEPS: ClassVar[int] = 32
    """Most batches in the median, applied ones and spikes; with less than a quarter of this there is no median."""


class EssCollapseSection(AlarmSection):
    """A few rollouts have nearly all of the importance weight between theta and the behaviour policies."""

    PATIENCE_STEPS: ClassVar[int] = 5
    """Five steps: a single batch of old data is no trend."""
    MIN_ESS: ClassVar[float] = 0.1
    """Condition: effective sample size / number of rollouts < this. The ratio is at least 1 / number of rollouts."""


class LogRatioDriftSection(AlarmSection):
    """Theta has moved far away from the behaviour policies that sampled its data."""

    PATIENCE_STEPS: ClassVar[int] = 5
    """Five steps: a single batch of old data is no trend."""
    MAX_LOG_RATIO: ClassVar[float] = 0.5
    """Condition: |mean over tokens of (log pi_theta - log pi_behaviour)| > this, in nats."""


class OnPolicyGapSection(AlarmSection):
    """At policy age 0, sampler and trainer log-probs differ by more than rounding in their dtypes can explain."""

    action: Action = "fail"
    """Action: none, skip, pause, rollback or fail."""


class GuardsSection(StrictModel):
    """Alarms of the trainer, and limits on their actions."""

    non_finite: NonFiniteSection = NonFiniteSection()
    grad_spike: GradSpikeSection = GradSpikeSection()
    ess_collapse: EssCollapseSection = EssCollapseSection()
    log_ratio_drift: LogRatioDriftSection = LogRatioDriftSection()
    on_policy_gap: OnPolicyGapSection = OnPolicyGapSection()
    MAX_SKIPPED_IN_ROW: ClassVar[int] = 10
    """Most batches skipped in a row, for whatever reason; one more fails the run."""
    MAX_ROLLBACKS: ClassVar[int] = 3
    """Most rollbacks by alarms in the whole run; an alarm that needs one more fails the run."""

    def check_batch(self, num_rollouts: int) -> None:
        """Raise ValueError if an alarm has an action, but can never go off with batches of this size."""
        # the effective share of N weights is 1/N at the least, where one rollout has all the weight
        least, alarm = 1 / num_rollouts, self.ess_collapse
        if alarm.action != "none" and least >= alarm.MIN_ESS:
            raise ValueError(
                f'trainer.guards.ess_collapse.action is "{alarm.action}" and can never be taken: it is for a share '
                f"below {alarm.MIN_ESS:g}, and that of {num_rollouts} rollouts is never below {least:g}; remove it"
            )


class LoraSection(StrictModel):
    """Train LoRA adapters (arXiv 2106.09685) on the linear layers and freeze the model. Constant within a run."""

    rank: int = Field(default=16, ge=1, le=65_536)
    """Rank of every adapter."""
    alpha: int = Field(default=32, ge=1, le=2_147_483_648)
    """The adapter's output is scaled by alpha / rank."""
    target_modules: list[str] | None = Field(default=None, min_length=1)
    """Layers that get an adapter, by the last part of their names, for example `["q_proj", "v_proj"]`; none: every
    linear layer but the output head."""


class ShardingSection(StrictModel):
    """Sharding of the model over several processes (torch FSDP2). It has no effect with one process."""

    context: int = Field(default=1, ge=1)
    """Size of the groups of successive processes that split every sequence (context parallelism), a divisor of
    `num_processes`. Each process keeps the activations of its part; keys and values of a layer are gathered for
    attention. `micro_batch_tokens` is then the limit of a group."""


class WandbSection(StrictModel):
    """Weights & Biases (extra `wandb`)."""

    project: str = Field(default="tba", min_length=1)
    """Name of the W&B project. Set account, team, address and offline mode by W&B's environment variables, WANDB_*."""


class TrackingSection(StrictModel):
    """Outputs for the metrics of every step and of every finished evaluation: metrics.jsonl and trackers."""

    metrics_path: str = Field(default="metrics.jsonl", min_length=1)
    """File to append JSON lines to; with `tba run`, a relative path is relative to the run folder."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard (extra `tensorboard`); none: off. With `tba run`, a relative path is relative to the run
    folder."""
    wandb: WandbSection | None = None
    """Weights & Biases; none: off."""
    trackers: list[str] = Field(default_factory=list)
    """Trackers of your own: MODULE:NAME (docs/extending.md)."""


class TrainerSection(StrictModel):
    """Settings of the trainer and its training loop."""

    num_steps: int = Field(default=200, ge=1)
    """Number of optimizer steps of the run."""
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
    """Global norm above which gradients are clipped. Norms differ by orders of magnitude between aggregations and
    lengths, and a clip that is always active normalises every step (metric `grad_clipped`). None: clip at twice the
    median norm of the last 32 steps; the first steps, before a quarter of these are known, are not clipped."""
    micro_batch_tokens: int = Field(default=16_384, ge=1)
    """Most tokens of one forward and backward pass; a longer rollout is a micro-batch of its own. Micro-batches have
    about equally many tokens, without padding for the model families in docs/trainer.md. With `sharding.context`, a
    group of processes splits these tokens."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    compile: bool = False
    """torch.compile the decoder layers; the first pass takes a minute longer."""
    deterministic: bool = False
    """On a GPU, use only deterministic kernels; an operation without one is an error."""
    device: str = "cpu"
    """torch device. With several processes give `cuda` without a number: each process takes its own GPU."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast; master weights and optimizer state stay float32. Several processes exchange weights in 16
    bits, and sum gradients in float32."""
    torch_num_threads: int = Field(default=1, ge=1)
    """Number of torch's threads on the CPU; unset, `tba run` chooses by the machine."""
    num_processes: int = Field(default=1, ge=1)
    """Number of trainer processes that `tba run` starts, one per GPU; the model is sharded over them. On several
    machines torchrun starts them, and this number is not read."""
    sharding: ShardingSection = ShardingSection()
    """How the model is sharded over the processes."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that a process waits for the others (in an exchange, or for other machines at the start) until it fails.
    """
    sync_interval: int = Field(default=4, ge=1)
    """k: publish a version and announce it to the buffer every k optimizer steps."""
    checkpoint_interval: int = Field(default=50, ge=1)
    """Optimizer steps between checkpoints; one more is written at the end."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep. For rollbacks, the newest one that a good step followed is kept too."""
    keep_versions: int = Field(default=8, ge=2)
    """Number of newest weight versions to keep. Versions that a component or an evaluation still needs are kept too;
    with `sampling.lag_steps`, also all versions newer than the one that searchers sample with."""
    prefetch_batches: int = Field(default=1, ge=0)
    """Number of batches to fetch ahead while a step runs."""
    batch_wait_s: float = Field(default=600.0, gt=0)
    """Deadline of the wait for a batch."""
    shuffle_rewards: bool = False
    """Control experiment: shuffle the rewards among the rollouts of a batch, so that nothing can be learned."""
    export: bool = True
    """At the end, write the last version as a Hugging Face folder to the store and, with `tba run`, the run folder."""
    guards: GuardsSection = GuardsSection()
    """Alarms, and their actions."""
