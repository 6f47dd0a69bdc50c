"""One optimizer step in two halves: `gradients` computes the gradients of a batch, `apply` changes the weights.

The loop acks the batch between the halves, so a refused ack only wastes one gradient. This module also has AdamW with
its state as named tensors, and the part of a checkpoint that is not a tensor (`TrainerState`, state.json).
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from tba.config import Recipe, TrainerSection
from tba.config.trainer import LoraSection
from tba.errors import ConfigError, TbaError
from tba.versions import START, PolicyVersion
from tba.wire import Batch
from tba_trainer.learner.batch_metrics import batch_metrics, gap_limit
from tba_trainer.learner.forward_backward import ALONE, ForwardBackward, ForwardResult, Ranks
from tba_trainer.learner.guards import GuardState
from tba_trainer.learner.old_policy import OldPolicy
from tba_trainer.learner.reference import make_reference
from tba_trainer.learner.schedules import StepValues, scheduled
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.parameters import assign, full, has_adapter, trainable
from tba_trainer.model.policy import compile_layers, load_tensors
from tba_trainer.model.sharding import device_of
from tba_trainer.model.slices import Layout, Rows, TensorSlice, written_bytes, written_slices
from tba_trainer.objectives import resolve

MODEL, OPTIMIZER, REFERENCE, REF_LOGPROBS = "model", "optimizer", "reference", "ref_logprobs"
OLD_POLICY, OLD_LOGPROBS = "old_policy", "old_logprobs"
"""Sections of a checkpoint."""
SHARDED_SECTIONS = (MODEL, OPTIMIZER, REFERENCE, OLD_POLICY)
"""Sections whose tensors are sharded as theta is."""
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""State of AdamW per parameter."""
MAX_GRAD_NORM_RATIO = 2.0
"""If the recipe has no `max_grad_norm`, gradients are clipped at this multiple of the usual norm."""
_RNG_STREAM = 0x7261
"""Keeps the trainer's random numbers apart from those of other services with the same seed."""


