"""Models with random weights, batches and recipes for the checks."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import torch
from tba_trainer.learner.forward_backward import pack_rollouts
from tba_trainer.learner.learner import Learner, trainer_rng
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.policy import prepare
from torch import Tensor

from benchmarks.gpu_bench.check import Bench
from benchmarks.trainer_bench.workload import make_rollouts
from tba.config import Recipe, parse_recipe
from tba.wire import Batch, Group, float32_bytes

QWEN2_SHAPES = MappingProxyType(
    {
        # hidden, layers, heads, key-value heads, intermediate, vocabulary, tied
        "tiny": (64, 2, 4, 2, 128, 512, True),
        "0.5b-4-layers": (896, 4, 14, 2, 4864, 151_936, True),
        "0.5b": (896, 24, 14, 2, 4864, 151_936, True),
        "1.5b": (1536, 28, 12, 2, 8960, 151_936, True),
        "7b": (3584, 28, 28, 4, 18_944, 152_064, False),
    }
)
"""Those of Qwen2.5; docs of the models are their config.json."""
LORA = {"rank": 16, "alpha": 32.0}


def qwen2_config(size: str, **others: Any) -> Any:
    """Return a config with the shape of a Qwen2.5."""
    from transformers import AutoConfig

    hidden, layers, heads, kv_heads, intermediate, vocab_size, tied = QWEN2_SHAPES[size]
    return AutoConfig.for_model(
        "qwen2",
        **{
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": intermediate,
            "vocab_size": vocab_size,
            "tie_word_embeddings": tied,
            "max_position_embeddings": 32_768,
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": 0,
            **others,
        },
    )


def random_model(config: Any, device: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Return a model with random weights, made on the device, in eval mode."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def recipe_of(bench: Bench, **sections: dict[str, Any]) -> Recipe:
    """Return a recipe for the device; `sections` override keys. Its model is never loaded from `model.path`."""
    document: dict[str, dict[str, Any]] = {
        "run": {"name": "gpu"},
        "model": {"path": str(bench.folder / "model")},
        "data": {"generator": "addition"},
        "objective": {"preset": "tba_prime"},
        "trainer": {"device": bench.device, "learning_rate": {"value": 1e-5}, "max_grad_norm": 1.0},
        "searcher": {"max_prompt_tokens": 512, "max_response_tokens": 8192},
    }
    for name, values in sections.items():
        document[name] = {**document.get(name, {}), **values}
    return parse_recipe(document, where="gpu_bench")


def make_learner(model: Any, recipe: Recipe) -> Learner:
    """Return the trainer's learner of a model, prepared as a run prepares it."""
    section = recipe.trainer
    return Learner(prepare(model, recipe.model.lora, section.gradient_checkpointing), recipe, trainer_rng(recipe))


def make_batch(
    num_groups: int,
    group_size: int,
    longest: int,
    vocab_size: int,
    *,
    policy: LogprobModel | None = None,
    seed: int = 0,
) -> Batch:
    """Return groups of rollouts of `longest` / 16 to `longest` tokens, lengths spread evenly in their logarithm.

    Args:
        policy: gives the sampler's log-probs, moved by a little noise, as those of an engine are; None: a constant.
    """
    rollouts, rewards = make_rollouts(
        num_groups, group_size, longest, spread="log-uniform", vocab_size=vocab_size, seed=seed
    )
    rng = np.random.default_rng(seed)
    groups: dict[str, list[Any]] = {}
    for rollout, reward in zip(rollouts, rewards, strict=True):
        logprobs = rollout.sampler_logprobs
        if policy is not None:
            with torch.no_grad():
                found = policy.token_logprobs(pack_rollouts([rollout], policy.device)).float().cpu().numpy()
            logprobs = found + 0.01 * rng.standard_normal(len(found))
        # a little more than 0 and 1: no group has equal rewards, which would need no pass
        moved = msgspec.structs.replace(
            rollout, reward=float(reward + 0.1 * rng.random()), logprob_bytes=float32_bytes(logprobs)
        )
        groups.setdefault(rollout.prompt_id, []).append(moved)
    return batch_of(list(groups.values()))


def batch_of(groups: Sequence[Sequence[Any]]) -> Batch:
    """Return the batch of these groups of rollouts."""
    made = [
        Group(prompt_id=group[0].prompt_id, source="recent", fallback=False, rollouts=tuple(group)) for group in groups
    ]
    return Batch(batch_id="gpu", deadline_s=0.0, seed=0, log_position=0, groups=tuple(made))


def num_tokens_of(batch: Batch) -> int:
    """Return the prompt and response tokens of a batch."""
    return sum(len(r.prompt_tokens) + len(r.response_tokens) for r in batch.rollouts)


def gradient_of(model: Any) -> Tensor:
    """Return the gradients of a model, one after another, in float32 on its device."""
    found = [p.grad.detach().flatten().float() for p in model.parameters() if p.grad is not None]
    return torch.cat(found)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return ||found - expected|| / ||expected||."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm())


def direction_error(found: Tensor, expected: Tensor) -> float:
    """Return the relative error of the direction of a vector."""
    return relative_error(found / found.norm(), expected / expected.norm())
