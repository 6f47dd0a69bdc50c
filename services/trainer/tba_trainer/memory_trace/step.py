"""One optimizer step of a recipe on fake tensors, and the bytes that it holds at its peak.

The model has the shapes of its config, and every rollout the longest prompt and response of the recipe. One process is
traced, with the two largest micro-batches of the batch: the second runs while the gradients of the first are held, and
later ones need no more. With several processes FSDP2 shards the model over a process group that sends nothing.

A trace of the whole model takes minutes. All decoder layers are alike, so two models of few layers are traced, and
their numbers are extrapolated linearly to the number of layers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tba.config import Recipe
from tba.errors import ConfigError
from tba.versions import START
from tba.wire import Batch, Group, RefLogprob, Rollout, Sampling, VersionSpan, float32_bytes, single_turn
from tba_trainer.checkpoints.weight_files import WeightSnapshotWriter
from tba_trainer.distributed.process_group import mesh_of_all, ranks_of
from tba_trainer.learner.forward_backward import ALONE, Plan, Ranks, plan_micro_batches
from tba_trainer.learner.learner import Learner, trainer_rng
from tba_trainer.memory_trace.fake_device import FakeDevice, LiveBytes, cuda_branches
from tba_trainer.model.context import Context
from tba_trainer.model.parameters import trainable
from tba_trainer.model.policy import prepare
from tba_trainer.model.sharding import shard
from tba_trainer.objectives import resolve

LAYERS, LAYERS_SHARDED = (2, 3), (3, 4)
"""Numbers of layers of the two models that are traced. FSDP2 gathers up to three layers at once, so numbers grow
linearly only from three on."""
MAX_ERROR_CHARS = 200
"""Longest part of an error of transformers that is shown: it may list all models that transformers knows."""
TRACED_ROUNDS = 2
"""Micro-batches that each process goes through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """The bytes of one trainer process."""

    parameters: int
    reference: int
    """A second model for ref log-probs; 0: there is none, or it is the first one without its adapter."""
    published: int
    """A copy in the published dtype, for the canary of a version; 0: the model itself serves."""
    gradients: int
    optimizer: int
    forward_backward_peak: int
    """Most bytes while gradients are computed, the bytes of the fields above included."""
    update_peak: int
    """Most bytes while AdamW changes the weights."""

    @property
    def state(self) -> int:
        """Bytes that are held throughout the passes of every micro-batch after the first."""
        return self.parameters + self.reference + self.published + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """Most bytes at any time."""
        return max(self.forward_backward_peak, self.update_peak)


def trace_recipe(recipe: Recipe, config: Mapping[str, Any]) -> StepBytes:
    """Return the bytes that a trainer process holds in one step of the recipe.

    Args:
        config: `config.json` of the model, in Hugging Face format.

    Raises:
        ConfigError: transformers does not know the model, or torch cannot trace it.
    """
    found: dict[str, int] = {}
    try:
        for num_layers, factor in layers_to_trace(recipe, config).items():
            sizes = asdict(trace_step(recipe, config, num_layers=num_layers))
            found = {name: found.get(name, 0) + factor * each for name, each in sizes.items()}
    except RuntimeError as error:
        # torch has an op of the model for fewer dtypes on a CPU, or sizes do not fit together
        kind = config.get("model_type")
        raise ConfigError(f"a step of model_type {kind!r} cannot be traced on fake tensors ({error})") from error
    return StepBytes(**found)


def max_micro_batch_tokens(recipe: Recipe) -> int:
    """Return the number of tokens of the largest micro-batch if every rollout is as long as the recipe allows."""
    most = max(len(rows) for micro_batches in _plan(recipe) for rows in micro_batches)
    return most * (recipe.searcher.max_prompt_tokens + recipe.searcher.max_response_tokens)


def layers_to_trace(recipe: Recipe, config: Mapping[str, Any]) -> dict[int, int]:
    """Return the numbers of decoder layers of the models to trace, each with a factor.

    The bytes of the whole model are the sum over the traced models of factor times bytes.
    """
    whole = int(config[layers_key(config)])
    num, more = LAYERS if recipe.trainer.num_processes == 1 else LAYERS_SHARDED
    return {whole: 1} if whole <= more else {num: 1 + num - whole, more: whole - num}


def layers_key(config: Mapping[str, Any]) -> str:
    """Return the key under which a model's config has its number of decoder layers."""
    return "n_layer" if "n_layer" in config else "num_hidden_layers"