class Learner:
    """The policy with its optimizer, reference and random numbers.

    Args:
        model: theta, float32 master weights on `trainer.device`.
        recipe: the recipe of the run.
        rng: the trainer's random generator (for `shuffle_rewards`); a checkpoint keeps its state.
        ranks: the processes that share every batch; all make the same calls with the same arguments.
    """

    def __init__(self, model: Any, recipe: Recipe, rng: np.random.Generator, *, ranks: Ranks = ALONE) -> None:
        self.model, self.rng, self._ranks = model, rng, ranks
        self._recipe, self._tasks_with_minimum = recipe, recipe.searcher.tasks_with_minimum
        autocast_dtype = torch.bfloat16 if recipe.trainer.compute_dtype == "bfloat16" else None
        self._policy = LogprobModel(model, temperature=recipe.model.policy_temperature, autocast_dtype=autocast_dtype)
        self.objective = resolve(recipe.objective, max_response_tokens=recipe.searcher.max_response_tokens)
        self.optimizer = Optimizer(model, recipe.trainer)
        if recipe.trainer.compile:  # theta alone: copies such as the reference are not compiled
            compile_layers(model)
        self.reference = make_reference(self.objective, recipe, self._policy, autocast_dtype, self._ranks)
        self.results: list[ForwardResult] = []
        """Results of the last call of `gradients`, in the order of its batch."""
        self._old_policy: OldPolicy | None = None
        if self.objective.function is None and self.objective.parts.old_policy == "trainer":
            self._old_policy = OldPolicy(
                model,
                self._policy,
                max_versions=recipe.objective.old_policy_versions,
                max_cached=recipe.buffer.max_rollouts,
                micro_batch_tokens=recipe.trainer.micro_batch_tokens,
                ranks=self._ranks,
            )
            self._old_policy.remember(START)  # in every process, while all of them build

    def gradients(
        self,
        batch: Batch,
        *,
        step: int,
        policy_ages: Sequence[int],
        values: StepValues | None = None,
        usual_grad_norm: float | None = None,
    ) -> dict[str, float | None]:
        """Compute the gradients of one batch for optimizer step `step`; the weights stay as they are.

        Args:
            batch: only rollouts that can be trained on (`filter_batch`), at least one.
            step: the optimizer step that the gradients are for.
            policy_ages: [N] of `batch.rollouts`, in optimizer steps.
            values: learning rate and beta of this step; None: the recipe's schedules.
            usual_grad_norm: the median of the last norms, for relative clipping; None: not known yet.

        Returns:
            Metrics of the step. If the loss or the gradient norm is NaN or infinite, the caller must skip the step and
            not apply it. `results` then has the result of each rollout.
        """
        recipe, old_policy = self._recipe, self._old_policy
        rewards = np.array([r.reward for r in batch.rollouts], dtype=np.float64)
        # Control experiment: nothing can be learned from shuffled rewards, so whatever still improves is an artefact.
        if recipe.trainer.shuffle_rewards:
            rewards = self.rng.permutation(rewards)
        values = values or scheduled(recipe, step=step)
        forward_backward = ForwardBackward(
            self._policy,
            self.objective,
            batch.rollouts,
            groups=batch.group_numbers,
            rewards=rewards,
            reference=self.reference.logprobs,
            old_policy=None if old_policy is None else old_policy.logprobs,
            policy_ages=policy_ages,
            beta=values.beta,
            micro_batch_tokens=recipe.trainer.micro_batch_tokens,
            ranks=self._ranks,
        )
        self.optimizer.discard()  # `backward` adds to the gradients that are there
        metrics = forward_backward.backward()
        # Clipped here, not in `apply`: the guards read the norm before they decide whether there is an `apply` at all.
        clip = self.optimizer.clip(usual_grad_norm)
        self.results = forward_backward.results()
        metrics |= batch_metrics(
            self.results,
            step=step,
            success_reward=recipe.eval.success_reward,
            policy_temperature=recipe.model.policy_temperature,
            tasks_with_minimum=self._tasks_with_minimum,
            max_gap=gap_limit(recipe),
            has_foreign_start=recipe.run.snapshot is not None,
        )
        metrics |= clip
        if old_policy is not None:
            metrics["old_policy_missing_tokens"] = float(old_policy.num_missing_tokens)
        return {**metrics, "learning_rate": values.learning_rate, "beta": values.beta}

    def apply(self, *, step: int, lineage: int, values: StepValues | None = None) -> None:
        """Update the weights with the current gradients, then reset the reference if that is due at this step.

        Args:
            step: the number of this optimizer step.
            lineage: lineage of this trainer, for the version of a new reference.
            values: learning rate of this step; None: the recipe's schedules.
        """
        values = values or scheduled(self._recipe, step=step)
        # The order matters: a reset at this step makes the weights *after* the update the new reference.
        self.optimizer.apply(learning_rate=values.learning_rate)
        self.reference.after_step(PolicyVersion(lineage, step))

    def skip(self, *, step: int, lineage: int) -> None:
        """Drop the gradients instead of applying them, then reset the reference if that is due at this step."""
        self.discard()
        self.reference.after_step(PolicyVersion(lineage, step))

    def discard(self) -> None:
        """Drop the current gradients."""
        self.optimizer.discard()

    def remember(self, version: PolicyVersion, *, same_as: PolicyVersion | None = None) -> None:
        """Keep a copy of theta, published as `version`, if the trainer computes behaviour log-probs again.

        Args:
            same_as: an earlier version with the same weights; its copy then serves both.
        """
        if self._old_policy is not None:
            self._old_policy.remember(version, same_as=same_as)

    def load_weights(self, tensors: Mapping[str, Tensor], *, what: str) -> None:
        """Load whole tensors, named as published, into theta. Optimizer and reference stay; `what` is for messages.

        Raises:
            ConfigError: theta is an adapter, which cannot hold merged weights.
            TbaError: names or shapes are not those of this model.
        """
        if has_adapter(self.model):
            raise ConfigError(
                f"{what} has no checkpoint, and its weights are merged: with [model.lora] a run can only be forked "
                "from a version that has one (multiples of trainer.checkpoint_interval, and the last)"
            )
        load_tensors(dict(self.model.named_parameters()), tensors, what=what)

    def capture(self) -> Rows:
        """Return this process's rows of all tensors that `restore` needs; iteration copies them one at a time.

        Nothing is sent between processes, so each may call it at another time.
        """
        sections: dict[str, Mapping[str, Tensor]] = {
            MODEL: trainable(self.model),
            OPTIMIZER: self.optimizer.state_tensors(),
            # the cache too: computed again in another micro-batch, a ref log-prob may differ in the last bit
            REF_LOGPROBS: self.reference.cache.tensors(),
        }
        if not self.reference.is_start:  # the starting model is at model.path
            sections[REFERENCE] = self.reference.tensors()
        if self._old_policy is not None:
            sections[OLD_POLICY] = self._old_policy.tensors()
            sections[OLD_LOGPROBS] = self._old_policy.cache.tensors()
        layout = self.layout()

        def copies() -> Iterator[tuple[str, str, TensorSlice]]:
            for section, tensors in sections.items():
                for name, rows in written_slices(tensors, layout):
                    yield section, name, rows

        return Rows(copies, sum(written_bytes(tensors, layout) for tensors in sections.values()))

    def layout(self) -> Layout:
        """Return how theta is sharded over the processes."""
        return Layout.of(trainable(self.model))

    def restore(self, state: TrainerState, sections: Mapping[str, Mapping[str, TensorSlice]]) -> None:
        """Put the learner into the state of a checkpoint.

        Args:
            state: the content of the checkpoint's state.json.
            sections: the rows that this process holds, by section and name; each is read on access.
        """
        what = f"checkpoint {state.version}"
        # With LoRA the section holds the adapter alone: the frozen weights are those of model.path, which never change.
        load_tensors(trainable(self.model), sections[MODEL], what=what)
        self.optimizer.load_state_tensors(sections.get(OPTIMIZER, {}))
        if REFERENCE in sections:
            self.reference.load(sections[REFERENCE], PolicyVersion.parse(state.reference_version))
        self.reference.cache.load({name: rows.whole for name, rows in sections[REF_LOGPROBS].items()})
        # a recipe may ask for them only from this resume on
        if self._old_policy is not None and OLD_LOGPROBS in sections:
            self._old_policy.load(sections.get(OLD_POLICY, {}))
            self._old_policy.cache.load({name: rows.whole for name, rows in sections[OLD_LOGPROBS].items()})
        # building the model has drawn some numbers, for the first values of an adapter: that is undone here
        self.rng.bit_generator.state = state.rng
        torch_rng = np.frombuffer(base64.b64decode(state.torch_rng), dtype=np.uint8)
        torch.set_rng_state(torch.from_numpy(torch_rng.copy()))


class Optimizer:
    """AdamW of a model; every step is given its learning rate."""

    def __init__(self, model: Any, section: TrainerSection) -> None:
        self._max_grad_norm = section.max_grad_norm
        self._parameters = trainable(model)
        # norms and biases are not decayed, as in transformers and TRL; the biases of experts are matrices
        decayed = [each for name, each in self._parameters.items() if each.ndim > 1 and not name.endswith("bias")]
        others = [each for name, each in self._parameters.items() if each.ndim <= 1 or name.endswith("bias")]
        self._adamw = torch.optim.AdamW(
            [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
            lr=0.0,  # `apply` sets the rate of each step
            betas=(section.adam_beta1, section.adam_beta2),
            weight_decay=section.weight_decay,
            # one kernel for all parameters, as torch recommends on CUDA; on CPUs its default
            fused=device_of(model).type == "cuda" or None,
        )

    def clip(self, usual_norm: float | None) -> dict[str, float | None]:
        """Clip the gradient by global norm.

        Args:
            usual_norm: without `max_grad_norm`, MAX_GRAD_NORM_RATIO times this is the limit; None: not known yet.

        Returns:
            `grad_norm` before clipping, which may be NaN or infinite; `grad_clipped`, 1 or 0; and `grad_norm_limit`,
            None without a limit.
        """
        limit = self._max_grad_norm
        if limit is None and usual_norm is not None:
            limit = MAX_GRAD_NORM_RATIO * usual_norm
        # One norm over all parameters and all shards: with FSDP2 the norm is a DTensor, whole only after a collective.
        parameters = list(self._parameters.values())
        norm = float(full(torch.nn.utils.clip_grad_norm_(parameters, max_norm=math.inf if limit is None else limit)))
        return {"grad_norm": norm, "grad_clipped": float(limit is not None and norm > limit), "grad_norm_limit": limit}

    def use_fused(self) -> None:
        """Switch to the fused kernel that CUDA uses, so that a memory trace on the CPU counts as on a GPU."""
        for group in self._adamw.param_groups:
            group["fused"] = True

    def apply(self, *, learning_rate: float) -> None:
        """Make an optimizer step with the current gradients, then drop them."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self.discard()

    def discard(self) -> None:
        """Drop the gradients."""
        # None, not zeros: a parameter without a gradient is then left out of the update, and the memory is free.
        self._adamw.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return `exp_avg.NAME`, `exp_avg_sq.NAME` and `step.NAME` of every parameter updated so far; the moments are
        sharded as the parameter is."""
        return {
            f"{moment}.{name}": self._adamw.state[parameter][moment]
            for moment in _MOMENTS
            for name, parameter in self._parameters.items()
            if moment in self._adamw.state.get(parameter, {})  # a parameter has no state before its first update
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor] | Mapping[str, TensorSlice]) -> None:
        """Replace the state by that of a checkpoint; TbaError if a tensor fits no parameter."""
        # By name and not by position, as torch's own state_dict has it: another order of parameters changes nothing.
        self._adamw.state.clear()
        for key, tensor in tensors.items():
            moment, _, name = key.partition(".")
            parameter = self._parameters.get(name)
            if parameter is None or moment not in _MOMENTS:
                raise TbaError(f"optimizer state {key!r} in the checkpoint belongs to no parameter of this model")
            if moment == "step":  # the fused AdamW keeps it beside the parameter, others on the CPU
                is_fused = self._adamw.param_groups[0]["fused"]
                whole = tensor.whole if isinstance(tensor, TensorSlice) else tensor
                self._adamw.state[parameter][moment] = whole.clone().to(parameter.device if is_fused else "cpu")
                continue
            if tensor.shape != parameter.shape:
                raise TbaError(
                    f"optimizer state {key!r} has shape {list(tensor.shape)}, the model {list(parameter.shape)}"
                )
            self._adamw.state[parameter][moment] = torch.empty_like(parameter, requires_grad=False)
            assign(self._adamw.state[parameter][moment], tensor)