def trace_step(
    recipe: Recipe, config: Mapping[str, Any], *, num_layers: int, device: FakeDevice | None = None
) -> StepBytes:
    """Return the bytes of a step of the model with `num_layers` decoder layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device = device or FakeDevice()
    with cuda_branches(), _team(recipe) as (ranks, context), warnings.catch_warnings():
        # torch asks a parameter that it copies for its address, and a real tensor that it makes fake for its gradient
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        try:
            known = AutoConfig.for_model(**{**config, layers_key(config): num_layers})
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(known, dtype=torch.float32)
        except (ValueError, TypeError) as error:
            kind = config.get("model_type")
            raise ConfigError(
                f"transformers builds no language model from config.json of model.path (model_type {kind!r}): "
                f"{str(error).partition(chr(10))[0][:MAX_ERROR_CHARS]}"
            ) from None
        model = prepare(model, recipe.model.lora, recipe.trainer.gradient_checkpointing)
        if recipe.trainer.num_processes > 1:
            with device:
                mesh = mesh_of_all(device.type)
                shard(model, mesh, compute_dtype=recipe.trainer.compute_dtype, context=context)
        else:
            with device.fake_mode:
                model.to_empty(device=device.type)
                model.tie_weights()
        with device, LiveBytes(device.owns) as live:
            parameters = live.held
            learner = Learner(model, recipe, trainer_rng(recipe), ranks=ranks)
            live.restart()  # the probe of the output head is gone
            reference = live.held - parameters
            writer = WeightSnapshotWriter(model, recipe, folder=Path())  # writes nothing here
            live.restart()
            published = live.held - parameters - reference
            found = StepBytes(
                parameters=parameters, reference=reference, published=published, **measured(learner, recipe, live)
            )
            del writer
            return found


def measured(learner: Learner, recipe: Recipe, live: LiveBytes) -> dict[str, int]:
    """Make a step, on fake or real tensors. Return bytes of gradients, optimizer and peaks by field of `StepBytes`."""
    without = live.held
    optimizer = learner.optimizer
    for parameter in trainable(learner.model).values():
        parameter.grad = torch.empty_like(parameter)
    optimizer.use_fused()
    # the first update makes AdamW's moments; shard arithmetic looks whole tensors up once
    optimizer.clip(None)
    optimizer.apply(learning_rate=0.0)
    live.restart()
    moments = live.held - without
    batch = _batch(recipe, vocab_size=learner.model.config.get_text_config().vocab_size)
    learner.gradients(batch, step=1, policy_ages=[0] * len(batch.rollouts))
    forward_backward_peak = live.peak
    live.restart()
    gradients = live.held - without - moments
    optimizer.apply(learning_rate=0.0)
    peaks = {"forward_backward_peak": forward_backward_peak, "update_peak": live.peak}
    return {"gradients": gradients, "optimizer": moments, **peaks}


@contextmanager
def _team(recipe: Recipe) -> Iterator[tuple[Ranks, Context | None]]:
    """Join a fake process group as rank 0; yield its ranks and context group. One process joins none."""
    num_processes = recipe.trainer.num_processes
    if num_processes == 1:
        yield ALONE, None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=num_processes, store=FakeStore())
    try:
        context = Context.join(recipe.trainer.sharding.context)
        yield ranks_of(0, num_processes, context), context
    finally:
        dist.destroy_process_group()


def _plan(recipe: Recipe) -> Plan:
    """Return the micro-batches of a whole batch in which every rollout is as long as the recipe allows."""
    searcher, sampling = recipe.searcher, recipe.sampling
    objective = resolve(recipe.objective, max_response_tokens=searcher.max_response_tokens)
    num_rollouts = sampling.prompts_per_batch * sampling.group_size
    return plan_micro_batches(
        [searcher.max_prompt_tokens + searcher.max_response_tokens] * num_rollouts,
        [i // sampling.group_size for i in range(num_rollouts)],
        recipe.trainer.micro_batch_tokens,
        rows=range(num_rollouts),
        num_ranks=max(1, recipe.trainer.num_processes // recipe.trainer.sharding.context),
        keep_groups=objective.needs_complete_groups,
    )


def _batch(recipe: Recipe, *, vocab_size: int) -> Batch:
    """Return a batch of the rollouts of the first `TRACED_ROUNDS` rounds, the largest ones, in their groups."""
    rng, num_tokens = np.random.default_rng(0), recipe.searcher.max_response_tokens
    rounds = _plan(recipe)[:TRACED_ROUNDS]
    chosen = sorted(row for micro_batches in rounds for rows in micro_batches for row in rows)
    parts: list[list[int]] = []
    for _, members in groupby(chosen, lambda i: i // recipe.sampling.group_size):
        part = list(members)
        # what is left of a group may be one rollout, which alone has no advantage, and so no pass
        if parts and 1 in (len(part), len(parts[-1])):
            parts[-1] += part
        else:
            parts.append(part)
    groups = []
    for number, members in enumerate(parts):
        prompt_id, rollouts = f"prompt-{number}", []
        prompt = rng.integers(0, vocab_size, recipe.searcher.max_prompt_tokens)
        for _ in members:
            rollouts.append(
                Rollout(
                    rollout_id=rng.bytes(16),
                    run=recipe.run.name,
                    task="trace",
                    prompt_id=prompt_id,
                    visit_id=prompt_id,
                    sequences=single_turn(prompt, rng.integers(0, vocab_size, num_tokens), "stop"),
                    response_text="",
                    version_spans=(VersionSpan.of(START, 0, num_tokens),),
                    sampling=Sampling.of(recipe.model.policy_temperature),
                    logprob_bytes=float32_bytes(np.zeros(num_tokens)),
                    # as searchers make it where they do
                    ref_logprob=RefLogprob.of(0.0, START) if recipe.searchers_hold_start else None,
                    reward=float(rng.random()),  # no group of equal rewards, which would need no pass
                    reward_status="scored",
                    reward_reason=None,
                    reward_version="trace",
                    searcher_id="trace",
                    started_at_s=0.0,
                    finished_at_s=0.0,
                )
            )
        groups.append(Group(prompt_id=prompt_id, source="recent", fallback=False, rollouts=tuple(rollouts)))
    return Batch(batch_id="trace", deadline_s=0.0, seed=0, log_position=0, groups=tuple(groups))