class TrainerState(BaseModel):
    """state.json of a checkpoint. Schedules and the ledger need no field: their position is the step of `version`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    run: str
    version: str
    train_s: float
    num_rollouts_trained: int
    reference_version: str
    rng: dict[str, Any]
    torch_rng: str
    config_sha256: str
    model_config_sha256: str
    policy_temperature: float
    lora: LoraSection | None = None
    guards: GuardState = GuardState()
    """State of the guards after the last step."""
    previous: str | None = None
    """Version of the checkpoint before this one; null: this is the first one of the run."""
    settings_revision: int = 0
    """Revision of the live settings that the version was trained with; 0: the recipe's values."""


def config_sha256(recipe: Recipe) -> str:
    """Return the digest of the recipe's sections that decide training; addresses, which may change, are not in them."""
    # Another digest at a resume is legitimate (more steps, another rate) and is only logged.
    trained = {"run", "model", "sampling", "searcher", "objective", "trainer", "eval"}
    return hashlib.sha256(recipe.model_dump_json(include=trained).encode()).hexdigest()


def trainer_rng(recipe: Recipe) -> np.random.Generator:
    """Return the trainer's random generator as it is at the beginning of a run."""
    return np.random.default_rng([recipe.run.seed, _RNG_STREAM])


def encode_torch_rng() -> str:
    """Return torch's random state as base64 text."""
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
